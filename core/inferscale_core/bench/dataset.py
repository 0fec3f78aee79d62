"""Facts, questions and turns that a benchmark runs on.

The built-in set is a conversation of two people over ten months, written for this project
(``conversation/*.jsonl``). Files of one's own have the same form, one JSON object a line:

- facts: ``text`` and ``date_iso``; optional ``id``, ``conv``, ``context`` (the turns that the fact
  comes from, one ``Speaker: text`` a line) or ``evidence`` (turn ids, for the built-in set);
- questions: ``question``; optional ``answer``, ``category``, ``conv``.

A LoCoMo conversation turned into such facts works as it is, one ``conv`` at a time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from inferscale_core.bench.errors import BenchError
from inferscale_core.client.models import MemoryIn, Turn

TURNS_BEFORE = 8
"""How many turns of the built-in conversation a fact brings along, its own last."""


@dataclass(frozen=True)
class Fact:
    id: str
    text: str
    date: datetime | None
    turns: tuple[Turn, ...] = ()

    def memory(self) -> MemoryIn:
        return MemoryIn(id=self.id, text=self.text, valid_at=self.date, turns=list(self.turns))


@dataclass(frozen=True)
class Question:
    text: str
    answer: str | None = None
    category: int | None = None
    demo: bool = False


@dataclass(frozen=True)
class Dataset:
    """``name`` is the conversation's; facts are in the order they were told."""

    name: str
    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]
    source: str = field(default="built-in")


def load(
    dataset: Path | None = None, questions: Path | None = None, conv: str | None = None
) -> Dataset:
    """Read the built-in conversation, or one conversation of the files given.

    Without ``questions`` a file of facts is asked the built-in questions, which it cannot answer
    but which cost as much. Raises BenchError naming the file and line that cannot be read.
    """
    builtin = Path(str(files("inferscale_core.bench") / "conversation"))
    facts_path = dataset or builtin / "facts.jsonl"
    questions_path = questions or builtin / "questions.jsonl"
    rows = list(_rows(facts_path, "text"))
    name = _choose_conversation(rows, conv, facts_path)
    turns = list(_rows(builtin / "turns.jsonl", "text")) if dataset is None else []
    facts = tuple(
        _fact(row, f"{name}/{index}", facts_path, turns)
        for index, row in enumerate(rows)
        if row.get("conv", name) == name
    )
    asked = tuple(
        Question(
            text=str(row["question"]),
            answer=None if row.get("answer") is None else str(row["answer"]),
            category=row.get("category"),
            demo=bool(row.get("demo")),
        )
        for row in _rows(questions_path, "question")
        if questions is None or row.get("conv", name) == name
    )
    if not asked:
        raise BenchError(f"{questions_path} holds no question for conversation {name!r}")
    return Dataset(name, facts, asked, "built-in" if dataset is None else str(dataset))


def _rows(path: Path, required: str) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BenchError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not row.get(required):
            raise BenchError(f"{path}:{number} has no {required!r}")
        yield row


def _choose_conversation(rows: list[dict[str, Any]], conv: str | None, path: Path) -> str:
    names = list(dict.fromkeys(str(row["conv"]) for row in rows if "conv" in row))
    if conv is None:
        if not rows:
            raise BenchError(f"{path} holds no facts")
        return names[0] if names else path.stem
    if conv not in names:
        raise BenchError(f"{path} has no conversation {conv!r}; it has {', '.join(names)}")
    return conv


def _fact(row: dict[str, Any], fallback_id: str, path: Path, turns: list[dict[str, Any]]) -> Fact:
    text = str(row["text"])
    date = row.get("date_iso")
    try:
        when = None if date is None else datetime.fromisoformat(date)
    except (TypeError, ValueError) as error:
        raise BenchError(f"{path}: date_iso {date!r} is not an ISO date") from error
    return Fact(str(row.get("id", fallback_id)), text, when, tuple(_turns_of(row, turns)))


def _turns_of(row: dict[str, Any], turns: list[dict[str, Any]]) -> Iterator[Turn]:
    if "context" in row:
        for line in str(row["context"]).splitlines():
            name, separator, content = line.partition(": ")
            yield Turn(name=name if separator else None, content=content if separator else line)
        return
    evidence = row.get("evidence") or []
    positions = [i for i, turn in enumerate(turns) if turn["id"] in evidence]
    if positions:
        end = positions[-1] + 1
        for turn in turns[max(0, end - TURNS_BEFORE) : end]:
            yield Turn(name=turn["speaker"], content=turn["text"])
