"""Filters mean what Mem0's users expect, whatever keys and values hold."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscale_core.client.models import MemoryIn
from inferscale_core.facts.errors import FactError, FilterError
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore

ALICE = Scope(user="alice", agent="bot")

ROWS: dict[str, dict[str, Any]] = {
    "rome": {"city": "Rome", "age": 30, "vip": True, "tags": ["a", "b", 1]},
    "paris": {"city": "Paris", "age": 40.5, "vip": False, "tags": []},
    "straße": {"city": "Straße 5", "age": "30", "note": None},
    "nothing": {},
}


@pytest.fixture
def rows(store: FactStore) -> FactStore:
    store.add(ALICE, [MemoryIn(text=f"In {k}", id=k, metadata=m) for k, m in ROWS.items()])
    return store


CASES: list[tuple[Any, set[str]]] = [
    ({}, set(ROWS)),
    (None, set(ROWS)),
    ([], set(ROWS)),
    ({"city": "Rome"}, {"rome"}),
    ({"city": "rome"}, set()),
    ({"city": {"eq": "Rome"}}, {"rome"}),
    ({"city": {"ne": "Rome"}}, {"paris", "straße"}),
    ({"city": ["Rome", "Paris"]}, {"rome", "paris"}),
    ({"city": {"in": ["Rome", "Paris", "Oslo"]}}, {"rome", "paris"}),
    ({"city": {"in": []}}, set()),
    ({"city": {"nin": ["Rome"]}}, {"paris", "straße"}),
    ({"city": {"nin": []}}, {"rome", "paris", "straße"}),
    ({"city": {"contains": "Str"}}, {"straße"}),
    ({"city": {"contains": "str"}}, set()),
    ({"city": {"icontains": "STRASSE"}}, {"straße"}),
    ({"city": {"contains": "%"}}, set()),
    ({"city": "*"}, {"rome", "paris", "straße"}),
    ({"city": {"eq": "*"}}, set()),
    ({"note": "*"}, {"straße"}),
    ({"note": None}, set(ROWS)),
    ({"note": {"ne": None}}, set()),
    ({"age": 30}, {"rome"}),
    ({"age": 30.0}, {"rome"}),
    ({"age": "30"}, {"straße"}),
    ({"age": {"gt": 30}}, {"paris"}),
    ({"age": {"gte": 30, "lt": 40}}, {"rome"}),
    ({"age": {"lte": 40.5}}, {"rome", "paris"}),
    ({"age": {"gte": "2"}}, {"straße"}),
    ({"age": {"lt": 10**30}}, {"rome", "paris"}),
    ({"vip": True}, {"rome"}),
    ({"vip": False}, {"paris"}),
    ({"vip": 1}, set()),
    ({"tags": "a"}, {"rome"}),
    ({"tags": 1}, {"rome"}),
    ({"tags": {"ne": "a"}}, {"paris"}),
    ({"tags": {"contains": "b"}}, {"rome"}),
    ({"tags": {"contains": 1}}, {"rome"}),
    ({"tags": {"contains": True}}, set()),
    ({"tags": {"icontains": "B"}}, {"rome"}),
    ({"AND": [{"city": "Rome"}, {"age": {"gt": 1}}]}, {"rome"}),
    ({"$and": []}, set(ROWS)),
    ({"OR": [{"city": "Rome"}, {"age": {"gt": 35}}]}, {"rome", "paris"}),
    ({"$or": [{"city": "Rome"}, {"$not": [{"city": "*"}]}]}, {"rome", "nothing"}),
    ({"NOT": [{"city": "Rome"}, {"vip": False}]}, {"straße", "nothing"}),
    ({"NOT": {"city": "Rome"}}, {"paris", "straße", "nothing"}),
    ([{"city": "*"}, {"age": {"gt": 35}}], {"paris"}),
    ({"city": "*", "vip": True}, {"rome"}),
    ({"text": "In rome"}, {"rome"}),
    ({"text": {"icontains": "IN R"}}, {"rome"}),
    ({"text": {"contains": "a"}}, {"paris", "straße"}),
    ({"user": "alice"}, set(ROWS)),
    ({"user": "bob"}, set()),
    ({"user": "*"}, set(ROWS)),
    ({"run": "*"}, set()),
    ({"run": None}, set(ROWS)),
    ({"NOT": [{"run": "r"}]}, set(ROWS)),
    ({"agent": ["bot", "other"]}, set(ROWS)),
    ({"created_at": {"gte": "2020-01-01"}}, set(ROWS)),
    ({"created_at": {"lt": "2020-01-01T00:00:00+02:00"}}, set()),
    ({"updated_at": {"gt": 0}}, set(ROWS)),
    ({"valid_at": None}, set(ROWS)),
    ({"valid_at": {"lt": datetime(2100, 1, 1, tzinfo=UTC)}}, set()),
]


@pytest.mark.parametrize(("filters", "expected"), CASES, ids=[str(f) for f, _ in CASES])
def test_a_filter_finds(rows: FactStore, filters: Any, expected: set[str]) -> None:
    assert rows.matching_ids(ALICE, filters=filters) == expected
    found, total = rows.list(ALICE, filters=filters)
    assert {m.id for m in found} == expected
    assert total == len(expected)


@pytest.mark.parametrize(
    ("filters", "named"),
    [
        ({"city": {"like": "R"}}, "'like'"),
        ({"city": {"present": "R"}}, "'present'"),
        ({"city": {"eq": "Rome", "near": 1}}, "'near'"),
        ({"city": {}}, "'city'"),
        ({"city": {"in": "Rome"}}, "list of values"),
        ({"city": {"gt": True}}, "True"),
        ({"city": {"gt": [1]}}, "'city'"),
        ({"city": {"eq": {"a": 1}}}, "'city'"),
        ({"city": {"icontains": 5}}, "string"),
        ({"age": {"gt": float("nan")}}, "finite"),
        ({"age": {"gt": 10**400}}, "finite"),
        ({"OR": []}, "OR"),
        ({"NOT": []}, "NOT"),
        ({"AND": ["x"]}, "str"),
        ("city", "str"),
        ({1: 2}, "strings"),
        ({"user": 5}, "'user'"),
        ({"created_at": "yesterday"}, "yesterday"),
        ({"created_at": {"gt": 10**30}}, "created_at"),
        ({"created_at": {"contains": "2024"}}, "created_at"),
        ({"city": list(range(20_000))}, "10000"),
    ],
)
def test_a_filter_that_makes_no_sense_is_named(rows: FactStore, filters: Any, named: str) -> None:
    with pytest.raises(FilterError, match=named):
        rows.list(ALICE, filters=filters)


def test_nesting_without_end_is_refused(rows: FactStore) -> None:
    filters: Any = {"a": 1}
    for _ in range(3000):
        filters = {"AND": [filters]}
    with pytest.raises(FilterError, match="deep"):
        rows.list(ALICE, filters=filters)


def test_a_filter_too_large_for_the_database_is_the_callers_error(rows: FactStore) -> None:
    with pytest.raises(FactError, match="too many conditions"):
        rows.list(tenant="default", filters={"OR": [{"a": 1}] * 2000})


def test_a_filter_never_widens_the_scope(store: FactStore) -> None:
    store.add(Scope(user="bob"), [MemoryIn(text="b", id="b")])
    store.add(Scope(tenant="t", user="alice"), [MemoryIn(text="t", id="t")])
    store.add(Scope(user="alice"), [MemoryIn(text="a", id="a")])
    for filters in (
        {"user": "bob"},
        {"user": "*"},
        {"OR": [{"user": "bob"}, {"user": "alice"}]},
        {"NOT": [{"user": "alice"}]},
        {"user": "alice", "AND": [{"user": "bob"}]},
        {"x') OR 1=1 --": 1},
    ):
        assert store.matching_ids(Scope(user="alice"), filters=filters) <= {"a"}


AWKWARD = ["a.b", 'a"b', "a'b", "a[0]", "$", "$.a", "", "é", "a\\b", "a\nb", "'; DROP TABLE facts"]


@pytest.mark.parametrize("key", AWKWARD)
def test_keys_are_taken_literally(store: FactStore, key: str) -> None:
    store.add(ALICE, [MemoryIn(text="yes", id="yes", metadata={key: key})])
    store.add(ALICE, [MemoryIn(text="no", id="no", metadata={"a": {"b": key}, "other": [key]})])
    for filters in ({key: key}, {key: "*"}, {key: {"contains": key}}, {key: {"in": [key]}}):
        assert store.matching_ids(ALICE, filters=filters) == {"yes"}


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "Ab"]))
KEYS = st.sampled_from(["k", 'q"', "d.e"])
METADATA = st.dictionaries(KEYS, st.one_of(VALUES, st.lists(VALUES, max_size=3)), max_size=3)
SCALARS = VALUES.filter(lambda v: v is not None)
ORDERED = st.one_of(st.integers(-3, 3), st.sampled_from(["", "a", "Ab"]))
LEAVES = st.one_of(
    st.tuples(KEYS, SCALARS.map(lambda v: {"eq": v})),
    st.tuples(KEYS, SCALARS.map(lambda v: {"ne": v})),
    st.tuples(KEYS, st.lists(SCALARS, max_size=3).map(lambda v: {"in": v})),
    st.tuples(KEYS, st.lists(SCALARS, max_size=3).map(lambda v: {"nin": v})),
    st.tuples(KEYS, ORDERED.map(lambda v: {"gt": v})),
    st.tuples(KEYS, ORDERED.map(lambda v: {"lte": v})),
).map(lambda pair: {pair[0]: pair[1]})
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(
        st.sampled_from(["AND", "OR", "NOT"]), st.lists(inner, min_size=1, max_size=3)
    ).map(lambda pair: {pair[0]: pair[1]}),
    max_leaves=6,
)


def same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def holds(filters: dict[str, Any], row: dict[str, Any]) -> bool:
    """The same filter in plain Python."""
    for key, value in filters.items():
        if key in ("AND", "OR", "NOT"):
            inner = [holds(part, row) for part in value]
            result = {"AND": all(inner), "OR": any(inner), "NOT": not any(inner)}[key]
        elif key not in row:
            result = False
        else:
            ((operator, operand),) = value.items()
            actual = row[key]
            items = actual if isinstance(actual, list) else [actual]
            operands = operand if isinstance(operand, list) else [operand]
            hit = any(same(item, one) for item in items for one in operands)
            if operator in ("eq", "in"):
                result = hit
            elif operator in ("ne", "nin"):
                result = not hit
            elif isinstance(actual, (bool, list)) or type(actual) is not type(operand):
                result = False
            else:
                result = actual > operand if operator == "gt" else actual <= operand
        if not result:
            return False
    return True


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(METADATA, min_size=1, max_size=4), filters=TREES)
def test_filters_equal_plain_python(
    store: FactStore, rows: list[dict[str, Any]], filters: dict[str, Any]
) -> None:
    store.delete_scope(ALICE)
    store.add(ALICE, [MemoryIn(text="x", id=str(i), metadata=m) for i, m in enumerate(rows)])
    expected = {str(i) for i, row in enumerate(rows) if holds(filters, row)}
    assert store.matching_ids(ALICE, filters=filters) == expected
