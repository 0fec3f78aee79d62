"""The token ids and spans of one encoding request: ``[anchor][window][line ...]``."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferscale_core.connector.protocol import Span

KeyedIds = tuple[str | None, Sequence[int]]


class LineTooLongError(ValueError):
    """A line that cannot be encoded, since it does not fit the context with its header."""

    def __init__(self, key: str, tokens: int, limit: int) -> None:
        super().__init__(
            f"the line has {tokens} tokens with its header; the model takes {limit} per encoding"
        )
        self.key = key
        self.tokens = tokens
        self.limit = limit


@dataclass(frozen=True)
class EncodingRequest:
    """What to send to the engine. ``lines`` are the keys of the lines it encodes, in order."""

    prompt_token_ids: list[int]
    spans: list[Span]
    lines: list[str] = field(default_factory=list)


def ids_hash(ids: Sequence[int]) -> str:
    """First 32 hex digits of the sha256 of token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


def header_key(header_ids: Sequence[int]) -> str:
    """Segment key of a header."""
    return f"header:{ids_hash(header_ids)}"


def plan_encoding(
    header_ids: Sequence[int],
    window_ids: Sequence[KeyedIds],
    lines: Sequence[tuple[str, Sequence[int]]],
    max_tokens: int,
    anchor: bool = True,
) -> EncodingRequest:
    """Lay out one encoding request.

    Args:
        header_ids: the anchor, captured too when it is used.
        window_ids: ``(key, ids)`` in order; key is None for text that is not a fact's line.
        lines: ``(key, ids)`` of the lines to encode, at least one. Each stands behind the window
            and the lines before it. Lines that do not fit any more are left out, from the end.
        max_tokens: longest prompt of the request.
        anchor: whether the header stands at the start.

    Raises:
        LineTooLongError: the first line does not fit with the header and no window at all.
    """
    if not lines:
        raise ValueError("an encoding request needs at least one line")
    header = list(header_ids) if anchor else []
    room = max_tokens - len(header)
    kept: dict[str, Sequence[int]] = {}
    for line_key, ids in lines:
        if line_key in kept:
            continue
        if len(ids) > room:
            if not kept:
                raise LineTooLongError(line_key, len(header) + len(ids), max_tokens)
            break
        kept[line_key] = ids
        room -= len(ids)

    window: list[KeyedIds] = []
    for key, ids in reversed(window_ids):
        if key in kept:
            continue
        if len(ids) > room:
            break
        window.append((key, ids))
        room -= len(ids)
    window.reverse()

    prompt = list(header)
    spans = [Span(header_key(header), "header", 0, len(header))] if header else []
    behind: list[str] = []
    for key, ids in window:
        prompt.extend(ids)
        if key is not None:
            behind.append(key)
    for line_key, ids in kept.items():
        start = len(prompt)
        prompt.extend(ids)
        spans.append(Span(line_key, "line", start, len(prompt), tuple(behind)))
        behind.append(line_key)
    return EncodingRequest(prompt, spans, list(kept))
