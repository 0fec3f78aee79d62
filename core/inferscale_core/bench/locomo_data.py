"""Reads LoCoMo's ``locomo10.json``: facts from its observations, and its questions.

The dataset is CC BY-NC 4.0 and not part of this project: github.com/snap-research/LoCoMo.
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from inferscale_core.bench.dataset import TURNS_BEFORE, Dataset, Fact, Question
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.scoring import CATEGORIES
from inferscale_core.client.models import Turn

_SESSION = re.compile(r"session_(\d+)_observation")
_DATE = "%I:%M %p on %d %B, %Y"


def load_locomo(path: Path, conv: str | None = None) -> list[Dataset]:
    """One dataset a conversation, or only ``conv``; adversarial questions are left out.

    Raises BenchError when the file is not LoCoMo's, or has no such conversation.
    """
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
        names = [str(sample["sample_id"]) for sample in samples]
        if conv is not None and conv not in names:
            raise BenchError(f"{path} has no conversation {conv!r}; it has {', '.join(names)}")
        return [_read(s, path) for s in samples if conv in (None, str(s["sample_id"]))]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"{path} is not in the format of locomo10.json ({type(error).__name__}: {error})"
        ) from error


def _read(sample: Mapping[str, Any], path: Path) -> Dataset:
    name = str(sample["sample_id"])
    facts = tuple(_facts(name, sample["observation"], sample["conversation"]))
    questions = tuple(
        Question(str(row["question"]), str(row["answer"]), int(row["category"]))
        for row in sample["qa"]
        if int(row["category"]) in CATEGORIES
    )
    return Dataset(name, facts, questions, str(path))


def _facts(
    name: str, observations: Mapping[str, Any], conversation: Mapping[str, Any]
) -> Iterator[Fact]:
    sessions = sorted(
        (int(match[1]), key) for key in observations if (match := _SESSION.fullmatch(key))
    )
    for number, key in sessions:
        when = datetime.strptime(str(conversation[f"session_{number}_date_time"]), _DATE)
        turns = conversation.get(f"session_{number}") or []
        for speaker, rows in observations[key].items():
            for place, (text, evidence) in enumerate(rows):
                yield Fact(
                    f"{name}/{number}/{speaker}/{place}",
                    str(text),
                    when,
                    tuple(_turns(turns, evidence)),
                )


def _turns(turns: list[Mapping[str, Any]], evidence: Any) -> Iterator[Turn]:
    ids = set(evidence if isinstance(evidence, list) else [evidence])
    places = [i for i, turn in enumerate(turns) if turn["dia_id"] in ids]
    if places:
        end = places[-1] + 1
        for turn in turns[max(0, end - TURNS_BEFORE) : end]:
            yield Turn(name=str(turn["speaker"]), content=str(turn["text"]))
