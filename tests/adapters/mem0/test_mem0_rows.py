"""Payloads to facts and back."""

from datetime import UTC, datetime

import pytest

from inferscale_adapters.mem0.rows import to_fact, to_row
from inferscale_core.client.models import Memory, MemoryIn
from inferscale_core.facts.scope import Scope


def stored(fact: MemoryIn, **scope: str) -> Memory:
    now = datetime.now(UTC)
    return Memory(
        id=fact.id or "x",
        scope=Scope(**scope),
        text=fact.text,
        line=f"- {fact.text}\n",
        hash="h",
        metadata=fact.metadata,
        created_at=now,
        updated_at=now,
        kv_state="pending",
    )


@pytest.mark.parametrize(
    "payload",
    [
        {"data": "Likes tea", "user_id": "alice", "hash": "h", "created_at": "2024-05-01T10:00:00"},
        {"data": "Paris", "entity_type": "PROPER", "linked_memory_ids": ["a"], "user_id": "alice"},
        {"data": "x", "user_id": "alice", "nested": {"list": [1, 2.5, None, True]}, "ü": "é"},
        {"data": "x", "user_id": "alice", "created_at": "not a date"},
        {"type": "user_identity", "user_id": "alice"},
    ],
)
def test_payload_comes_back_exactly(payload: dict) -> None:
    fact = to_fact("id1", payload, encode=True)
    row = to_row(stored(fact, user="alice"))
    assert (row.id, row.payload) == ("id1", payload)


def test_row_without_text_is_never_encoded() -> None:
    fact = to_fact("id1", {"type": "user_identity"}, encode=True)
    assert not fact.encode


@pytest.mark.parametrize("text", ["", 7, ["a"]])
def test_text_must_be_a_string_with_something_in_it(text: object) -> None:
    with pytest.raises(ValueError, match="non-empty string"):
        to_fact("id1", {"data": text}, encode=True)


def test_facts_of_other_clients_get_mem0s_keys() -> None:
    row = to_row(stored(MemoryIn(id="a", text="Likes tea"), user="alice", run="r"))
    assert row.payload["data"] == "Likes tea"
    assert (row.payload["user_id"], row.payload["run_id"]) == ("alice", "r")
    assert row.payload["hash"] == "h"
    assert datetime.fromisoformat(row.payload["created_at"])
