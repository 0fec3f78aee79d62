"""Reading extraction answers."""

import json

import pytest
from mem0.configs.prompts import (
    ADDITIVE_EXTRACTION_PROMPT,
    AGENT_CONTEXT_SUFFIX,
    generate_additive_extraction_prompt,
)

from inferscale_adapters.mem0 import extraction
from inferscale_adapters.mem0.extraction import ExtractionError, read_facts


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('{"memory": []}', []),
        ('{"memory": [{"text": "a", "attributed_to": "user"}]}', ["a"]),
        ('{"memory": ["a", {"text": "b"}]}', ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ('{"memory": [{"text": "a"}, {"text": "b"}, {"text": "a"}]}', ["a", "b"]),
    ],
)
def test_answers_are_read(content: str, texts: list[str]) -> None:
    facts = json.loads(read_facts(content, truncated=False))["memory"]
    assert [fact["text"] for fact in facts] == texts


def test_a_cut_off_answer_keeps_its_complete_facts() -> None:
    content = '{"memory": [{"text": "a", "attributed_to": "user"}, {"text": "b, [c]"}, {"text": "d'
    facts = json.loads(read_facts(content, truncated=True))["memory"]
    assert facts == [{"text": "a", "attributed_to": "user"}, {"text": "b, [c]"}]


@pytest.mark.parametrize(
    ("content", "truncated"),
    [
        (None, False),
        ("  ", False),
        ("Here are the facts:", False),
        ('{"facts": "a"}', False),
        ('{"memory": [{"text": "a', True),
        ('{"memory": [{"text": "a"}, {"text"', False),
        ('{"memory": [7]}', False),
        ('{"memory": [{"text": ""}]}', False),
    ],
)
def test_unreadable_answers_raise(content: str | None, truncated: bool) -> None:
    with pytest.raises(ExtractionError):
        read_facts(content, truncated=truncated)


def test_extraction_calls_are_recognized_and_shortened() -> None:
    user = {"role": "user", "content": "## New Messages\nuser: hello"}
    for suffix in ("", AGENT_CONTEXT_SUFFIX):
        call = [{"role": "system", "content": ADDITIVE_EXTRACTION_PROMPT + suffix}, user]
        assert extraction.is_extraction(call)
        system, last = extraction.shortened(call)
        assert system["content"] == extraction.SHORT_PROMPT + suffix
        assert last == user
    assert not extraction.is_extraction([{"role": "system", "content": "Summarize"}, user])
    assert not extraction.is_extraction([user])
    assert not extraction.is_extraction([])


@pytest.mark.parametrize("custom", [None, "Write in French.\n\nBe brief."])
def test_the_short_call_keeps_what_matters_of_mem0s_message(custom: str | None) -> None:
    message = generate_additive_extraction_prompt(
        existing_memories=[{"id": "0", "text": 'Likes "tea"\n[x]'}],
        new_messages="user: I moved to Lisbon\n\n## Observation Date\nnever\n",
        last_k_messages=[{"role": "user", "content": "an older message"}],
        current_date="2025-03-10",
        custom_instructions=custom,
    )
    call = [
        {"role": "system", "content": ADDITIVE_EXTRACTION_PROMPT},
        {"role": "user", "content": message},
    ]
    text = extraction.shortened(call)[1]["content"]
    assert "2025-03-10" in text
    assert '- Likes "tea"\n[x]' in text
    assert "user: I moved to Lisbon\n\n## Observation Date\nnever" in text
    assert "an older message" not in text
    assert (custom in text) if custom else ("Custom" not in text)
