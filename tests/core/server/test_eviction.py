"""Facts whose KV does not fit in the arena all at once."""

from .conftest import ARENA_TOKENS, Core


def test_evicted_facts_come_back_when_they_are_retrieved(core: Core, scope: dict[str, str]) -> None:
    texts = [f"Story {i}: " + "the old house by the river " * 30 for i in range(14)]
    added = core.add(scope, texts, wait=300)
    counts = core.get("/v1/memories/status", **scope)
    assert counts["facts"]["pending"] > 0
    assert counts["evictions"] > 0
    assert counts["arena_tokens_used"] <= counts["arena_tokens"] == ARENA_TOKENS
    assert counts["queue"] == 0
    memories = core.get("/v1/memories", **scope)["memories"]
    evicted = next(m for m in memories if m["kv_state"] == "pending")
    assert evicted["kv_reason"] == "evicted"
    question = {"scope": scope, "fact_ids": [evicted["id"]]}
    (fact,) = core.chat("What?", question)["inferscale"]["facts"]
    assert not fact["injected"]
    assert "evicted" in fact["reason"]
    path = f"/v1/memories/{evicted['id']}"
    core.until(lambda: core.get(path, **scope)["kv_state"] == "ready")
    (fact,) = core.chat("What?", question)["inferscale"]["facts"]
    assert fact["injected"]
    assert len(added) == len(memories)


def test_a_fact_that_is_longer_than_the_arena(core: Core, scope: dict[str, str]) -> None:
    (small,) = core.add(scope, ["Dave sings."])
    (added,) = core.add(scope, ["word " * (ARENA_TOKENS + 100)])
    assert added["kv_state"] == "failed"
    assert "arena_bytes" in added["kv_reason"]
    both = {"scope": scope, "fact_ids": [added["id"], small["id"]]}
    first, last = core.chat("What?", both)["inferscale"]["facts"]
    assert (first["id"], first["injected"]) == (small["id"], True)
    assert (last["id"], last["injected"]) == (added["id"], False)
    assert "arena_bytes" in last["reason"]
