"""Between rows of the facts table and the models of the API."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, TypeVar

from sqlalchemy import ColumnElement, Row, and_, true

from inferscale_core.client.models import Memory, MemoryIn, Turn
from inferscale_core.facts.database import clean
from inferscale_core.facts.errors import FactError
from inferscale_core.facts.records import segment_key
from inferscale_core.facts.schema import RESET_KV, as_utc, facts
from inferscale_core.facts.scope import Scope

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip

Item = TypeVar("Item")


def chunks(items: Sequence[Item], size: int = 500) -> Iterator[list[Item]]:
    """The items in lists short enough for the parameters of one statement."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


class HasFormats(Protocol):
    """What holds the line formats: a ``LineFormat`` or a core's configuration."""

    @property
    def line_format(self) -> str: ...

    @property
    def dated_line_format(self) -> str: ...


def render_line(formats: HasFormats, text: str, valid_at: datetime | None = None) -> str:
    """The line of a text; with ``valid_at`` its date in UTC is in it, as ``8 May 2023``."""
    if valid_at is None:
        return formats.line_format.format(text=text)
    day = as_utc(valid_at)
    date = f"{day.day} {MONTHS[day.month - 1]} {day.year}"
    return formats.dated_line_format.format(text=text, date=date)


class LineFormat:
    """Checked formats that render a fact as the line of a prompt, the same bytes every time."""

    def __init__(self, line_format: str, dated_line_format: str) -> None:
        """Raises FactError when a format does not hold its fields."""
        self.line_format = line_format
        self.dated_line_format = dated_line_format
        probe = datetime(2023, 5, 8, tzinfo=UTC)
        try:
            plain, dated = self.render("\x02", None), self.render("\x02", probe)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise FactError(
                f"line formats may hold {{text}} and {{date}} and nothing else in braces: {error!r}"
            ) from error
        if "\x02" not in plain:
            raise FactError(f"line_format needs {{text}}: {line_format!r}")
        if "\x02" not in dated or "8 May 2023" not in dated:
            raise FactError(f"dated_line_format needs {{date}} and {{text}}: {dated_line_format!r}")

    def render(self, text: str, valid_at: datetime | None) -> str:
        return render_line(self, text, valid_at)

    def values(self, text: str, valid_at: datetime | None) -> dict[str, str]:
        """The columns that follow from text and date."""
        line = self.render(text, valid_at)
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        return {"text": text, "line": line, "line_key": segment_key(line), "hash": digest}


MAX_JSON_DEPTH = 64
"""Answers are written by pydantic, which gives up at 255 levels of nesting."""


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list | tuple)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def to_json(value: Any, what: str) -> str:
    """JSON text that SQLite can read. Raises FactError."""
    if _depth_exceeds(value, MAX_JSON_DEPTH):
        raise FactError(f"{what} must be JSON of at most {MAX_JSON_DEPTH} levels of nesting")
    try:
        return clean(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise FactError(
            f"{what} must be JSON (strings, finite numbers, booleans, null, lists, objects): "
            f"{error}"
        ) from error


def item_values(item: MemoryIn, lines: LineFormat, now: datetime) -> dict[str, Any]:
    """Columns of the facts table that an item of ``add`` sets."""
    return {
        **lines.values(clean(item.text), item.valid_at),
        "metadata": to_json(item.metadata, "metadata"),
        "turns": to_json([turn.model_dump() for turn in item.turns], "turns"),
        "created_at": as_utc(item.created_at or now),
        "updated_at": now,
        "valid_at": None if item.valid_at is None else as_utc(item.valid_at),
        "invalid_at": None if item.invalid_at is None else as_utc(item.invalid_at),
        "encode": item.encode,
        "kv_state": "pending" if item.encode else "none",
        **RESET_KV,
    }


@lru_cache(maxsize=4096)
def make_scope(tenant: str, user: str | None, agent: str | None, run: str | None) -> Scope:
    return Scope(tenant=tenant, user=user, agent=agent, run=run)


def memory_of(row: Row[Any]) -> Memory:
    """The API's model of a row of the facts table."""
    return Memory(
        id=row.id,
        scope=make_scope(row.tenant, row.user, row.agent, row.run),
        collection=row.collection,
        text=row.text,
        line=row.line,
        hash=row.hash,
        metadata=json.loads(row.metadata),
        created_at=row.created_at,
        updated_at=row.updated_at,
        valid_at=row.valid_at,
        invalid_at=row.invalid_at,
        kv_state=row.kv_state,
        kv_reason=row.kv_reason,
    )


def turns_of(row: Row[Any]) -> list[Turn]:
    return [Turn.model_validate(turn) for turn in json.loads(row.turns)]


def clean_scope(scope: Scope) -> Scope:
    """The scope with lone surrogates replaced, as the store keeps it."""
    fields = (scope.tenant, scope.user, scope.agent, scope.run)
    tenant, user, agent, run = (None if value is None else clean(value) for value in fields)
    return make_scope(tenant or "default", user, agent, run)


def owned_within(scope: Scope) -> ColumnElement[bool]:
    """Condition: the reader ``scope`` sees the fact."""
    scope = clean_scope(scope)
    fields = scope.owner_fields.items()
    return and_(
        facts.c.tenant == scope.tenant, true(), *(facts.c[name] == value for name, value in fields)
    )
