"""The LoCoMo benchmark: its input, its modes, and a run on the small model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferscale_core import models
from inferscale_core.bench.dataset import Dataset, Question
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.locomo import Rows, limited, summarise
from inferscale_core.bench.locomo_data import load_locomo
from inferscale_core.bench.modes import encoding_of
from inferscale_core.config import CoreConfig

SAMPLE: dict[str, Any] = {
    "sample_id": "conv-1",
    "qa": [
        {"question": "What does Ann play?", "answer": "cello", "category": 4},
        {"question": "When was it?", "answer": 2023, "category": 2},
        {"question": "What did Bob play?", "adversarial_answer": "cello", "category": 5},
    ],
    "conversation": {
        "session_2_date_time": "12:09 am on 13 September, 2023",
        "session_2": [{"speaker": "Bob", "dia_id": "D2:1", "text": "I sold my car."}],
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [
            {"speaker": "Bob", "dia_id": "D1:1", "text": "Do you play anything?"},
            {"speaker": "Ann", "dia_id": "D1:2", "text": "The cello!"},
            {"speaker": "Bob", "dia_id": "D1:3", "text": "Nice."},
        ],
    },
    "observation": {
        "session_2_observation": {"Bob": [["Bob sold his car.", "D2:1"]]},
        "session_1_observation": {"Ann": [["Ann plays the cello.", ["D1:2"]]], "Bob": []},
    },
}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([SAMPLE, SAMPLE | {"sample_id": "conv-2"}]))
    return path


def test_observations_become_facts(dataset: Path) -> None:
    first, second = load_locomo(dataset)
    assert (first.name, second.name) == ("conv-1", "conv-2")
    assert [fact.text for fact in first.facts] == ["Ann plays the cello.", "Bob sold his car."]
    cello, car = first.facts
    assert cello.date is not None
    assert car.date is not None
    assert cello.date.isoformat() == "2023-05-08T13:56:00"
    assert car.date.isoformat() == "2023-09-13T00:09:00"
    assert [turn.content for turn in cello.turns] == ["Do you play anything?", "The cello!"]
    assert [(q.answer, q.category) for q in first.questions] == [("cello", 4), ("2023", 2)]
    assert [data.name for data in load_locomo(dataset, "conv-2")] == ["conv-2"]


def test_a_file_that_is_not_locomo(tmp_path: Path, dataset: Path) -> None:
    with pytest.raises(BenchError, match="no conversation 'conv-9'; it has conv-1, conv-2"):
        load_locomo(dataset, "conv-9")
    for text, message in (("{", "cannot read"), ("[1]", "format of locomo10.json")):
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(BenchError, match=message):
            load_locomo(path)


def test_a_limit_takes_from_every_conversation() -> None:
    asked = tuple(Question(f"q{i}", "a") for i in range(3))
    data = [Dataset("one", (), asked), Dataset("two", (), (*asked, Question("none")))]
    assert [len(d.questions) for d in limited(data, 3)] == [2, 1]
    assert [len(d.questions) for d in limited(data, None)] == [3, 3]
    assert [d.name for d in limited(data, 1)] == ["one"]


def test_modes_by_name() -> None:
    config = CoreConfig(tail=1)
    default = encoding_of("default+tail3", config)
    assert (default.name, default.tail, default.window) == ("default", 3, config.window)
    assert encoding_of("default", config).tail == 1
    paper = encoding_of("w20", config)
    assert (paper.anchor, paper.window.kind, paper.window.size) == (False, "turns", 20)
    alone = encoding_of("w0", config)
    assert (alone.anchor, alone.window.kind) == (False, "none")
    near = encoding_of("neighbours4+noanchor", config)
    assert (near.anchor, near.window.kind, near.window.size) == (False, "neighbours", 4)
    assert near.name != encoding_of("neighbours4", config).name
    for wrong in ("neighbors4", "w", "default+tail", "turns", ""):
        with pytest.raises(BenchError, match="known are"):
            encoding_of(wrong, config)


def row(question: str, k: int, **modes: float) -> dict[str, Any]:
    scores = {m: dict(f1=x, contains=x, nll=2 - x, kl=x, agree=x) for m, x in modes.items()}
    return {"conv": "c", "question": question, "k": k, "modes": scores}


def test_differences_are_paired() -> None:
    rows = [row("a", 5, text=0.2, default=0.3), row("b", 5, text=0.8, default=0.9)]
    summary = summarise([*rows, row("a", 20, text=1.0, default=0.5)])
    at_5 = summary["default"]["5"]
    assert at_5["f1"]["mean"] == pytest.approx(0.6)
    assert at_5["f1_to_text"]["ci95"] == pytest.approx([0.1, 0.1])
    assert at_5["nll_to_text"]["mean"] == pytest.approx(-0.1)
    assert summary["default"]["20"]["questions"] == 1


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path, {"k": (5, 20), "model": "m"})
    rows.add(row("a", 5, text=1.0))
    with path.open("a") as file:
        file.write('{"conv": "c", "quest')
    again = Rows(path, {"k": [5, 20], "model": "m"})
    assert again.done == {("c", "a", 5)}
    again.add(row("b", 5, text=1.0))
    assert Rows(path, {"k": [5, 20], "model": "m"}).done == {("c", "a", 5), ("c", "b", 5)}
    with pytest.raises(BenchError, match="other settings \\(model\\)"):
        Rows(path, {"k": [5, 20], "model": "other"})


def test_a_run_on_the_small_model(tmp_path: Path) -> None:
    """In a process of its own: an engine stays for the life of its process."""
    path, rows = tmp_path / "locomo.json", tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "inferscale_core.cli", "bench", "locomo"]
    arguments = [
        "--model", models.resolve("smollm2-135m"), "--k", "2,4", "--limit", "2",
        "--modes", "none,shuffle,w0,neighbours2,neighbours2+tail1", "--json", str(path),
        "--rows", str(rows),
    ]  # fmt: skip
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads(path.read_text())
    assert len(written["rows"]) == 4
    summary = written["summary"]
    assert set(summary) == {"text", "none", "shuffle", "w0", "neighbours2", "neighbours2+tail1"}
    assert summary["text"]["4"]["kl"]["mean"] == 0
    assert summary["text"]["4"]["agree"]["mean"] == 1
    assert 0 < summary["neighbours2"]["4"]["kl"]["mean"] < summary["w0"]["4"]["kl"]["mean"]
    assert summary["none"]["4"]["nll"] != summary["text"]["4"]["nll"]
    assert all(share > 0.9 for share in written["least_injected"].values())
    assert len(rows.read_text().splitlines()) == 5
