"""Fact extraction on the core's model: guided JSON, the long prompt, and ``add(infer=True)``."""

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mem0.configs.prompts import (
    ADDITIVE_EXTRACTION_PROMPT,
    generate_additive_extraction_prompt,
)
from mem0.exceptions import LLMError

from inferscale_adapters.mem0 import InferScaleLLM, Memory
from inferscale_adapters.mem0.llm import ContextTooLong

CONVERSATION = "user: I'm allergic to shellfish and I work as a marine biologist.\n"
JSON = {"type": "json_object"}


def call(text: str = CONVERSATION) -> list[dict[str, str]]:
    message = generate_additive_extraction_prompt(existing_memories=[], new_messages=text)
    return [
        {"role": "system", "content": ADDITIVE_EXTRACTION_PROMPT},
        {"role": "user", "content": message},
    ]


@pytest.fixture(scope="module")
def make_llm(core_options: dict[str, Any]) -> Callable[..., InferScaleLLM]:
    return lambda **config: InferScaleLLM({**core_options, "max_tokens": 120, **config})


def test_every_extraction_answer_parses(make_llm: Callable[..., InferScaleLLM]) -> None:
    llm = make_llm(extraction_prompt="short", max_tokens=400)
    for seed in range(3):  # the hotter the wilder: at 1.5 this model writes noise
        answer = llm.generate_response(
            messages=call(), response_format=JSON, temperature=1.5, top_p=1.0, seed=seed
        )
        for fact in json.loads(answer)["memory"]:
            assert isinstance(fact["text"], str)
            assert set(fact) <= {"text", "attributed_to"}


def test_mem0s_prompt_in_a_short_context_says_what_to_do(
    make_llm: Callable[..., InferScaleLLM],
) -> None:
    with pytest.raises(ContextTooLong, match=r"extraction_prompt='short'.*infer=False"):
        make_llm(extraction_prompt="mem0").generate_response(messages=call(), response_format=JSON)


def test_the_short_prompt_stands_in_by_itself(
    make_llm: Callable[..., InferScaleLLM], caplog: pytest.LogCaptureFixture
) -> None:
    answer = make_llm().generate_response(messages=call(), response_format=JSON)
    assert json.loads(answer)["memory"]
    assert "does not fit" in caplog.text


def test_plain_calls(make_llm: Callable[..., InferScaleLLM]) -> None:
    llm = make_llm()
    hello = [{"role": "user", "content": "Say hello"}]
    assert isinstance(llm.generate_response(messages=hello, max_tokens=4), str)
    # A prompt that leaves less room than max_tokens is answered in the room there is.
    assert llm.generate_response(messages=hello, max_tokens=100_000, extra_body={"stop": ["o"]})
    with pytest.raises(ContextTooLong, match="longer context"):
        llm.generate_response(messages=[{"role": "user", "content": "word " * 9000}])


def test_add_infers_facts(make_memory: Callable[..., Memory]) -> None:
    memory = make_memory(llm={"max_tokens": 120}, collection_name="inferred")
    user = f"carol-{uuid.uuid4().hex[:8]}"
    message = "I'm allergic to shellfish and I work as a marine biologist."
    added = memory.add(message, user_id=user)["results"]
    assert added
    stored = memory.get_all(filters={"user_id": user})["results"]
    assert sorted(row["memory"] for row in stored) == sorted(row["memory"] for row in added)
    assert [entry["event"] for entry in memory.history(added[0]["id"])] == ["ADD"]
    again = memory.add(message, user_id=user)["results"]
    texts = [row["memory"] for row in [*added, *again]]
    assert len(texts) == len(set(texts))
    memory.close()


def test_add_reports_a_prompt_that_does_not_fit(make_memory: Callable[..., Memory]) -> None:
    memory = make_memory(llm={"extraction_prompt": "mem0"}, collection_name="inferred")
    with pytest.raises(LLMError, match="extraction_prompt='short'"):
        memory.add("I moved to Lisbon", user_id="dave")
    assert memory.get_all(filters={"user_id": "dave"})["results"] == []
    memory.close()


@pytest.fixture(scope="module", autouse=True)
def _cleaned(make_memory: Callable[..., Memory]) -> Iterator[None]:
    yield
    memory = make_memory(collection_name="inferred")
    memory.reset()
    memory.close()
