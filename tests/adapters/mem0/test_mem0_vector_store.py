"""The vector store as Mem0 calls it, on a real core."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from inferscale_adapters.mem0 import InferScaleVectorStore
from inferscale_core.client import Conflict, NotFound, ScopeError


@pytest.fixture
def store(core_options: dict) -> Iterator[InferScaleVectorStore]:
    store = InferScaleVectorStore(collection_name=f"c{uuid.uuid4().hex}", **core_options)
    yield store
    store.delete_col()


@pytest.fixture
def entities(core_options: dict) -> Iterator[InferScaleVectorStore]:
    store = InferScaleVectorStore(collection_name=f"c{uuid.uuid4().hex}_entities", **core_options)
    yield store
    store.delete_col()


def new_id() -> str:
    return str(uuid.uuid4())


def test_payloads_come_back_exactly(store: InferScaleVectorStore) -> None:
    ids = [new_id(), new_id()]
    payloads = [
        {"data": "Likes green tea", "user_id": "alice", "hash": "h", "x": {"y": [1, None]}},
        {"data": "Owns a cello", "user_id": "bob", "run_id": "r", "created_at": "2024-01-01"},
    ]
    store.insert([[0.1], [0.2]], payloads, ids)
    assert [store.get(id).payload for id in ids] == payloads
    assert store.list({"user_id": "alice"})[0][0].payload == payloads[0]
    found = store.search("tea", [0.0], top_k=5, filters={"user_id": "alice"})
    assert [row.payload for row in found] == [payloads[0]]
    assert 0.3 < found[0].score <= 1


def test_score_of_the_same_text_is_one(store: InferScaleVectorStore) -> None:
    store.insert([[0.0]], [{"data": "Owns a cello", "user_id": "u"}], [new_id()])
    (row,) = store.search("Owns a cello", None, filters={"user_id": "u"})
    assert row.score == pytest.approx(1.0, abs=1e-3)


def test_insert_is_idempotent_and_upserts(store: InferScaleVectorStore) -> None:
    id, payload = new_id(), {"data": "Likes tea", "user_id": "alice", "n": 1}
    for _ in range(2):
        store.insert([[0.0]], [payload], [id])
    assert len(store.list({"user_id": "alice"})[0]) == 1
    store.insert([[0.0]], [{**payload, "data": "Likes coffee", "n": 2}], [id])
    assert store.get(id).payload == {"data": "Likes coffee", "user_id": "alice", "n": 2}
    with pytest.raises(Conflict):
        store.insert([[0.0]], [{"data": "x", "user_id": "bob"}], [id])


def test_update_keeps_kv_unless_the_text_changes(store: InferScaleVectorStore) -> None:
    id = new_id()
    payload = {"data": "Likes tea a lot", "user_id": "alice", "n": 1}
    store.insert([[0.0]], [payload], [id])
    end = time.monotonic() + 120
    while (before := store.core.get(id)).kv_state != "ready" and time.monotonic() < end:
        time.sleep(0.2)
    store.update(id, vector=None, payload={**payload, "n": 2})
    store.update(id, vector=[0.5])
    same = store.core.get(id)
    assert (before.kv_state, same.kv_state) == ("ready", "ready")
    assert (same.line, same.hash, same.metadata["n"]) == (before.line, before.hash, 2)
    store.update(id, vector=[0.5], payload={**payload, "data": "Likes coffee"})
    assert store.core.get(id).text == "Likes coffee"
    assert store.search("coffee", None, filters={"user_id": "alice"})[0].id == id


def test_update_never_moves_a_row(store: InferScaleVectorStore) -> None:
    id = new_id()
    store.insert([[0.0]], [{"data": "Likes tea", "user_id": "alice"}], [id])
    with pytest.raises(ScopeError, match="move"):
        store.update(id, payload={"data": "Likes tea", "user_id": "bob"})
    with pytest.raises(NotFound):
        store.update(new_id(), payload={"data": "Likes tea", "user_id": "bob"})


def test_rows_of_other_collections_are_out_of_reach(
    store: InferScaleVectorStore, entities: InferScaleVectorStore
) -> None:
    id = new_id()
    store.insert([[0.0]], [{"data": "Likes tea", "user_id": "alice"}], [id])
    assert entities.get(id) is None
    assert entities.list({"user_id": "alice"}) == [[]]
    assert entities.search("tea", None, filters={"user_id": "alice"}) == []
    entities.delete(id)
    entities.reset()
    assert store.get(id) is not None


def test_scope_is_required(store: InferScaleVectorStore) -> None:
    for filters in (None, {}, {"n": 1}, {"user_id": "*"}):
        with pytest.raises(ScopeError, match="user_id"):
            store.search("tea", None, filters=filters)
        with pytest.raises(ScopeError, match="user_id"):
            store.list(filters)
    with pytest.raises(ScopeError, match="owner"):
        store.insert([[0.0]], [{"data": "Likes tea"}], [new_id()])


def test_bookkeeping_rows_need_no_owner_and_get_no_kv(entities: InferScaleVectorStore) -> None:
    owned, free = new_id(), new_id()
    rows = [
        {"data": "Lisbon", "entity_type": "PROPER", "linked_memory_ids": ["a"], "user_id": "al"},
        {"data": "Porto", "entity_type": "PROPER", "linked_memory_ids": []},
    ]
    entities.insert([[0.0], [0.0]], rows, [owned, free])
    assert entities.core.get(owned).kv_state == "none"
    assert [row.payload for row in entities.list({"user_id": "al"})[0]] == [rows[0]]
    assert [row.payload for row in entities.list()[0]] == [rows[1]]
    (matches,) = entities.search_batch(["Lisbon"], [[0.0]], top_k=1, filters={"user_id": "al"})
    assert matches[0].score > 0.95
    entities.update(owned, vector=None, payload={**rows[0], "linked_memory_ids": ["a", "b"]})
    assert entities.get(owned).payload["linked_memory_ids"] == ["a", "b"]


def test_list_pages_through_everything(store: InferScaleVectorStore, monkeypatch) -> None:
    monkeypatch.setattr("inferscale_adapters.mem0.vector_store.PAGE", 7)
    rows = [{"data": f"Fact number {n}", "user_id": "alice", "n": n} for n in range(23)]
    store.insert([[0.0]] * 23, rows, [new_id() for _ in rows])
    assert sorted(row.payload["n"] for row in store.list({"user_id": "alice"})[0]) == [*range(23)]
    assert len(store.list({"user_id": "alice"}, top_k=10)[0]) == 10
    assert len(store.list({"user_id": "alice"}, top_k=0)[0]) == 0
    assert len(store.search("fact", None, top_k=50_000, filters={"user_id": "alice"})) == 23


def test_the_rest_of_the_interface(store: InferScaleVectorStore) -> None:
    store.create_col("anything", 3, "cosine")
    assert store.keyword_search("tea") is None
    assert store.list_cols() == [store.collection_name]
    assert store.col_info()["name"] == store.collection_name
    store.delete(new_id())
    assert store.get(new_id()) is None


def test_threads_share_a_store(store: InferScaleVectorStore) -> None:
    def add(n: int) -> None:
        store.insert([[0.0]], [{"data": f"Fact {n}", "user_id": f"u{n % 3}"}], [new_id()])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(18)))
    assert [len(store.list({"user_id": f"u{n}"})[0]) for n in range(3)] == [6, 6, 6]
