"""Whose rows Mem0 means: payloads and filters as scopes of the fact store."""

from collections.abc import Iterator, Mapping
from typing import Any

from inferscale_core.client import ScopeError
from inferscale_core.facts.scope import Scope

ID_FIELDS = {"user_id": "user", "agent_id": "agent", "run_id": "run"}
"""Mem0's owner keys and the scope fields they become."""

NO_OWNER = "(no owner)"
"""Run of entity and migration rows that name no owner.

Mem0 refuses ids that hold whitespace, so no app can name this run by accident or on purpose.
"""

_OPERATORS = {"AND", "$and"}


def owner_of(payload: Mapping[str, Any], tenant: str, *, ownerless: bool = False) -> Scope:
    """The scope that owns a row, from the payload's ``user_id``, ``agent_id`` and ``run_id``.

    ``ownerless`` allows a payload without any of them (entity rows): it belongs to `NO_OWNER`.
    Raises ScopeError when the payload names no owner otherwise.
    """
    fields = {
        field: str(payload[key]) for key, field in ID_FIELDS.items() if payload.get(key) is not None
    }
    if not fields:
        if not ownerless:
            raise ScopeError(
                "a memory needs an owner: its payload holds no user_id, agent_id or run_id; "
                "pass for example user_id='alice' to add()"
            )
        fields = {"run": NO_OWNER}
    return Scope(tenant=tenant, **fields)


def reader_of(
    filters: Mapping[str, Any] | None, tenant: str, *, what: str, ownerless: bool = False
) -> tuple[Scope, dict[str, Any] | None]:
    """Split Mem0's filters into the reader's scope and what is left to match on metadata.

    The owner keys must each have one plain value (or ``{"eq": value}``): ``user_id="*"``, a list
    or a range would read across users, and so would an ``AND`` that names a second value. ``"*"``
    for the agent or the run is dropped: it narrows nothing, the other fields hold the scope.

    ``what`` names the calling operation in errors; ``ownerless`` as in `owner_of`.
    Raises ScopeError when there is no scope, or not exactly one.
    """
    found: dict[str, str] = {}
    for key, value in _conditions(filters or {}):
        field = ID_FIELDS[key]
        value = _single(key, value, what)
        if value is None:
            continue
        if found.setdefault(field, value) != value:
            raise ScopeError(
                f"{what} names two values for {key}, {found[field]!r} and {value!r}: "
                "a question has one reader; ask once per value"
            )
    if not found:
        if not ownerless:
            raise ScopeError(
                f"{what} needs a user_id, agent_id or run_id in its filters, for example "
                "filters={'user_id': 'alice'}: without one it would read every user's memories"
            )
        found = {"run": NO_OWNER}
    rest = {key: value for key, value in (filters or {}).items() if key not in ID_FIELDS}
    return Scope(tenant=tenant, **found), rest or None


def _conditions(filters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Owner conditions that must all hold: the top level and everything under ``AND``."""
    for key, value in filters.items():
        if key in ID_FIELDS:
            yield key, value
        elif key in _OPERATORS and isinstance(value, list):
            for condition in value:
                if isinstance(condition, Mapping):
                    yield from _conditions(condition)


def _single(key: str, value: Any, what: str) -> str | None:
    if isinstance(value, Mapping) and set(value) == {"eq"}:
        value = value["eq"]
    if value is None:
        return None
    if value == "*" and key != "user_id":
        return None
    if value == "*" or isinstance(value, Mapping | list | tuple | set):
        raise ScopeError(
            f"{what} needs one value for {key}, not {value!r}, which would read across owners; "
            f"ask once per {key}"
        )
    return str(value)
