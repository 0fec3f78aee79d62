"""Facts are kept as given, once per id, and read by those who may."""

import hashlib
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscale_core.client.models import MemoryIn, Turn
from inferscale_core.facts.errors import FactError, IdConflictError, StoreError
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore, segment_key

ALICE = Scope(user="alice")
BOB = Scope(user="bob")
SHARED = [HealthCheck.function_scoped_fixture]


def test_a_fact_comes_back_as_it_was_given(store: FactStore) -> None:
    moment = datetime(2023, 5, 8, 23, 30, tzinfo=timezone(timedelta(hours=2)))
    item = MemoryIn(
        text="Alice moved to Rome",
        id="f1",
        metadata={"city": "Rome", "tags": ["home", 1, None], "deep": {"a": [True]}},
        created_at=datetime(2023, 5, 9, 1, 2, 3, 456789),
        valid_at=moment,
        turns=[Turn(role="user", content="I moved!", name="alice")],
    )
    added = store.add(ALICE, [item], collection="people")
    memory = added.memories[0]
    assert added.created == ["f1"]
    assert store.get("f1", "default") == memory
    assert memory.text == item.text
    assert memory.line == "- 8 May 2023: Alice moved to Rome\n"
    assert memory.metadata == item.metadata
    assert memory.created_at == datetime(2023, 5, 9, 1, 2, 3, 456789, tzinfo=UTC)
    assert memory.valid_at == moment
    assert memory.collection == "people"
    assert memory.scope == ALICE
    assert memory.kv_state == "pending"
    assert memory.hash == hashlib.md5(item.text.encode()).hexdigest()
    assert store.claim_pending(1)[0].turns == item.turns


def test_a_fact_without_a_date_has_none_in_its_line(store: FactStore) -> None:
    memory = store.add(ALICE, [MemoryIn(text="Likes {braces} and\nlines")]).memories[0]
    assert memory.line == "- Likes {braces} and\nlines\n"
    assert len(segment_key(memory.line)) == 32


def test_the_same_add_twice_gives_one_row(store: FactStore) -> None:
    item = MemoryIn(text="x", id="same", metadata={"n": 1})
    first = store.add(ALICE, [item]).memories[0]
    again = store.add(ALICE, [item.model_copy(update={"metadata": {"n": 2}})])
    assert again.memories == [first]
    assert again.created == []
    assert again.changed == []
    assert not again.forgotten
    assert store.list(ALICE)[1] == 1


def test_the_same_id_with_another_text_is_an_update(store: FactStore) -> None:
    first = store.add(ALICE, [MemoryIn(text="x", id="same")]).memories[0]
    result = store.add(ALICE, [MemoryIn(text="y", id="same", metadata={"n": 1})])
    assert result.changed == ["same"]
    assert result.memories[0].text == "y"
    assert result.memories[0].metadata == {"n": 1}
    assert result.forgotten.keys == [(ALICE.key, segment_key(first.line))]
    assert result.forgotten.epochs == {ALICE.key: 1}


def test_an_id_of_another_scope_or_collection_is_refused(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="same")])
    with pytest.raises(IdConflictError, match="'same'"):
        store.add(BOB, [MemoryIn(text="new"), MemoryIn(text="x", id="same")])
    with pytest.raises(IdConflictError):
        store.add(ALICE, [MemoryIn(text="x", id="same")], collection="other")
    with pytest.raises(IdConflictError, match="two texts"):
        store.add(ALICE, [MemoryIn(text="a", id="i"), MemoryIn(text="b", id="i")])
    assert store.list(BOB)[1] == 0, "a refused call stores nothing"


def test_tenants_do_not_share_ids(store: FactStore) -> None:
    theirs = Scope(tenant="other", user="alice")
    store.add(ALICE, [MemoryIn(text="mine", id="1")])
    store.add(theirs, [MemoryIn(text="theirs", id="1")])
    assert [m.text for m in store.get_many(["1"], "default")] == ["mine"]
    assert [m.text for m in store.get_many(["1"], "other")] == ["theirs"]
    assert store.delete(["1"], "other").ids == ["1"]
    assert store.get("1", "default") is not None


def test_many_are_read_in_the_order_asked(store: FactStore) -> None:
    items = [MemoryIn(text=f"t{i}", id=str(i)) for i in range(1200)]
    assert [m.id for m in store.add(ALICE, items).memories] == [i.id for i in items]
    asked = [str(i) for i in range(1199, -1, -1)]
    assert [m.id for m in store.get_many([*asked, "unknown"], "default")] == asked


def test_lists_are_paged_in_order_of_arrival(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text=f"t{i}", id=str(i)) for i in range(10)])
    page, total = store.list(ALICE, limit=3, offset=4)
    assert [m.id for m in page] == ["4", "5", "6"]
    assert total == 10
    assert store.list(ALICE, limit=0) == ([], 10)
    assert len(store.list(ALICE, limit=None)[0]) == 10
    with pytest.raises(FactError, match="scope or a tenant"):
        store.list()


NAMES = st.sampled_from([None, "a", "b"])
SCOPES = st.builds(
    dict, tenant=st.sampled_from(["t1", "t2"]), user=NAMES, agent=NAMES, run=NAMES
).filter(lambda s: s["user"] or s["agent"] or s["run"])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(owners=st.lists(SCOPES, min_size=1, max_size=6), reader=SCOPES)
def test_a_reader_gets_what_its_scope_sees(
    store: FactStore, owners: list[dict[str, str]], reader: dict[str, str]
) -> None:
    for tenant in ("t1", "t2"):
        for memory in store.list(tenant=tenant, limit=None)[0]:
            store.delete([memory.id], tenant)
    scope = Scope(**reader)
    expected = set()
    for number, owner in enumerate(owners):
        fact_id = str(number)
        store.add(Scope(**owner), [MemoryIn(text=fact_id, id=fact_id)])
        if scope.sees(Scope(**owner)):
            expected.add(fact_id)
    assert {m.id for m in store.list(scope)[0]} == expected
    assert store.matching_ids(scope) == expected
    assert {m.id for m in store.get_many(list("012345"), scope.tenant, scope=scope)} == expected
    assert sum(store.counts(scope).values()) == len(expected)
    visible = {Scope(**o).key for o in owners if scope.sees(Scope(**o))}
    assert set(store.visible_epochs(scope)) == visible
    assert set(store.delete_scope(scope).ids) == expected


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(min_size=1, max_size=50), value=st.text(max_size=20))
def test_any_text_survives(store: FactStore, text: str, value: str) -> None:
    memory = store.add(ALICE, [MemoryIn(text=text, metadata={value: value})]).memories[0]
    assert memory.text == text
    assert memory.metadata == {value: value}
    assert memory.line == f"- {text}\n"


def test_lone_surrogates_are_replaced(store: FactStore) -> None:
    item = MemoryIn.model_construct(
        text="a\ud800b", id="i\udfff", metadata={"k\ud800": "\udc00"}, turns=[], encode=True,
        created_at=None, valid_at=None, invalid_at=None,
    )  # fmt: skip
    memory = store.add(ALICE, [item]).memories[0]
    assert memory.text == "a?b"
    assert memory.metadata == {"k?": "?"}
    assert store.get("i\udfff", "default") == memory


@pytest.mark.parametrize(
    "metadata", [{"x": float("nan")}, {"x": {1, 2}}, {"x": datetime(2024, 1, 1)}]
)
def test_metadata_that_is_not_json_is_refused(store: FactStore, metadata: dict) -> None:
    with pytest.raises(FactError, match="metadata must be JSON"):
        store.add(ALICE, [MemoryIn(text="x", metadata=metadata)])
    assert store.list(ALICE)[1] == 0


def test_metadata_nested_without_end_is_refused(store: FactStore) -> None:
    deep: dict = {}
    for _ in range(5000):
        deep = {"d": deep}
    item = MemoryIn.model_construct(
        text="x", id=None, metadata=deep, turns=[], encode=True,
        created_at=None, valid_at=None, invalid_at=None,
    )  # fmt: skip
    with pytest.raises(FactError, match="JSON"):
        store.add(ALICE, [item])


def test_metadata_too_deep_for_an_answer_is_refused(store: FactStore) -> None:
    """A row that no answer can hold would hide all others of its scope."""

    def nested(levels: int) -> dict:
        return {} if levels == 0 else {"d": nested(levels - 1)}

    stored = store.add(ALICE, [MemoryIn(text="x", id="x", metadata=nested(50))]).memories[0]
    stored.model_dump_json()
    for add in (lambda m: store.add(ALICE, [MemoryIn(text="y", metadata=m)]),
                lambda m: store.update("x", "default", metadata=m)):  # fmt: skip
        with pytest.raises(FactError, match="nesting"):
            add(nested(300))


def test_vectors_are_kept_and_checked(store: FactStore) -> None:
    vectors = np.eye(3, 4, dtype=np.float32)
    store.add(ALICE, [MemoryIn(text=f"t{i}", id=str(i)) for i in range(3)], vectors)
    kept = store.get_vectors("default", ["2", "0", "unknown"])
    assert set(kept) == {"0", "2"}
    np.testing.assert_array_equal(kept["2"], vectors[2])
    with pytest.raises(FactError, match="shape"):
        store.add(ALICE, [MemoryIn(text="x")], np.zeros((2, 4), np.float32))
    with pytest.raises(FactError, match="finite"):
        store.add(ALICE, [MemoryIn(text="x")], np.full((1, 4), np.nan, np.float32))


def test_facts_stored_without_vector_get_one_later(store: FactStore) -> None:
    assert store.use_embedder("model-a", 2) is False
    store.add(ALICE, [MemoryIn(text="one", id="1"), MemoryIn(text="two", id="2")])
    waiting = store.facts_without_vector()
    assert [m.id for m in waiting] == ["1", "2"]
    store.update("2", "default", text="changed")
    taken = store.set_vectors(waiting, np.eye(2, dtype=np.float32))
    assert [m.id for m in taken] == ["1"], "a text that changed needs another vector"
    assert [m.id for m in store.facts_without_vector()] == ["2"]
    assert store.use_embedder("model-a", 2) is False
    assert store.use_embedder("model-b", 2) is True
    assert len(store.facts_without_vector()) == 2


def test_an_update_of_metadata_leaves_the_kv(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="1")], np.ones((1, 2), np.float32))
    claims = store.claim_pending(1)
    store.mark_ready(claims, {})
    result = store.update("1", "default", metadata={"a": 1}, invalid_at=datetime(2030, 1, 1))
    assert result is not None
    assert result.memory.kv_state == "ready"
    assert result.memory.metadata == {"a": 1}
    assert result.memory.invalid_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert not result.line_changed
    assert not result.forgotten
    assert store.get_vectors("default", ["1"])
    cleared = store.update("1", "default", invalid_at=None)
    assert cleared is not None
    assert cleared.memory.invalid_at is None


def test_an_update_of_text_takes_vector_and_kv(store: FactStore) -> None:
    old = store.add(ALICE, [MemoryIn(text="x", id="1")], np.ones((1, 2), np.float32)).memories[0]
    store.mark_ready(store.claim_pending(1), {})
    result = store.update("1", "default", text="y")
    assert result is not None
    assert result.line_changed
    assert result.memory.kv_state == "pending"
    assert result.forgotten.keys == [(ALICE.key, segment_key(old.line))]
    assert store.get_vectors("default", ["1"]) == {}
    store.update("1", "default", text="z", vector=np.zeros(2, np.float32))
    assert set(store.get_vectors("default", ["1"])) == {"1"}


def test_a_new_date_changes_the_line(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="1")], np.ones((1, 2), np.float32))
    result = store.update("1", "default", valid_at=datetime(2024, 2, 1))
    assert result is not None
    assert result.memory.line == "- 1 February 2024: x\n"
    assert result.line_changed
    assert store.get_vectors("default", ["1"]), "the text is the same"


def test_updates_of_what_is_not_there(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="1")])
    assert store.update("2", "default", text="y") is None
    assert store.update("1", "other", text="y") is None
    assert store.update("1", "default", scope=BOB, text="y") is None
    with pytest.raises(FactError, match="empty"):
        store.update("1", "default", text="")
    assert store.get("1", "default", scope=BOB) is None
    assert store.delete(["1"], "default", scope=BOB).ids == []


def test_deleted_text_is_not_in_the_files(store: FactStore, path: Path) -> None:
    secret = "the passphrase is xyzzy-" * 30
    store.add(ALICE, [MemoryIn(text=secret, id="1"), MemoryIn(text="other", id="2")])
    store.delete(["1"], "default")
    store.update("2", "default", text="changed")
    for file in path.parent.iterdir():
        content = file.read_bytes()
        assert b"xyzzy" not in content, file
        assert b"- other" not in content, file


def test_a_collection_is_deleted_whole(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text="x", id="1")], collection="a")
    store.add(BOB, [MemoryIn(text="x", id="2")], collection="a")
    store.add(BOB, [MemoryIn(text="x", id="3")], collection="b")
    store.add(Scope(tenant="t", user="x"), [MemoryIn(text="x", id="1")], collection="a")
    result = store.delete_collection("a", "default")
    assert result.ids == ["1", "2"]
    assert set(result.forgotten.epochs) == {ALICE.key, BOB.key}
    assert store.delete_scope(BOB, "a").ids == []
    assert store.delete_scope(BOB).ids == ["3"]
    assert store.list(tenant="t")[1] == 1


def test_many_are_deleted_at_once(store: FactStore) -> None:
    store.add(ALICE, [MemoryIn(text=f"t{i}", id=str(i)) for i in range(3000)])
    result = store.delete([str(i) for i in range(2500)], "default")
    assert len(result.ids) == len(result.forgotten.keys) == 2500
    assert result.forgotten.epochs == {ALICE.key: 1}
    assert store.list(ALICE)[1] == 500


def test_formats_without_their_fields_are_refused(path: Path) -> None:
    for formats in (
        {"line_format": "- fact\n"},
        {"line_format": "- {text} {date}\n"},
        {"line_format": "- {text\n"},
        {"dated_line_format": "- {text}\n"},
    ):
        with pytest.raises(FactError, match="format"):
            FactStore(path, **formats)


def test_lines_follow_a_changed_format(path: Path) -> None:
    with FactStore(path) as store:
        store.add(ALICE, [MemoryIn(text="x", id="1")])
        store.add(ALICE, [MemoryIn(text="y", id="2", valid_at=datetime(2024, 1, 2))])
    with FactStore(
        path, line_format="* {text}\n", dated_line_format="* {text} ({date})\n"
    ) as store:
        lines = [m.line for m in store.list(ALICE)[0]]
        assert lines == ["* x\n", "* y (2 January 2024)\n"]
        assert store.claim_pending(1)[0].line_key == segment_key("* x\n")


def test_threads_write_and_read_at_once(store: FactStore) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        scope = Scope(user=f"user{number}")
        try:
            for i in range(12):
                fact_id = f"{number}-{i}"
                store.add(scope, [MemoryIn(text=f"{number} {i}", id=fact_id)])
                assert store.get(fact_id, "default") is not None
                store.update(fact_id, "default", text=f"{number} {i} again")
                if i % 3 == 0:
                    assert store.delete([fact_id], "default").ids == [fact_id]
                store.list(scope)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.list(tenant="default")[1] == 8 * 8
    assert store.epochs([Scope(user="user0").key]) == {Scope(user="user0").key: 16}


def test_threads_add_the_same_id_once(store: FactStore) -> None:
    barrier = threading.Barrier(6)
    created: list[str] = []

    def work() -> None:
        barrier.wait()
        created.extend(store.add(ALICE, [MemoryIn(text="x", id="same")]).created)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert created == ["same"]


def test_a_closed_store_says_so(path: Path) -> None:
    store = FactStore(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.list(ALICE)
