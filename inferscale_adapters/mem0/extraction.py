"""Mem0's fact extraction: the schema its answer must follow, and reading that answer."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mem0.configs.prompts import ADDITIVE_EXTRACTION_PROMPT, AGENT_CONTEXT_SUFFIX

from inferscale_core.client import InferScaleError

logger = logging.getLogger(__name__)

MAX_FACTS = 64
"""Facts that one extraction call may give; small models would otherwise repeat themselves."""

MAX_FACT_CHARS = 600
"""Longest fact; Mem0 asks for 15 to 80 words."""

MEMORY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "memory": {
            "type": "array",
            "maxItems": MAX_FACTS,
            "items": {
                "type": "object",
                "properties": {
                    "text": {
                        "type": "string",
                        "minLength": 12,
                        "maxLength": MAX_FACT_CHARS,
                    },
                    "attributed_to": {"type": "string", "enum": ["user", "assistant"]},
                },
                "required": ["text"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["memory"],
    "additionalProperties": False,
}
"""What Mem0 reads of an extraction answer; it numbers the facts itself."""

SHORT_PROMPT = """You extract facts worth remembering from a conversation.

Write down every lasting fact that the messages state about the user, the people around the user
or their plans, and what the assistant recommended or promised. Each fact is one complete sentence
that can be read alone: use names instead of pronouns, and dates instead of words like "yesterday".
Do not repeat what is already known, and invent nothing. Greetings and small talk are no facts.

Answer with JSON only: {"memory": [{"text": "...", "attributed_to": "user"}]}, where attributed_to
says whether the user or the assistant stated it. Without a fact, answer {"memory": []}.
"""
"""Stands in for Mem0's extraction prompt (about 8,200 tokens) where the context is too short."""

_SECTIONS = re.compile(
    r"## Existing Memories\n(?P<known>\[.*\])\n\n"
    r"## New Messages\n(?P<messages>.*)\n\n"
    r"## Observation Date\n(?P<date>[^\n]*)\n\n"
    r"## Current Date\n[^\n]*\n\n"
    r"(?:## Custom Instructions\n(?P<custom>.*)\n\n)?# Output:$",
    re.DOTALL,
)
"""The sections of Mem0's user message that the short call keeps."""


class ExtractionError(InferScaleError, ValueError):
    """The model's answer to an extraction call cannot be read as facts."""


def is_extraction(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these messages are Mem0's extraction call."""
    if not messages or messages[0].get("role") != "system":
        return False
    content = messages[0].get("content")
    return isinstance(content, str) and content.startswith(ADDITIVE_EXTRACTION_PROMPT)


def shortened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The extraction call with `SHORT_PROMPT` for Mem0's, and a user message as plain.

    What Mem0 adds for agents stays, and so do the existing memories, the new messages, their
    date and the app's custom instructions; the messages before them go.
    """
    rest = str(messages[0]["content"]).removeprefix(ADDITIVE_EXTRACTION_PROMPT)
    suffix = rest if rest == AGENT_CONTEXT_SUFFIX else ""
    plain = [{**message, "content": _plain(message["content"])} for message in messages[1:]]
    return [{"role": "system", "content": SHORT_PROMPT + suffix}, *plain]


def _plain(content: Any) -> Any:
    """Mem0's user message without its headings; anything else as it is."""
    found = _SECTIONS.search(content) if isinstance(content, str) else None
    if found is None:
        return content
    known = "".join(f"- {memory['text']}\n" for memory in json.loads(found["known"]))
    parts = [f"Already known:\n{known.rstrip()}"] if known else []
    parts.append(f"Messages of {found['date']}:\n{found['messages'].rstrip()}")
    if found["custom"]:
        parts.append(found["custom"])
    return "\n\n".join([*parts, "Which facts do the messages state? Answer with JSON."])


def response_format() -> dict[str, Any]:
    """OpenAI's ``response_format`` that makes the engine decode by `MEMORY_SCHEMA`."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "memory", "schema": MEMORY_SCHEMA, "strict": True},
    }


def read_facts(content: str | None, *, truncated: bool) -> str:
    """The answer as the JSON text that Mem0 parses: ``{"memory": [{"text", ...}]}``.

    Items that are plain strings become ``{"text": item}``, a bare list of items is taken as the
    memory list, and repeated texts are dropped. When the answer was cut off at its token limit
    (``truncated``), the complete facts before the cut are kept.

    Raises ExtractionError when no facts can be read from it: Mem0 would otherwise take such an
    answer for "nothing worth remembering".
    """
    if not content or not content.strip():
        raise ExtractionError(
            "the model gave an empty answer to the extraction call, so no facts were stored; "
            "try again, or store the messages as they are with add(..., infer=False)"
        )
    try:
        items = _items(json.loads(content, strict=False))
    except ValueError as error:
        items = _complete_items(content) if truncated else []
        if not items:
            why = "was cut off at its token limit" if truncated else f"is not valid JSON ({error})"
            todo = "raise max_tokens of the llm config" if truncated else "use a larger model"
            raise ExtractionError(
                f"the model's answer to the extraction call {why}: {content[:200]!r}; {todo}, "
                "or store the messages as they are with add(..., infer=False)"
            ) from error
        logger.warning("extraction was cut off at its token limit; kept %d facts", len(items))
    unique: dict[str, dict[str, Any]] = {}
    for item in items:
        fact = _fact(item)
        unique.setdefault(fact["text"], fact)
    return json.dumps({"memory": list(unique.values())}, ensure_ascii=False)


def _items(answer: Any) -> list[Any]:
    items = answer.get("memory", answer.get("facts")) if isinstance(answer, dict) else answer
    if not isinstance(items, list):
        raise ValueError("no list under 'memory'")
    return items


def _fact(item: Any) -> dict[str, Any]:
    if isinstance(item, str) and item:
        return {"text": item}
    if isinstance(item, dict) and isinstance(item.get("text"), str) and item["text"]:
        return item
    raise ExtractionError(
        f"an item of the extraction answer is neither a text nor an object with one: {item!r}"
    )


def _complete_items(content: str) -> list[Any]:
    """The items of a cut-off ``{"memory": [...``  that were complete before the cut."""
    start = content.find("[")
    items: list[Any] = []
    decoder = json.JSONDecoder(strict=False)
    position = start + 1
    while start >= 0:
        while position < len(content) and content[position] in ", \t\r\n":
            position += 1
        try:
            item, position = decoder.raw_decode(content, position)
        except ValueError:
            break
        items.append(item)
    return items
