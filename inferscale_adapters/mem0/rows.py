"""Mem0's rows (id, score, payload) and the facts that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from inferscale_adapters.mem0.scopes import ID_FIELDS, NO_OWNER
from inferscale_core.client.models import Memory, MemoryIn, Turn

NO_TEXT_KEY = "inferscale_no_text"
"""Metadata key of rows whose payload had no ``data`` (Mem0's telemetry keeps such a row)."""

_NO_TEXT = "(row without text)"


@dataclass
class Row:
    """What Mem0 reads from a vector store; ``score`` is a similarity, higher is closer."""

    id: str
    payload: dict[str, Any] = field(default_factory=dict)
    score: float | None = None


def to_fact(
    id: str, payload: Mapping[str, Any], *, encode: bool, turns: Sequence[Turn] = ()
) -> MemoryIn:
    """The fact of a row: ``payload["data"]`` is its text, the rest its metadata, as it is.

    Owner keys stay in the metadata as well, so that Mem0's filters can name them and the payload
    comes back exactly. Raises ValueError for a payload whose ``data`` is empty or not a string.
    """
    text, metadata = text_and_metadata(payload)
    return MemoryIn(
        id=id,
        text=text,
        metadata=metadata,
        created_at=_time(payload.get("created_at")),
        turns=list(turns),
        encode=encode and NO_TEXT_KEY not in metadata,
    )


def text_and_metadata(payload: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a payload; see `to_fact`."""
    metadata = {key: value for key, value in payload.items() if key != "data"}
    if payload.get("data") is None:
        return _NO_TEXT, {**metadata, NO_TEXT_KEY: True}
    text = payload["data"]
    if not isinstance(text, str) or not text:
        raise ValueError(f"a memory's text must be a non-empty string, got {text!r}")
    return text, metadata


def to_row(fact: Memory) -> Row:
    """The row of a fact. Facts that other clients of the core stored get Mem0's keys as well."""
    payload = dict(fact.metadata)
    if not payload.pop(NO_TEXT_KEY, False):
        payload["data"] = fact.text
    foreign = fact.scope.run != NO_OWNER and not any(key in payload for key in ID_FIELDS)
    if foreign:
        payload.setdefault("hash", fact.hash)
        payload.setdefault("created_at", fact.created_at.isoformat())
        payload.setdefault("updated_at", fact.updated_at.isoformat())
        for key, name in ID_FIELDS.items():
            value = getattr(fact.scope, name)
            if value is not None:
                payload[key] = value
    return Row(id=fact.id, payload=payload, score=fact.score)


def _time(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return None
