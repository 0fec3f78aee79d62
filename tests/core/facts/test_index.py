"""The index gives exactly what brute force gives, within the scope and nothing else."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_core.client.models import MemoryIn
from inferscale_core.facts.index import EmbeddingIndex
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore

ALICE = Scope(user="alice")
BOB = Scope(user="bob")
DIM = 8


def random_vectors(count: int, dim: int = DIM, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)


def brute_force(
    ids: list[str], vectors: np.ndarray, query: np.ndarray, k: int
) -> list[tuple[str, float]]:
    wide, one = vectors.astype(np.float64), query.astype(np.float64)
    scores = wide @ one / (np.linalg.norm(wide, axis=1) * np.linalg.norm(one))
    return [(ids[row], scores[row]) for row in np.argsort(-scores, kind="stable")[:k]]


def check(hits: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [i for i, _ in hits] == [i for i, _ in expected]
    np.testing.assert_allclose([s for _, s in hits], [s for _, s in expected], atol=1e-6)


def test_100_000_facts_of_one_tenant_equal_brute_force() -> None:
    torch.set_num_threads(1)
    count, dim = 100_000, 96
    vectors = random_vectors(count, dim)
    vectors[70_000] = vectors[123]
    ids = [f"f{i}" for i in range(count)]
    owners = [Scope(user=f"u{i % 3}", run=None if i % 2 else "r") for i in range(6)]
    index = EmbeddingIndex(dim)
    index.upsert(ids, [owners[i % 6] for i in range(count)], vectors)
    assert len(index) == count
    queries = random_vectors(3, dim, seed=1)
    queries[2] = vectors[123]
    for reader in (Scope(user="u0"), Scope(run="r"), Scope(user="u1", run="r")):
        rows = [i for i in range(count) if reader.sees(owners[i % 6])]
        chosen, names = vectors[rows], [ids[i] for i in rows]
        start = time.thread_time()
        found = index.search(reader, queries, 50)
        took = time.thread_time() - start
        for hits, query in zip(found, queries, strict=True):
            check(hits, brute_force(names, chosen, query, 50))
        assert took < 5, "a loop over facts would take longer"
    allowed = {ids[i] for i in range(0, count, 7)}
    rows = [i for i in range(0, count, 7) if i % 3 == 0]
    hits = index.search(Scope(user="u0"), queries[0], 20, allowed_ids=allowed)[0]
    check(hits, brute_force([ids[i] for i in rows], vectors[rows], queries[0], 20))


NAMES = st.sampled_from([None, "a", "b"])
SCOPES = (
    st.tuples(st.sampled_from(["t1", "t2"]), NAMES, NAMES, NAMES)
    .filter(lambda s: any(s[1:]))
    .map(lambda s: Scope(tenant=s[0], user=s[1], agent=s[2], run=s[3]))
)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "remove"]),
        st.integers(0, 12),
        SCOPES,
        st.integers(0, 5),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    operations=OPERATIONS,
    reader=SCOPES,
    k=st.integers(0, 15),
    allowed=st.none() | st.sets(st.integers(0, 14).map(str)),
    excluded=st.sets(st.integers(0, 14).map(str), max_size=3),
)
def test_only_the_readers_facts_come_back(
    operations: list[tuple[str, int, Scope, int]],
    reader: Scope,
    k: int,
    allowed: set[str] | None,
    excluded: set[str],
) -> None:
    """Ids are unique per tenant, and a fact never moves to another scope."""
    pool = random_vectors(6)
    index = EmbeddingIndex(DIM)
    kept: dict[tuple[str, str], tuple[Scope, np.ndarray]] = {}
    for action, number, scope, vector in operations:
        place = (scope.tenant, str(number))
        if action == "remove":
            index.remove([str(number)], scope.tenant)
            kept.pop(place, None)
        else:
            owner = kept[place][0] if place in kept else scope
            index.upsert([str(number)], [owner], pool[vector][None])
            kept[place] = (owner, pool[vector])
    visible = [
        (i, vector)
        for (_, i), (owner, vector) in kept.items()
        if reader.sees(owner) and (allowed is None or i in allowed) and i not in excluded
    ]
    query = random_vectors(1, seed=5)[0]
    (hits,) = index.search(reader, query, k, allowed_ids=allowed, exclude_ids=excluded)
    if not visible or k == 0:
        assert hits == []
    else:
        ids = [i for i, _ in visible]
        check(hits, brute_force(ids, np.array([v for _, v in visible]), query, k))
    assert len(index) == len(kept)


def test_equal_vectors_come_in_order_of_arrival() -> None:
    index = EmbeddingIndex(384)
    vector = random_vectors(1, 384)
    for count in (1, 500, 300):
        start = len(index)
        ids = [f"{start + i:04}" for i in range(count)]
        index.upsert(ids, [ALICE] * count, np.repeat(vector, count, axis=0) * 3)
    index.upsert(["0005"], [ALICE], vector)
    (hits,) = index.search(ALICE, vector, 10_000)
    assert [i for i, _ in hits] == [f"{i:04}" for i in range(801)]
    assert {round(score, 9) for _, score in hits} == {1.0}
    (some,) = index.search(ALICE, vector, 7, before_id="0004")
    assert [i for i, _ in some] == ["0000", "0001", "0002", "0003"]


def test_room_is_taken_back_after_removals() -> None:
    index = EmbeddingIndex(DIM)
    vectors = random_vectors(2000)
    ids = [str(i) for i in range(2000)]
    index.upsert(ids, [ALICE] * 2000, vectors)
    index.remove(ids[:1500], "default")
    index.remove(["unknown"], "default")
    index.remove(ids[1500:1600], "other")
    assert len(index) == 500
    (hits,) = index.search(ALICE, vectors[1700], 9)
    check(hits, brute_force(ids[1500:], vectors[1500:], vectors[1700], 9))
    index.upsert(ids[:10], [ALICE] * 10, vectors[:10])
    assert index.search(ALICE, vectors[3], 1)[0][0][0] == "3"


def test_collections_and_unknown_scopes_are_apart() -> None:
    index = EmbeddingIndex(DIM)
    vectors = random_vectors(2)
    index.upsert(["1"], [ALICE], vectors[:1], "a")
    index.upsert(["2"], [ALICE], vectors[1:], "b")
    assert [i for i, _ in index.search(ALICE, vectors[0], 5, collection="b")[0]] == ["2"]
    assert index.search(ALICE, vectors, 5) == [[], []]
    assert index.search(BOB, vectors[0], 5, collection="a") == [[]]
    assert index.search(ALICE, vectors[0], 0, collection="a") == [[]]
    assert index.search(ALICE, vectors[:0], 5, collection="a") == []
    index.remove(["1"], "default")
    assert index.search(ALICE, vectors[0], 5, collection="a") == [[]]


def test_a_zero_vector_is_like_nothing() -> None:
    index = EmbeddingIndex(DIM)
    index.upsert(["0"], [ALICE], np.zeros((1, DIM), np.float32))
    assert index.search(ALICE, random_vectors(1), 1) == [[("0", 0.0)]]


def test_vectors_of_another_shape_are_refused() -> None:
    index = EmbeddingIndex(DIM)
    with pytest.raises(ValueError, match="dimension 8"):
        index.search(ALICE, np.zeros(9, np.float32), 1)
    with pytest.raises(ValueError, match="vectors"):
        index.upsert(["1"], [ALICE], random_vectors(2))
    with pytest.raises(ValueError, match="scopes"):
        index.upsert(["1", "2"], [ALICE], random_vectors(2))
    with pytest.raises(ValueError, match="finite"):
        index.upsert(["1"], [ALICE], np.full((1, DIM), np.inf, np.float32))
    assert len(index) == 0


def test_it_is_rebuilt_from_the_store(store: FactStore) -> None:
    vectors = random_vectors(12_000)
    other = Scope(tenant="t", user="alice", agent="bot")
    items = [MemoryIn(text=f"t{i}", id=str(i)) for i in range(6_000)]
    store.add(ALICE, items, vectors[:6_000])
    store.add(other, items, vectors[6_000:], "people")
    store.add(BOB, [MemoryIn(text="wide", id="wide")], np.ones((1, DIM + 1), np.float32))
    index = EmbeddingIndex(DIM)
    index.upsert(["left over"], [ALICE], vectors[:1])
    assert index.load(store) == 12_000 == len(index)
    (hits,) = index.search(ALICE, vectors[5], 4)
    check(hits, brute_force([i.id or "" for i in items], vectors[:6_000], vectors[5], 4))
    (hits,) = index.search(Scope(tenant="t", agent="bot"), vectors[6_007], 1, collection="people")
    assert hits[0][0] == "7"


def test_threads_search_while_others_write() -> None:
    index = EmbeddingIndex(DIM)
    vectors = random_vectors(400)
    errors: list[BaseException] = []

    def write(user: str) -> None:
        try:
            for i in range(200):
                index.upsert([f"{user}{i}"], [Scope(user=user)], vectors[i : i + 1])
                if i % 3 == 0:
                    index.remove([f"{user}{i}"], "default")
        except BaseException as error:
            errors.append(error)

    def read(user: str) -> None:
        try:
            for i in range(100):
                for hits in index.search(Scope(user=user), vectors[i : i + 2], 5):
                    assert all(name.startswith(user) for name, _ in hits)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=f, args=(u,)) for u in "abc" for f in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(index) == 3 * 133
