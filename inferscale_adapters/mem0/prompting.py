"""Search results as the messages that Mem0's README builds from them."""

from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM_PROMPT = (
    "You are a helpful AI. Answer the question based on query and memories.\nUser Memories:\n"
)
"""Mem0's README; also the core's default header, so that both ways share its segment."""


def messages_from(
    query: str, results: Mapping[str, Any] | Sequence[Mapping[str, Any]], system: str
) -> list[dict[str, str]]:
    """A system message with one ``- {memory}`` line per result, and the query as user message.

    Mem0's README prints the best memory first; here it stands last, next to the question, as
    in `Memory.chat`. Each line ends with a newline, the last one too: that is the unit whose KV
    the core holds.
    """
    rows = results["results"] if isinstance(results, Mapping) else results
    lines = "".join(f"- {row['memory']}\n" for row in reversed(rows))
    return [
        {"role": "system", "content": system + lines},
        {"role": "user", "content": query},
    ]
