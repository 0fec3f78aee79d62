"""Mem0's metadata filters, compiled to SQL over the facts table.

``{"city": "Rome"}`` (equality; ``"*"``: the key is there; a list: any of it),
``{"age": {"gte": 18, "lt": 65}}`` (eq ne gt gte lt lte in nin contains icontains), ``AND``,
``OR`` and ``NOT`` (also ``$and``, ``$or``, ``$not``) over lists of filters; ``NOT`` holds when
none of its filters does. Several keys, operators or list items at the top mean "and".

Values are compared within their JSON type: a number never equals a string or a boolean. A list
in the metadata equals a value when one of its items does, and ``contains`` it likewise. ``ne``
and ``nin`` need the key to be there. Keys are taken literally: a dot is part of the name.
``text``, ``hash``, ``user``, ``agent``, ``run``, ``created_at``, ``updated_at``, ``valid_at``
and ``invalid_at`` mean the fact's own fields. A filter is only ever added to a scope, so that it
narrows what the scope sees and never widens it.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    and_,
    case,
    column,
    exists,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    true,
)

from inferscale_core.facts.database import clean
from inferscale_core.facts.errors import FactError, FilterError
from inferscale_core.facts.schema import as_utc, facts

Filters = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Condition = ColumnElement[bool]

OPERATORS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains", "icontains")
MAX_DEPTH = 16
MAX_VALUES = 10_000

_LOGIC = {"AND": "and", "$and": "and", "OR": "or", "$or": "or", "NOT": "not", "$not": "not"}
_TEXT_FIELDS = ("text", "hash", "user", "agent", "run")
_TIME_FIELDS = ("created_at", "updated_at", "valid_at", "invalid_at")
_COMPARE: dict[str, Callable[[ColumnElement[Any], Any], Condition]] = {
    "gt": lambda left, right: left > right,
    "gte": lambda left, right: left >= right,
    "lt": lambda left, right: left < right,
    "lte": lambda left, right: left <= right,
}


def compile_filters(filters: Filters | None) -> Condition:
    """A condition over ``schema.facts``, true or false for every row and never NULL.

    Raises FilterError naming the key or operator that is wrong.
    """
    if filters is None:
        return true()
    size = _count(filters)
    if size > MAX_VALUES:
        raise FilterError(f"a filter may hold {MAX_VALUES} keys and values and this has {size}")
    return _group(filters, 0)


def _count(filters: Any) -> int:
    """Keys and values, counted without recursion: the filter may be nested without end."""
    total, todo = 0, [filters]
    while todo and total <= MAX_VALUES:
        item = todo.pop()
        total += 1
        if isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo.extend(item)
    return total


def _group(filters: Any, depth: int) -> Condition:
    if depth > MAX_DEPTH:
        raise FilterError(f"filters are nested more than {MAX_DEPTH} deep")
    if isinstance(filters, (list, tuple)):
        return and_(true(), *(_group(item, depth + 1) for item in filters))
    if not isinstance(filters, Mapping):
        raise FilterError(
            f"a filter is an object like {{'city': 'Rome'}} and not {type(filters).__name__}"
        )
    conditions: list[Condition] = []
    for key, value in filters.items():
        if not isinstance(key, str):
            raise FilterError(f"filter keys are strings and not {key!r}")
        logic = _LOGIC.get(key)
        if logic is None:
            conditions.append(_field(clean(key), value))
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        if not parts and logic != "and":
            raise FilterError(f"{key} needs a list with at least one filter")
        inner = [_group(part, depth + 1) for part in parts]
        if logic == "and":
            conditions.append(and_(true(), *inner))
        else:
            conditions.append(or_(*inner) if logic == "or" else not_(or_(*inner)))
    return and_(true(), *conditions)


def _field(key: str, value: Any) -> Condition:
    if isinstance(value, Mapping):
        if not value:
            raise FilterError(f"the filter on {key!r} is empty; give it an operator or a value")
        operations = list(value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        operations = [("in", value)]
    elif value == "*":
        operations = [("present", None)]
    else:
        operations = [("eq", value)]
    for operator, _ in operations:
        if operator not in OPERATORS and operator != "present":
            raise FilterError(
                f"unknown operator {operator!r} in the filter on {key!r}; known are "
                f"{', '.join(OPERATORS)}"
            )
    if isinstance(value, Mapping) and "present" in value:
        raise FilterError(f"unknown operator 'present' in the filter on {key!r}; use '*'")
    compiled = (
        _on_column(key, operator, operand)
        if key in _TEXT_FIELDS or key in _TIME_FIELDS
        else _on_metadata(key, operator, operand)
        for operator, operand in operations
    )
    return and_(true(), *compiled)


def _items(key: str, operator: str, operand: Any) -> list[Any]:
    if not isinstance(operand, (list, tuple, set, frozenset)):
        raise FilterError(f"{operator!r} in the filter on {key!r} needs a list of values")
    return list(operand)


def _string(key: str, operator: str, operand: Any) -> str:
    if not isinstance(operand, str):
        raise FilterError(
            f"{operator!r} in the filter on {key!r} needs a string and not {operand!r}"
        )
    return clean(operand)


def _casefold(value: ColumnElement[Any]) -> ColumnElement[str]:
    return func.inferscale_casefold(value)


# The fact's own fields


def _on_column(key: str, operator: str, operand: Any) -> Condition:
    field: ColumnElement[Any] = facts.c[key]
    convert = _moment if key in _TIME_FIELDS else _string

    def one_of(operands: Iterable[Any]) -> Condition:
        values = [None if item is None else convert(key, operator, item) for item in operands]
        known = field.in_([item for item in values if item is not None])
        return or_(known, field.is_(None)) if None in values else known

    condition: Condition
    if operator == "present":
        condition = field.is_not(None)
    elif operator == "eq":
        condition = one_of([operand])
    elif operator == "ne":
        condition = and_(field.is_not(None), not_(one_of([operand])))
    elif operator == "in":
        condition = one_of(_items(key, operator, operand))
    elif operator == "nin":
        condition = and_(field.is_not(None), not_(one_of(_items(key, operator, operand))))
    elif operator in _COMPARE:
        condition = _COMPARE[operator](field, convert(key, operator, operand))
    elif key in _TIME_FIELDS:
        raise FilterError(f"{operator!r} is for text and {key!r} is a time; use gte and lt")
    elif operator == "contains":
        condition = func.instr(field, _string(key, operator, operand)) > 0
    else:
        needle = _string(key, operator, operand).casefold()
        condition = func.instr(_casefold(field), needle) > 0
    return func.coalesce(condition, false(), type_=condition.type)


def _moment(key: str, operator: str, operand: Any) -> datetime:
    """A time from ISO text, a date or seconds since 1970; without a zone it is UTC."""
    try:
        if isinstance(operand, datetime):
            return as_utc(operand)
        if isinstance(operand, date):
            return datetime(operand.year, operand.month, operand.day, tzinfo=UTC)
        if isinstance(operand, str):
            return as_utc(datetime.fromisoformat(operand))
        if isinstance(operand, (int, float)) and not isinstance(operand, bool):
            return datetime.fromtimestamp(operand, UTC)
    except (ValueError, OverflowError, OSError, FactError):
        pass  # said below, with what was expected
    raise FilterError(
        f"{operator!r} in the filter on {key!r} needs a time like '2024-05-08T10:00:00Z' and "
        f"not {operand!r}"
    )


# Metadata


class _Entry:
    """A row of SQLite's ``json_each``: key, value and JSON type, all reachable by parameters."""

    def __init__(self, document: ColumnElement[Any]) -> None:
        rows = func.json_each(document).table_valued(
            column("key"), column("value"), column("type"), joins_implicitly=True
        )
        self.rows = rows.alias()
        self.key: ColumnElement[Any] = self.rows.c.key
        self.value: ColumnElement[Any] = self.rows.c.value
        self.type: ColumnElement[Any] = self.rows.c.type

    def has(self, condition: Condition) -> Condition:
        return exists(select(literal(1)).select_from(self.rows).where(condition))


def _on_metadata(key: str, operator: str, operand: Any) -> Condition:
    entry = _Entry(facts.c.metadata)
    named = entry.key == key

    def some(test: Callable[[_Entry], Condition]) -> Condition:
        """The value, or an item of the list that it is, passes the test."""
        array = case((entry.type == "array", entry.value), else_="[]")
        item = _Entry(array)
        return entry.has(and_(named, or_(test(entry), item.has(test(item)))))

    if operator == "present":
        return entry.has(named)
    if operator in ("eq", "ne", "in", "nin"):
        operands = _items(key, operator, operand) if operator in ("in", "nin") else [operand]
        test = _equality(key, operator, operands)
        if operator in ("eq", "in"):
            equal = some(test)
            return or_(equal, not_(entry.has(named))) if None in operands else equal
        return and_(entry.has(named), not_(some(test)))
    if operator == "contains" and not isinstance(operand, str):
        is_item = _equality(key, operator, [operand])
        array = case((entry.type == "array", entry.value), else_="[]")
        item = _Entry(array)
        return entry.has(and_(named, item.has(is_item(item))))
    if operator in ("contains", "icontains"):
        return _contains(entry, named, _string(key, operator, operand), operator == "icontains")
    if isinstance(operand, str):
        bound, types = literal(clean(operand)), ["text"]
    else:
        bound, types = literal(_number(key, operator, operand)), ["integer", "real"]
    compare = _COMPARE[operator]
    return entry.has(and_(named, entry.type.in_(types), compare(entry.value, bound)))


def _contains(entry: _Entry, named: Condition, needle: str, fold: bool) -> Condition:
    def shape(value: ColumnElement[Any]) -> ColumnElement[Any]:
        return _casefold(value) if fold else value

    wanted = needle.casefold() if fold else needle
    item = _Entry(case((entry.type == "array", entry.value), else_="[]"))
    in_text = and_(entry.type == "text", func.instr(shape(entry.value), wanted) > 0)
    in_list = item.has(and_(item.type == "text", shape(item.value) == wanted))
    return entry.has(and_(named, or_(in_text, in_list)))


def _equality(key: str, operator: str, operands: list[Any]) -> Callable[[_Entry], Condition]:
    texts: list[str] = []
    numbers: list[int | float] = []
    types: list[str] = []
    for operand in operands:
        if operand is None:
            types.append("null")
        elif isinstance(operand, bool):
            types.append(json.dumps(operand))
        elif isinstance(operand, str):
            texts.append(clean(operand))
        else:
            numbers.append(_number(key, operator, operand))

    def test(entry: _Entry) -> Condition:
        return or_(
            entry.type.in_(types),
            and_(entry.type == "text", entry.value.in_(texts)),
            and_(entry.type.in_(("integer", "real")), entry.value.in_(numbers)),
        )

    return test


def _number(key: str, operator: str, operand: Any) -> int | float:
    if isinstance(operand, bool) or not isinstance(operand, (int, float)):
        raise FilterError(
            f"{operator!r} in the filter on {key!r} cannot be compared with {operand!r}"
        )
    try:
        number = operand if -(2**63) <= operand < 2**63 else float(operand)
    except OverflowError:
        number = math.inf
    if isinstance(number, float) and not math.isfinite(number):
        raise FilterError(f"{operator!r} in the filter on {key!r} needs a finite number")
    return number
