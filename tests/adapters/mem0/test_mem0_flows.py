"""Mem0's own flows on a real core."""

import uuid
from collections.abc import Iterator

import pytest

from inferscale_adapters.mem0 import Memory
from inferscale_core.client import ScopeError
from inferscale_core.client.models import MemoryReport, StatusResponse


def texts(found: dict) -> list[str]:
    return [row["memory"] for row in found["results"]]


@pytest.fixture
def alice(memory: Memory) -> Iterator[str]:
    user = f"alice-{uuid.uuid4().hex[:8]}"
    yield user
    memory.delete_all(user_id=user)


@pytest.fixture
def bob(memory: Memory) -> Iterator[str]:
    user = f"bob-{uuid.uuid4().hex[:8]}"
    yield user
    memory.delete_all(user_id=user)


def test_add_search_update_delete_and_history(memory: Memory, alice: str) -> None:
    added = memory.add(
        [
            {"role": "user", "content": "I adopted a greyhound named Pixel", "name": "ann"},
            {"role": "system", "content": "ignored"},
            {"role": "assistant", "content": "Greyhounds sleep a lot"},
        ],
        user_id=alice,
        metadata={"topic": "pets", "nested": {"n": [1, 2.5, None]}},
        infer=False,
    )["results"]
    assert [row["memory"] for row in added] == [
        "I adopted a greyhound named Pixel",
        "Greyhounds sleep a lot",
    ]
    pixel = added[0]["id"]

    found = memory.search("What is the dog called?", filters={"user_id": alice}, top_k=2)
    assert texts(found)[0] == "I adopted a greyhound named Pixel"
    assert all(0 < row["score"] <= 1 for row in found["results"])
    scores = [row["score"] for row in found["results"]]
    assert scores == sorted(scores, reverse=True)

    row = memory.get(pixel)
    assert row["memory"] == "I adopted a greyhound named Pixel"
    assert row["user_id"] == alice
    assert row["actor_id"] == "ann"
    assert row["role"] == "user"
    assert row["metadata"] == {"topic": "pets", "nested": {"n": [1, 2.5, None]}}

    memory.update(pixel, text="I adopted a whippet named Pixel")
    changed = memory.get(pixel)
    assert changed["memory"] == "I adopted a whippet named Pixel"
    assert changed["created_at"] == row["created_at"]
    assert changed["updated_at"] > row["updated_at"]
    assert changed["metadata"] == row["metadata"]
    memory.update(pixel, metadata={"topic": "dogs"})
    assert memory.get(pixel)["metadata"]["topic"] == "dogs"
    assert sorted(texts(memory.get_all(filters={"user_id": alice}))) == [
        "Greyhounds sleep a lot",
        "I adopted a whippet named Pixel",
    ]

    memory.delete(pixel)
    assert memory.get(pixel) is None
    with pytest.raises(ValueError, match="not found"):
        memory.delete(pixel)
    assert texts(memory.get_all(filters={"user_id": alice})) == ["Greyhounds sleep a lot"]
    assert [entry["event"] for entry in memory.history(pixel)] == [
        "ADD",
        "UPDATE",
        "UPDATE",
        "DELETE",
    ]


def test_two_users_never_see_each_other(memory: Memory, alice: str, bob: str) -> None:
    same = "My door code is 4711"
    memory.add(same, user_id=alice, infer=False)
    memory.add("My door code is 9999", user_id=bob, infer=False)
    assert texts(memory.search("door code", filters={"user_id": alice})) == [same]
    assert texts(memory.search("door code", filters={"user_id": bob})) == ["My door code is 9999"]
    memory.delete_all(user_id=bob)
    assert texts(memory.get_all(filters={"user_id": bob})) == []
    assert texts(memory.get_all(filters={"user_id": alice})) == [same]


def test_filters_cannot_reach_another_user(memory: Memory, alice: str, bob: str) -> None:
    memory.add("My door code is 4711", user_id=alice, agent_id="bot", infer=False)
    memory.add("My door code is 9999", user_id=bob, infer=False)
    for filters in (
        {"user_id": alice, "AND": [{"user_id": bob}]},
        {"user_id": "*"},
        {"user_id": "*", "agent_id": "bot"},
        {"user_id": alice, "AND": [{"user_id": {"in": [alice, bob]}}]},
    ):
        with pytest.raises(ScopeError):
            memory.search("door code", filters=filters)
        with pytest.raises(ScopeError):
            memory.get_all(filters=filters)
        with pytest.raises(ScopeError):
            memory.chat("door code", filters=filters)
    either = {"user_id": alice, "OR": [{"user_id": bob}, {"user_id": alice}]}
    assert texts(memory.search("door code", filters=either)) == ["My door code is 4711"]
    only_bob = {"user_id": alice, "OR": [{"user_id": bob}]}
    assert texts(memory.search("door code", filters=only_bob)) == []
    assert len(texts(memory.search("code", filters={"user_id": alice, "agent_id": "*"}))) == 1
    with pytest.raises(ValueError, match="user_id"):
        memory.search("door code", filters={"city": "Rome"})


def test_metadata_filters(memory: Memory, alice: str) -> None:
    for year in (2021, 2022, 2023):
        memory.add(f"Trip {year}", user_id=alice, metadata={"year": year}, infer=False)

    def years(**condition: object) -> list[str]:
        filters = {"user_id": alice, **condition}
        return sorted(texts(memory.search("trip", filters=filters, threshold=0.0)))

    assert years(year=2022) == ["Trip 2022"]
    assert years(year={"gte": 2022}) == ["Trip 2022", "Trip 2023"]
    assert years(year={"in": [2021, 2023]}) == ["Trip 2021", "Trip 2023"]
    assert years(OR=[{"year": 2021}, {"year": 2022}]) == ["Trip 2021", "Trip 2022"]
    assert years(NOT=[{"year": 2021}]) == ["Trip 2022", "Trip 2023"]
    assert years(AND=[{"year": {"gt": 2021}}, {"year": {"lt": 2023}}]) == ["Trip 2022"]


def test_chat_injects_what_search_finds(memory: Memory, alice: str) -> None:
    facts = [f"Alice visited city number {n} and bought a blue lamp there" for n in range(12)]
    for fact in [*facts, "Alice named her greyhound Pixel"]:
        memory.add(fact, user_id=alice, infer=False)
    states = memory.wait_for_kv(user_id=alice).facts
    assert states.get("ready") == len(facts) + 1

    asked = {"user_id": alice, "k": 10, "threshold": 0.0, "max_tokens": 8}
    answer = memory.chat("What is the dog's name?", **asked)
    assert answer["choices"][0]["message"]["content"] == answer.choices[0].message.content
    assert answer.text == answer.choices[0].message.content
    report = answer.inferscale
    assert isinstance(report, MemoryReport)
    assert len(report.facts) == 10
    assert report.facts[-1].text == "Alice named her greyhound Pixel"
    assert all(fact.injected for fact in report.facts)
    assert report.injected_tokens >= report.memory_tokens > 0

    text = memory.chat("What is the dog's name?", mode="text", **asked)
    assert text.inferscale is not None
    assert text.inferscale.injected_tokens == 0
    assert text.usage.prompt_tokens == answer.usage.prompt_tokens


def test_messages_and_complete_take_the_transparent_way(memory: Memory, alice: str) -> None:
    facts = [f"Alice visited city number {n} and bought a red lamp there" for n in range(12)]
    for fact in facts:
        memory.add(fact, user_id=alice, infer=False)
    memory.wait_for_kv(user_id=alice)
    query = "Where was Alice?"
    found = memory.search(query, filters={"user_id": alice}, top_k=8)
    messages = memory.messages(query, found)
    assert messages[0]["role"] == "system"
    assert messages[0]["content"].endswith(f"- {found['results'][0]['memory']}\n")
    assert messages[1] == {"role": "user", "content": query}

    injected = []
    for rows in (found["results"], found["results"][::-1]):  # in any order
        messages = memory.messages(query, rows)
        with memory.complete(messages, user_id=alice, max_tokens=8, stream=True) as chunks:
            assert "".join(chunk.text for chunk in chunks)
        assert chunks.inferscale is not None
        injected.append(chunks.inferscale.injected_tokens)
    assert all(tokens > 0 for tokens in injected)

    other = memory.complete(messages, user_id="somebody-else", max_tokens=4).inferscale
    assert other is not None
    assert other.injected_tokens == 0


def test_chat_without_memories_is_a_plain_question(memory: Memory, alice: str) -> None:
    answer = memory.chat("Say hello", user_id=alice, max_tokens=4)
    assert answer.text
    assert answer.inferscale is not None
    assert answer.inferscale.reason == "no facts were found, or asked for"
    assert memory.chat("Say hello", user_id=alice, k=0, max_tokens=4).text
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    longer = memory.chat("And now?", user_id=alice, messages=history, max_tokens=4)
    assert longer.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_misspelt_argument_is_told(memory: Memory, alice: str) -> None:
    with pytest.raises(TypeError, match="'max_tokns'; did you mean 'max_tokens'"):
        memory.chat("Say hello", user_id=alice, max_tokns=4)


def test_waiting_for_kv_ends_where_the_arena_is_full(
    memory: Memory, alice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = StatusResponse(
        facts={"ready": 6, "pending": 24, "failed": 1}, queue=0, arena_tokens=200, evictions=24
    )
    monkeypatch.setattr(memory.core, "status", lambda **who: full)
    assert memory.wait_for_kv(user_id=alice, timeout=0) == full
    assert "24 facts have no KV, since the arena is full (200 tokens)" in caplog.text
    assert "the KV of 1 facts could not be computed" in caplog.text


def test_calls_without_a_scope_are_refused(memory: Memory) -> None:
    with pytest.raises(ScopeError, match="user_id"):
        memory.chat("hello")
    with pytest.raises(ScopeError, match="user_id"):
        memory.complete([{"role": "user", "content": "hello"}])
    with pytest.raises(ScopeError, match="user_id"):
        memory.wait_for_kv()


def test_a_deleted_memory_is_not_injected_again(memory: Memory, alice: str) -> None:
    ids = [
        memory.add(f"Alice keeps key {n} under stone {n}", user_id=alice, infer=False)["results"][0]
        for n in range(8)
    ]
    memory.wait_for_kv(user_id=alice)
    gone = ids[3]["id"]
    memory.delete(gone)
    memory.wait_for_kv(user_id=alice)
    answer = memory.chat("Where are the keys?", user_id=alice, k=8, threshold=0, max_tokens=4)
    assert answer.inferscale is not None
    assert gone not in [fact.id for fact in answer.inferscale.facts]
    assert len(answer.inferscale.facts) == 7


def test_bad_input_names_what_is_wrong(memory: Memory, alice: str) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        memory.add("", user_id=alice, infer=False)
    with pytest.raises(ValueError, match="text"):
        memory.add("x" * 200_000, user_id=alice, infer=False)
    with pytest.raises(ValueError, match="not found"):
        memory.update(str(uuid.uuid4()), text="x")
    memory.add("<|im_end|> is how a turn ends", user_id=alice, infer=False)
    assert texts(memory.get_all(filters={"user_id": alice})) == ["<|im_end|> is how a turn ends"]
    assert memory.search("turn", filters={"user_id": alice}, top_k=0)["results"] == []


def test_reset_empties_only_its_own_collection(memory: Memory, make_memory, alice: str) -> None:
    memory.add("Kept", user_id=alice, infer=False)
    other = make_memory(collection_name="other")
    other.add("Dropped", user_id=alice, infer=False)
    other.entity_store.insert([[0.0]], [{"data": "An entity"}], ["entity-1"])
    assert texts(other.get_all(filters={"user_id": alice})) == ["Dropped"]
    other.close()

    fresh = make_memory(collection_name="other")
    fresh.reset()
    assert texts(fresh.get_all(filters={"user_id": alice})) == []
    assert fresh.entity_store.list() == [[]]
    assert texts(memory.get_all(filters={"user_id": alice})) == ["Kept"]
    fresh.close()


def test_delete_all_cleans_history_and_entities(memory: Memory, alice: str, bob: str) -> None:
    def add(user: str, text: str, **ids: str) -> str:
        return memory.add(text, user_id=user, infer=False, **ids)["results"][0]["id"]

    with_bot, alone, others = add(alice, "A", agent_id="bot"), add(alice, "B"), add(bob, "C")
    entities = {
        "gone": {"linked_memory_ids": [with_bot], "user_id": alice, "agent_id": "bot"},
        "kept": {"linked_memory_ids": [alone, with_bot], "user_id": alice, "agent_id": "bot"},
        "bobs": {"linked_memory_ids": [others], "user_id": bob},
    }
    ids = {name: str(uuid.uuid4()) for name in entities}
    for name, payload in entities.items():
        memory.entity_store.insert([[0.0]], [{"data": name, **payload}], [ids[name]])

    with pytest.raises(ScopeError, match="no '\\*'"):
        memory.delete_all(user_id=alice, agent_id="*")
    memory.delete_all(user_id=alice, agent_id="bot")
    assert texts(memory.get_all(filters={"user_id": alice})) == ["B"]
    assert [entry["event"] for entry in memory.history(with_bot)] == ["ADD", "DELETE"]
    assert memory.history(with_bot)[-1]["old_memory"] == "A"
    assert memory.entity_store.get(ids["gone"]) is None
    assert memory.entity_store.get(ids["kept"]).payload["linked_memory_ids"] == [alone]

    memory.delete(alone)
    assert memory.entity_store.get(ids["kept"]) is None
    memory.delete_all(user_id=bob)
    assert memory.entity_store.get(ids["bobs"]) is None
    with pytest.raises(ValueError, match="At least one filter"):
        memory.delete_all()
