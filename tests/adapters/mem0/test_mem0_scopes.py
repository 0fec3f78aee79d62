"""Owners and readers from Mem0's payloads and filters."""

import pytest

from inferscale_adapters.mem0.scopes import NO_OWNER, owner_of, reader_of
from inferscale_core.client import ScopeError
from inferscale_core.facts.scope import Scope


def test_owner_takes_all_three_ids() -> None:
    payload = {"data": "x", "user_id": "alice", "agent_id": "bot", "run_id": 7}
    assert owner_of(payload, "t") == Scope(tenant="t", user="alice", agent="bot", run="7")


def test_owner_is_required_except_for_bookkeeping_rows() -> None:
    with pytest.raises(ScopeError, match="user_id"):
        owner_of({"data": "x"}, "t")
    assert owner_of({"data": "x"}, "t", ownerless=True) == Scope(tenant="t", run=NO_OWNER)


@pytest.mark.parametrize(
    ("filters", "expected", "rest"),
    [
        ({"user_id": "alice"}, {"user": "alice"}, None),
        ({"user_id": {"eq": "alice"}}, {"user": "alice"}, None),
        ({"user_id": "alice", "agent_id": "*"}, {"user": "alice"}, None),
        ({"run_id": "r", "city": "Rome"}, {"run": "r"}, {"city": "Rome"}),
        (
            {"user_id": "alice", "AND": [{"user_id": "alice"}, {"age": {"gt": 3}}]},
            {"user": "alice"},
            {"AND": [{"user_id": "alice"}, {"age": {"gt": 3}}]},
        ),
        (
            {"user_id": "alice", "$or": [{"user_id": "bob"}]},
            {"user": "alice"},
            {"$or": [{"user_id": "bob"}]},
        ),
    ],
)
def test_reader_and_the_rest(filters: dict, expected: dict, rest: dict | None) -> None:
    assert reader_of(filters, "t", what="search") == (Scope(tenant="t", **expected), rest)


@pytest.mark.parametrize(
    "filters",
    [
        None,
        {},
        {"city": "Rome"},
        {"user_id": "*"},
        {"user_id": "*", "run_id": "r"},
        {"agent_id": "*"},
        {"user_id": ["alice", "bob"]},
        {"user_id": {"in": ["alice", "bob"]}},
        {"user_id": {"ne": "alice"}},
        {"user_id": "alice", "AND": [{"user_id": "bob"}]},
        {"user_id": "alice", "AND": [{"AND": [{"user_id": "*"}]}]},
        {"OR": [{"user_id": "alice"}, {"user_id": "bob"}]},
    ],
)
def test_filters_without_one_owner_are_refused(filters: dict | None) -> None:
    with pytest.raises(ScopeError):
        reader_of(filters, "t", what="search")


def test_bookkeeping_rows_can_be_read_without_a_scope() -> None:
    reader, rest = reader_of(None, "t", what="list", ownerless=True)
    assert (reader, rest) == (Scope(tenant="t", run=NO_OWNER), None)
    with pytest.raises(ScopeError):
        reader_of({"user_id": "*"}, "t", what="list", ownerless=True)
