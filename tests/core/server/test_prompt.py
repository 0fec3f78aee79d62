"""Order, fit and report of a question's facts, without a server."""

import datetime as dt
from typing import Any

import pytest
from transformers import AutoTokenizer

from inferscale_core.client.models import ChatMemory, Memory
from inferscale_core.config import CoreConfig
from inferscale_core.encoding.template import ComposedPrompt, PromptTemplate
from inferscale_core.facts.records import segment_key
from inferscale_core.facts.scope import Scope
from inferscale_core.server.prompt import (
    Question,
    lay_out,
    missing_segments,
    ready_first,
    report,
)

from .conftest import model_path

SCOPE = Scope(user="alice")
NOW = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def memory(name: str, state: Any = "ready", reason: str | None = None) -> Memory:
    text = f"fact {name}"
    return Memory(
        id=name, scope=SCOPE, text=text, line=f"- {text}\n", hash="", created_at=NOW,
        updated_at=NOW, kv_state=state, kv_reason=reason,
    )  # fmt: skip


def question(facts: list[Memory], tail: int = 0, mode: Any = "inject") -> Question:
    """A question whose header has 10 tokens, each line 5, and the suffix 10."""
    lines = [(10 + 5 * i, 15 + 5 * i) for i in range(len(facts))]
    end = 10 + 5 * len(facts)
    prompt = ComposedPrompt(list(range(end + 10)), (0, 10), lines, (end, end + 10))
    return Question(ChatMemory(scope=SCOPE, mode=mode), tail, prompt, facts)


@pytest.fixture(scope="module")
def template() -> PromptTemplate:
    return PromptTemplate(AutoTokenizer.from_pretrained(model_path()), CoreConfig())


def test_facts_with_kv_come_first_in_their_order() -> None:
    facts = [memory("a", "pending"), memory("b"), memory("c", "stale"), memory("d")]
    assert [m.id for m in ready_first(facts)] == ["b", "d", "a", "c"]


def test_the_first_facts_give_way(template: PromptTemplate) -> None:
    facts = [memory(str(i)) for i in range(6)]
    text = template.render(template.place([{"role": "user", "content": "?"}]))
    whole, kept, left = lay_out(template, text, facts, 10_000)
    assert (len(kept), left) == (6, [])
    line = len(template.line_ids(facts[0].line))
    prompt, kept, left = lay_out(template, text, facts, len(whole.ids) - line - 1)
    assert [m.id for m in kept] == ["2", "3", "4", "5"]
    assert [(m.id, tokens) for m, tokens in left] == [("0", line), ("1", line)]
    assert len(prompt.ids) == len(whole.ids) - 2 * line
    prompt, kept, left = lay_out(template, text, facts, 1)
    assert (kept, len(left), prompt.lines) == ([], 6, [])
    assert prompt.ids == whole.ids[: whole.header[1]] + whole.ids[whole.suffix[0] :]


def test_report_of_an_injected_question() -> None:
    facts = [memory("a"), memory("b"), memory("c"), memory("d", "failed", "too long")]
    asked = question(facts)
    asked.dropped = [(memory("e"), 7)]
    engine = {"injected_tokens": 17, "cached_tokens": 8, "prompt_tokens": 40, "match_ms": 1.5}
    result = report(asked, engine, 40, 25)
    assert [(f.id, f.injected) for f in result.facts] == [
        ("e", False), ("a", True), ("b", True), ("c", True), ("d", False),
    ]  # fmt: skip
    assert result.facts[0].reason == "does not fit"
    assert result.facts[4].reason == "its KV could not be computed (too long)"
    assert (result.injected_tokens, result.cached_tokens, result.prefilled_tokens) == (17, 8, 15)
    assert (result.memory_tokens, result.match_ms) == (20, 1.5)


def test_reasons() -> None:
    facts = [memory("a"), memory("b"), memory("c")]
    engine = {"injected_tokens": 5, "cached_tokens": 15, "prompt_tokens": 35, "reason": None}
    reasons = [f.reason for f in report(question(facts, 1), engine, 35, 0).facts]
    assert reasons == ["in vLLM's prefix cache", None, "in the tail, which is prefilled"]
    engine = {"injected_tokens": 0, "cached_tokens": 0, "reason": "not_resident"}
    reasons = [f.reason for f in report(question(facts), engine, 35, 0).facts]
    assert reasons == ["not_resident"] * 3
    assert report(question(facts), None, 35, 0).reason == "the engine gave no report"
    for asked in ({"k": 5}, {"fact_ids": []}, {"query": "who?"}):
        none = Question(ChatMemory(scope={"user": "a"}, **asked), 0)
        assert report(none, engine, 35, 0).reason == "no facts were found, or asked for"
    text = report(question(facts, 1, "text"), None, 35, 32)
    assert {f.reason for f in text.facts} == {"mode is text"}
    assert (text.cached_tokens, text.prefilled_tokens) == (32, 3)


def test_the_line_that_is_not_resident_after_all() -> None:
    facts = [memory("a"), memory("b"), memory("c"), memory("d", "pending")]

    def missing(matched: int, tail: int = 0) -> list[str]:
        return [
            key for _, key in missing_segments(question(facts, tail), {"matched_tokens": matched})
        ]

    assert missing(25) == []  # the next line waits for its KV, as is known
    assert missing(15) == [segment_key(facts[1].line)]
    assert missing(15, tail=1) == [segment_key(facts[2].line)]
    assert missing(20, tail=1) == []
    assert missing(0) == []
    assert missing(12) == []
