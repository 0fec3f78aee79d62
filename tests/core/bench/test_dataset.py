import json
from pathlib import Path

import pytest

from inferscale_core.bench.dataset import TURNS_BEFORE, load
from inferscale_core.bench.errors import BenchError


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_built_in_conversation_is_large_enough() -> None:
    data = load()
    assert len(data.facts) >= 64
    assert len({fact.id for fact in data.facts}) == len(data.facts)
    assert len({fact.text for fact in data.facts}) == len(data.facts)
    assert len(data.questions) >= 24
    assert sum(question.demo for question in data.questions) == 8
    assert all(question.answer for question in data.questions)


def test_built_in_facts_are_dated_over_months_and_bring_their_turns() -> None:
    data = load()
    dates = [fact.date for fact in data.facts]
    assert all(dates)
    assert dates == sorted(dates)
    assert (dates[-1] - dates[0]).days > 200
    for fact in data.facts:
        assert 1 <= len(fact.turns) <= TURNS_BEFORE
        assert all(turn.name and turn.content for turn in fact.turns)


def test_a_file_of_facts_with_context(tmp_path: Path) -> None:
    facts = write_lines(
        tmp_path / "facts.jsonl",
        [
            {"id": "a/0", "conv": "a", "text": "One.", "date_iso": "2023-05-08T13:56"},
            {"conv": "b", "text": "Two.", "context": "Ann: Hello: you.\nno name"},
        ],
    )
    questions = write_lines(
        tmp_path / "qa.jsonl",
        [
            {"conv": "a", "question": "Who?", "answer": 2022},
            {"conv": "b", "question": "What?", "answer": None},
        ],
    )
    first = load(facts, questions)
    assert [fact.text for fact in first.facts] == ["One."]
    assert first.questions[0].answer == "2022"
    second = load(facts, questions, conv="b")
    (fact,) = second.facts
    assert fact.id == "b/1"
    assert fact.date is None
    assert [(turn.name, turn.content) for turn in fact.turns] == [
        ("Ann", "Hello: you."),
        (None, "no name"),
    ]
    assert second.questions[0].answer is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "not JSON"),
        ('{"date_iso": "2023-05-08"}\n', "no 'text'"),
        ('{"text": "a", "date_iso": "last week"}\n', "not an ISO date"),
        ("", "holds no facts"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchError, match=message) as caught:
        load(path)
    assert "facts.jsonl" in str(caught.value)


def test_a_missing_file_or_conversation_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        load(tmp_path / "none.jsonl")
    facts = write_lines(tmp_path / "facts.jsonl", [{"conv": "a", "text": "One."}])
    with pytest.raises(BenchError, match="it has a"):
        load(facts, conv="b")
