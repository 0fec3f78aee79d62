"""The queue of what to encode, and what deleting and changing takes away."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscale_core.client.models import MemoryIn
from inferscale_core.facts.records import OUTGROWN
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import EVICTED, Claim, FactStore, segment_key

ALICE = Scope(user="alice")
BOB = Scope(user="bob")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def put(store: FactStore, *texts: str, scope: Scope = ALICE) -> None:
    """Facts whose id is their text."""
    store.add(scope, [MemoryIn(text=text, id=text) for text in texts])


def encode(store: FactStore, behind: dict[str, list[str]] | None = None) -> list[Claim]:
    """Encode all that wait, each behind the facts named."""
    done: list[Claim] = []
    while claims := store.claim_pending(100):
        windows = {
            fact: [(m.id, m.line) for m in store.get_many(ids, "default")]
            for fact, ids in (behind or {}).items()
        }
        assert store.mark_ready(claims, windows) == []
        done += claims
    return done


def key(text: str, scope: Scope = ALICE) -> tuple[str, str]:
    return scope.key, segment_key(f"- {text}\n")


def states(store: FactStore) -> dict[str, str]:
    return {m.id: m.kv_state for m in store.list(tenant="default", limit=None)[0]}


def test_claims_are_oldest_first_and_of_one_namespace(store: FactStore) -> None:
    put(store, "a1")
    put(store, "b1", scope=BOB)
    put(store, "a2", "a3", "a4")
    assert store.queue_depth() == 5
    assert [c.id for c in store.claim_pending(3)] == ["a1", "a2", "a3"]
    second = store.claim_pending(3)
    assert [(c.id, c.ns) for c in second] == [("b1", BOB.key)]
    third = store.claim_pending(3)
    assert [c.id for c in third] == ["a4"]
    assert store.claim_pending(3) == []
    assert store.queue_depth() == 5, "a claim is no result"
    store.release(second)
    assert [c.id for c in store.claim_pending(3)] == ["b1"]


def test_a_fact_that_is_not_encoded_is_never_claimed(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="x", encode=False)])
    assert states(store) == {"x": "none"}
    assert store.claim_pending(1) == []
    assert store.queue_depth() == 0
    store.update("x", "default", text="y")
    assert states(store) == {"x": "none"}
    assert store.reset_kv() == 0


def test_facts_with_one_line_share_a_segment(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="1"), MemoryIn(text="x", id="2")])
    claims = store.claim_pending(10)
    assert [c.id for c in claims] == ["1"]
    store.mark_ready(claims, {})
    assert states(store) == {"1": "ready", "2": "ready"}
    assert store.add(ALICE, [MemoryIn(text="x", id="3")]).memories[0].kv_state == "ready"
    assert store.add(BOB, [MemoryIn(text="x", id="4")]).memories[0].kv_state == "pending"
    assert store.delete(["1", "3"], "default").forgotten.keys == []
    assert store.delete(["2"], "default").forgotten.keys == [key("x")]


def test_deleting_makes_stale_what_was_encoded_behind_it(store: FactStore) -> None:
    put(store, "old", "other", "mine")
    put(store, "theirs", scope=Scope(user="alice", run="r"))
    run = Scope(user="alice", run="r")
    encode(store, {"mine": ["old", "other"], "theirs": ["old"], "other": []})
    assert store.dependents("default", "old") == sorted([key("mine"), key("theirs", run)])
    result = store.delete(["old"], "default")
    assert result.ids == ["old"]
    assert set(result.forgotten.keys) == {key("old"), key("mine"), key("theirs", run)}
    assert result.forgotten.epochs == {ALICE.key: 1, run.key: 1}
    assert set(result.forgotten.stale_ids) == {"mine", "theirs"}
    assert states(store) == {"other": "ready", "mine": "stale", "theirs": "stale"}
    assert store.dependents("default", "other") == [], "a stale segment stands behind nothing"
    assert {c.id for c in encode(store)} == {"mine", "theirs"}
    assert store.epochs([ALICE.key, "unknown"]) == {ALICE.key: 1, "unknown": 0}


def test_changing_a_text_does_the_same(store: FactStore) -> None:
    put(store, "old", "mine")
    encode(store, {"mine": ["old"]})
    result = store.update("old", "default", text="new")
    assert result is not None
    assert set(result.forgotten.keys) == {key("old"), key("mine")}
    assert result.forgotten.epochs == {ALICE.key: 1}
    assert result.forgotten.stale_ids == ["mine"]
    assert states(store) == {"old": "pending", "mine": "stale"}


def test_a_sibling_keeps_the_trace_of_a_window(store: FactStore) -> None:
    put(store, "secret")
    store.add(ALICE, [MemoryIn(text="x", id="1"), MemoryIn(text="x", id="2")])
    encode(store, {"1": ["secret"]})
    store.delete(["1"], "default")
    result = store.delete(["secret"], "default")
    assert set(result.forgotten.keys) == {key("secret"), key("x")}
    assert result.forgotten.stale_ids == ["2"]


def test_an_evicted_segment_still_counts_as_a_dependent(store: FactStore) -> None:
    """The report of an eviction may be older than the capture that is in the arena."""
    put(store, "old", "mine")
    encode(store, {"mine": ["old"]})
    store.mark_pending([key("mine")])
    assert key("mine") in store.delete(["old"], "default").forgotten.keys


def test_a_line_taken_back_is_not_dropped_twice(store: FactStore) -> None:
    put(store, "a", "b")
    encode(store)
    result = store.update("a", "default", text="b")
    assert result is not None
    assert result.memory.kv_state == "ready", "the namespace has KV for this line"
    assert result.forgotten.keys == [key("a")]


def test_a_claim_whose_text_changed_is_refused(store: FactStore) -> None:
    put(store, "a", "b")
    claims = store.claim_pending(2)
    store.update("a", "default", text="c")
    assert [c.id for c in store.mark_ready(claims, {})] == ["a"]
    assert states(store) == {"a": "pending", "b": "ready"}
    assert [c.memory.text for c in store.claim_pending(2)] == ["c"]


def test_a_claim_behind_a_text_that_is_gone_is_refused(store: FactStore) -> None:
    put(store, "w1", "w2", "a", "b", "c")
    encode(store)
    store.mark_pending([key("a"), key("b"), key("c")], "lost")
    claims = store.claim_pending(5)
    windows = {
        name: [(m.id, m.line) for m in store.get_many([before], "default")]
        for name, before in (("a", "w1"), ("b", "w2"), ("c", "a"))
    }
    store.delete(["w1"], "default")
    store.update("w2", "default", text="changed")
    epoch = store.epochs([ALICE.key])[ALICE.key]
    refused = store.mark_ready(claims, windows)
    assert [c.id for c in refused] == ["a", "b"]
    assert store.epochs([ALICE.key])[ALICE.key] > epoch, "a question may have used them"
    assert states(store) == {"w2": "pending", "a": "pending", "b": "pending", "c": "ready"}
    assert {c.id for c in store.claim_pending(5)} == {"w2", "a", "b"}
    assert store.mark_ready([claims[0]], {"a": [("unknown", "- x\n")]}) == [claims[0]]


def test_a_deleted_claim_is_refused_and_stays_deleted(store: FactStore) -> None:
    put(store, "a")
    claims = store.claim_pending(1)
    store.delete(["a"], "default")
    assert store.mark_ready(claims, {}) == claims
    assert store.mark_failed(claims[0], "engine gone", NOW) is False
    assert states(store) == {}


def test_failures_are_retried_when_their_time_has_come(store: FactStore) -> None:
    put(store, "a", "b")
    first, second = store.claim_pending(2, NOW)
    assert store.mark_failed(first, "engine busy", NOW + timedelta(seconds=5))
    assert store.mark_failed(second, "longer than the context", None)
    assert store.queue_depth() == 1
    assert store.claim_pending(2, NOW) == []
    again = store.claim_pending(2, NOW + timedelta(seconds=6))
    assert [(c.id, c.attempts) for c in again] == [("a", 1)]
    memory = store.get("b", "default")
    assert memory is not None
    assert (memory.kv_state, memory.kv_reason) == ("failed", "longer than the context")
    store.mark_ready(again, {})
    ready = store.get("a", "default")
    assert ready is not None
    assert (ready.kv_state, ready.kv_reason) == ("ready", None)
    store.update("b", "default", text="shorter")
    assert [(c.id, c.attempts) for c in store.claim_pending(2, NOW)] == [("b", 0)]


def test_an_evicted_fact_waits_for_a_question(store: FactStore) -> None:
    put(store, "a", "b")
    encode(store)
    assert store.mark_pending([key("a"), ("unknown", "key")]) == 1
    memory = store.get("a", "default")
    assert memory is not None
    assert (memory.kv_state, memory.kv_reason) == ("pending", EVICTED)
    assert store.claim_pending(1) == []
    assert store.queue_depth() == 0
    assert store.wake_evicted("other", ["a"]) == 0
    assert store.wake_evicted("default", ["a", "b"]) == 1
    assert [c.id for c in store.claim_pending(1)] == ["a"]


def test_a_restart_forgets_kv_and_nothing_else(path: Path) -> None:
    with FactStore(path) as store:
        put(store, "old", "ready", "stale", "evicted", "failed", "retry", "waiting")
        encode(store, {"stale": ["old"]})
        store.delete(["old"], "default")
        store.mark_pending([key("evicted")])
        store.mark_pending([key("failed"), key("retry"), key("waiting")], "lost")
        claims = {c.id: c for c in store.claim_pending(10)}
        store.mark_failed(claims["failed"], "too long", None)
        store.mark_failed(claims["retry"], "busy", NOW)
    with FactStore(path) as store:
        names = ["ready", "stale", "evicted", "waiting", "failed", "retry"]
        # What failed is tried again: the model, or a limit, may be another now.
        expected = dict.fromkeys(names, "pending")
        assert states(store) == expected
        assert store.epochs([ALICE.key]) == {ALICE.key: 1}, "an epoch never comes back"
        assert {c.id for c in store.claim_pending(10)} == set(expected)
        assert store.delete(["ready"], "default").forgotten.stale_ids == []


def test_an_epoch_outlives_the_last_fact(store: FactStore) -> None:
    put(store, "a")
    store.delete_scope(ALICE)
    put(store, "a")
    assert store.epochs([ALICE.key]) == {ALICE.key: 1}
    assert store.delete(["a"], "default").forgotten.epochs == {ALICE.key: 2}


def test_counts(store: FactStore) -> None:
    put(store, "a", "b")
    put(store, "c", scope=BOB)
    store.add(Scope(tenant="t", user="x"), [MemoryIn(text="d", encode=False)])
    store.mark_ready(store.claim_pending(1), {})
    assert store.counts() == {"ready": 1, "pending": 2, "none": 1}
    assert store.counts(ALICE) == {"ready": 1, "pending": 1}
    assert store.counts(tenant="t") == {"none": 1}


def test_preceding_facts_are_latest_first_and_of_the_scope(store: FactStore) -> None:
    put(store, "a")
    put(store, "x", scope=BOB)
    put(store, "b", "c", "d")
    memory = store.get("c", "default")
    assert memory is not None
    assert [m.id for m in store.preceding(memory, 5)] == ["b", "a"]
    assert [m.id for m in store.preceding(memory, 1)] == ["b"]
    assert store.preceding(memory, 0) == []


LETTERS = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), LETTERS, LETTERS),
        st.tuples(st.just("update"), LETTERS, LETTERS),
        st.tuples(st.just("delete"), LETTERS, LETTERS),
        st.tuples(st.just("encode"), LETTERS, LETTERS),
        st.tuples(st.just("evict"), LETTERS, LETTERS),
    ),
    max_size=25,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_no_segment_outlives_a_text_it_saw(
    store: FactStore, steps: list[tuple[str, str, str]]
) -> None:
    """An arena that obeys ``forgotten`` never holds a trace of a text that is gone.

    Facts a-d of one scope take lines a-d; the arena remembers what each segment was made of.
    """
    store.delete_scope(ALICE)
    arena: dict[tuple[str, str], set[tuple[str, str]]] = {}
    epoch = store.epochs([ALICE.key])[ALICE.key]
    for action, fact, other in steps:
        forgotten = None
        if action == "add":
            forgotten = store.add(ALICE, [MemoryIn(text=other, id=fact)]).forgotten
        elif action == "update" and (updated := store.update(fact, "default", text=other)):
            forgotten = updated.forgotten
        elif action == "delete":
            forgotten = store.delete([fact], "default").forgotten
        elif action == "evict":
            arena.pop(key(other), None)
            store.mark_pending([key(other)])
        elif action == "encode":
            store.wake_evicted("default", list("abcd"))
            before = store.get_many([other], "default")
            window = [(m.id, m.text) for m in before]
            lines = [(m.id, m.line) for m in before]
            for claim in store.claim_pending(2):
                assert store.mark_ready([claim], {claim.id: lines}) == []
                arena.setdefault(claim.segment, set()).update(window)
                arena[claim.segment].add((claim.id, claim.memory.text))
        if forgotten is not None:
            for segment in forgotten.keys:
                arena.pop(segment, None)
            for new in forgotten.epochs.values():
                assert new == epoch + 1
                epoch = new
        live = {(m.id, m.text) for m in store.list(ALICE)[0]}
        texts = {text for _, text in live}
        for traces in arena.values():
            assert {text for _, text in traces} <= texts
        for memory in store.list(ALICE)[0]:
            if memory.kv_state == "ready":
                assert key(memory.text) in arena


def encode_among(store: FactStore, collection: str = "memories") -> list[Claim]:
    """Encode what waits next, as the queue does it with a growth of 2."""
    claims = store.claim_pending(1)
    for claim in claims:
        peers = store.peers(claim.memory.scope, collection)
        assert store.mark_ready([claim], {}, {claim.id: peers}) == []
        store.mark_outgrown(claim.memory.scope, collection, 2.0)
    return claims


def outgrown(store: FactStore) -> list[str]:
    memories = store.list(tenant="default", limit=None)[0]
    assert all(m.kv_state == "ready" for m in memories if m.kv_reason == OUTGROWN)
    return [m.id for m in memories if m.kv_reason == OUTGROWN]


def test_a_fact_is_encoded_again_each_time_its_peers_have_doubled(store: FactStore) -> None:
    encoded: list[list[str]] = []
    for text in "abcdefgh":
        put(store, text)
        encoded.append([])
        while claims := encode_among(store):
            encoded[-1] += [c.id for c in claims]
    assert encoded == [
        ["a"], ["b", "a"], ["c"], ["d", "a", "b"], ["e"], ["f", "c"], ["g"], ["h", "a", "b", "d"],
    ]  # fmt: skip


def test_facts_added_together_are_encoded_once(store: FactStore) -> None:
    put(store, *"abcdefgh")
    encoded = []
    while claims := encode_among(store):
        encoded += [c.id for c in claims]
    assert encoded == list("abcdefgh")


def test_an_outgrown_fact_stays_ready_and_waits_for_the_others(store: FactStore) -> None:
    put(store, "a")
    encode_among(store)
    put(store, "b", "c")
    assert encode_among(store)[0].id == "b"
    assert outgrown(store) == ["a"]
    assert store.queue_depth() == 1, "only c has no KV"
    assert encode_among(store)[0].id == "c"
    (again,) = store.claim_pending(1)
    assert again.id == "a"
    assert store.claim_pending(1) == []
    later = NOW + timedelta(hours=1)
    assert not store.mark_failed(again, "arena full", later)
    assert states(store)["a"] == "ready", "it keeps the KV that it has"
    assert store.claim_pending(1, later - timedelta(seconds=1)) == []
    (again,) = store.claim_pending(1, later)
    assert (again.id, again.attempts) == ("a", 1)
    assert store.mark_ready([again], {}, {"a": 3}) == []
    assert outgrown(store) == []
    put(store, "d", "e", "f")
    while store.queue_depth():
        encode_among(store)
    assert outgrown(store) == ["a", "b", "c"], "a failure ends nothing"


def test_a_fact_that_cannot_be_encoded_again_is_left_alone(store: FactStore) -> None:
    put(store, "a")
    encode_among(store)
    put(store, "b")
    encode_among(store)
    (again,) = store.claim_pending(1)
    store.mark_failed(again, "longer than the context", None)
    put(store, "c", "d")
    while store.queue_depth():
        encode_among(store)
    assert (states(store)["a"], outgrown(store)) == ("ready", ["b"])


def test_a_fact_that_shares_the_line_of_another_is_encoded_again_too(store: FactStore) -> None:
    put(store, "a")
    encode_among(store)
    store.add(ALICE, [MemoryIn(text="a", id="twin")])
    assert states(store)["twin"] == "ready"
    store.delete("a", "default")
    put(store, "b")
    while store.queue_depth():
        encode_among(store)
    assert outgrown(store) == ["twin"]


def test_a_refused_encoding_leaves_no_fact_ready_without_kv(store: FactStore) -> None:
    put(store, "a")
    encode_among(store)
    put(store, "b")
    encode_among(store)
    (again,) = store.claim_pending(1)
    store.delete("b", "default")
    before = {"a": [("b", "- b\n")]}
    assert store.mark_ready([again], before, {"a": 2}) == [again]
    assert states(store) == {"a": "pending"}
    assert [c.id for c in store.claim_pending(1)] == ["a"]


def test_facts_of_others_that_a_reader_sees_count(store: FactStore) -> None:
    narrow, other = Scope(user="alice", agent="x"), Scope(user="alice", agent="y")
    put(store, "a")
    put(store, "n", scope=narrow)
    put(store, "o", scope=other)
    put(store, "b", scope=BOB)
    while store.queue_depth():
        encode_among(store)
    assert outgrown(store) == [], "all were there when the first was encoded"
    put(store, *(f"n{i}" for i in range(3)), scope=narrow)
    while store.queue_depth():
        encode_among(store)
    assert outgrown(store) == ["a", "n"], "bob's and agent y's stand among as many as before"


def test_leaving_the_arena_or_going_stale_is_not_outgrown(store: FactStore) -> None:
    put(store, "a")
    encode_among(store)
    put(store, "b")
    encode_among(store)
    assert outgrown(store) == ["a"]
    store.mark_pending([key("a")], EVICTED)
    assert outgrown(store) == []
    assert store.mark_outgrown(ALICE, "memories", 2.0) == 0
    assert store.claim_pending(1) == []


def test_another_collection_is_another_company(store: FactStore) -> None:
    put(store, "a")
    encode_among(store)
    store.add(ALICE, [MemoryIn(text=t, id=t) for t in "xyz"], collection="other")
    while store.queue_depth():
        encode_among(store, "other")
    assert outgrown(store) == []
