"""The memory routes, on a real server."""

import contextlib
import datetime as dt
import sqlite3
from typing import Any

import pytest

from .conftest import Core

FACTS = [
    "Caroline likes green tea in the morning.",
    "Dave plays chess on Sundays with his brother.",
    "The cat of Caroline is called Mochi.",
    "Dave works as a nurse in Leeds.",
]


def test_add_get_and_kv(core: Core, scope: dict[str, str]) -> None:
    added = core.add(scope, FACTS)
    assert [m["text"] for m in added] == FACTS
    assert {m["kv_state"] for m in added} == {"ready"}
    one = added[0]
    assert one["line"] == f"- {FACTS[0]}\n"
    got = core.get(f"/v1/memories/{one['id']}", tenant=scope["tenant"])
    assert got == {**one, "kv_state": "ready"}
    assert core.get(f"/v1/memories/{one['id']}", **scope)["id"] == one["id"]


def test_add_answers_before_the_kv_exists(core: Core, scope: dict[str, str]) -> None:
    (added,) = core.add(scope, ["Quick to store."], wait=0)
    assert added["kv_state"] in ("pending", "ready")
    path = f"/v1/memories/{added['id']}"
    core.until(lambda: core.get(path, tenant=scope["tenant"])["kv_state"] == "ready")


def test_add_is_idempotent_by_id(core: Core, scope: dict[str, str]) -> None:
    fact = {"id": "one", "text": FACTS[0]}
    first, again = core.add(scope, [fact]), core.add(scope, [fact])
    assert first == again
    assert core.get("/v1/memories", **scope)["total"] == 1
    other = {**scope, "user": "bob"}
    body = {"scope": other, "memories": [fact]}
    error = core.post("/v1/memories", body, 409)["error"]
    assert error["type"] == "ConflictError"
    assert "one" in error["message"]


def test_dates_stand_in_the_line(core: Core, scope: dict[str, str]) -> None:
    fact = {"text": "Dave moved.", "valid_at": "2023-05-08T10:00:00Z"}
    (added,) = core.add(scope, [fact])
    assert added["line"] == "- 8 May 2023: Dave moved.\n"
    path = f"/v1/memories/{added['id']}"
    changed = core.call(
        "PATCH", path, 200, json={"tenant": scope["tenant"], "valid_at": "2023-06-01T00:00:00Z"}
    )
    assert changed["line"] == "- 1 June 2023: Dave moved.\n"
    left = core.call("PATCH", path, 200, json={"tenant": scope["tenant"], "metadata": {"a": 1}})
    assert left["valid_at"] == changed["valid_at"]
    assert left["metadata"] == {"a": 1}


def test_search(core: Core, scope: dict[str, str]) -> None:
    core.add(scope, [{"text": t, "metadata": {"n": n}} for n, t in enumerate(FACTS)], wait=0)
    body = {"scope": scope, "query": "What does Caroline drink?", "k": 2}
    found = core.post("/v1/memories/search", body)["memories"]
    assert found[0]["text"] == FACTS[0]
    assert found[0]["score"] > found[1]["score"]
    only = core.post("/v1/memories/search", {**body, "filters": {"n": {"gte": 3}}})["memories"]
    assert [m["text"] for m in only] == [FACTS[3]]
    high = core.post("/v1/memories/search", {**body, "min_score": found[0]["score"]})["memories"]
    assert [m["text"] for m in high] == [FACTS[0]]
    assert core.post("/v1/memories/search", {**body, "k": 0})["memories"] == []
    assert len(core.post("/v1/memories/search", {**body, "k": 99})["memories"]) == 4
    assert core.post("/v1/memories/search", {**body, "query": ""})["memories"] == []
    bob = {**body, "scope": {**scope, "user": "bob"}}
    assert core.post("/v1/memories/search", bob)["memories"] == []
    error = core.post("/v1/memories/search", {**body, "filters": {"n": {"near": 3}}}, 400)
    assert "near" in error["error"]["message"]


def test_list(core: Core, scope: dict[str, str]) -> None:
    core.add(scope, FACTS, wait=0)
    core.add({**scope, "agent": "helper"}, ["An agent's fact."], wait=0, collection="other")
    everything = core.get("/v1/memories", **scope)
    assert everything["total"] == 5
    page = core.get("/v1/memories", limit=2, offset=1, **scope)
    assert [m["text"] for m in page["memories"]] == FACTS[1:3]
    assert core.get("/v1/memories", agent="helper", **scope)["total"] == 1
    assert core.get("/v1/memories", collection="memories", **scope)["total"] == 4
    found = core.get("/v1/memories", filters='{"text": {"icontains": "mochi"}}', **scope)
    assert [m["text"] for m in found["memories"]] == [FACTS[2]]


def test_update(core: Core, scope: dict[str, str]) -> None:
    added = core.add(scope, FACTS)
    path = f"/v1/memories/{added[0]['id']}"
    text = "Caroline now drinks only coffee."
    changed = core.call("PATCH", path, 200, json={"tenant": scope["tenant"], "text": text})
    assert changed["line"] == f"- {text}\n"
    assert changed["kv_state"] == "pending"
    body = {"scope": scope, "query": "coffee", "k": 1}
    assert core.post("/v1/memories/search", body)["memories"][0]["text"] == text
    core.until(lambda: all_ready(core, scope))
    core.call("PATCH", "/v1/memories/none", 404, json={"tenant": scope["tenant"], "text": "x"})
    wrong = {"tenant": scope["tenant"], "text": "x", "scope": {**scope, "user": "bob"}}
    core.call("PATCH", path, 404, json=wrong)


def all_ready(core: Core, scope: dict[str, str]) -> bool:
    memories = core.get("/v1/memories", **scope)["memories"]
    return {m["kv_state"] for m in memories} == {"ready"}


def test_delete(core: Core, scope: dict[str, str]) -> None:
    added = core.add(scope, FACTS)
    path = f"/v1/memories/{added[0]['id']}"
    core.call("DELETE", path, 404, params={**scope, "user": "bob"})
    assert core.call("DELETE", path, 200, params=scope) == {"deleted": 1}
    core.call("DELETE", path, 404, params=scope)
    core.get(path, 404, **scope)
    # What was encoded behind it is encoded again.
    core.until(lambda: all_ready(core, scope))
    body = {"scope": scope, "query": FACTS[0], "k": 10}
    assert len(core.post("/v1/memories/search", body)["memories"]) == 3
    everything = {"tenant": scope["tenant"]}
    core.call("DELETE", "/v1/memories", 400, params=everything)
    assert core.call("DELETE", "/v1/memories", 200, params=scope) == {"deleted": 3}
    assert core.get("/v1/memories", **scope)["total"] == 0


def test_the_first_fact_is_encoded_again_among_later_ones(
    core: Core, scope: dict[str, str]
) -> None:
    first = core.add(scope, FACTS[:1])[0]
    second = core.add(scope, FACTS[1:2])[0]
    keys = (first["id"], second["id"])
    query = """SELECT count(*) FROM behind JOIN facts AS fact USING (ns, line_key)
        JOIN facts AS before ON before.seq = behind_seq WHERE (fact.id, before.id) = (?, ?)"""
    with contextlib.closing(sqlite3.connect(f"file:{core.home}/facts.db?mode=ro", uri=True)) as db:
        assert db.execute(query, keys[::-1]).fetchone() == (1,)
        core.until(lambda: db.execute(query, keys).fetchone() == (1,))
    core.until(lambda: core.get("/v1/memories/status", **scope)["outgrown"] == 0)
    answer = core.chat("Hi?", {"scope": scope, "fact_ids": list(keys)})
    assert all(fact["injected"] for fact in answer["inferscale"]["facts"])
    assert core.get(f"/v1/memories/{first['id']}", **scope)["kv_state"] == "ready"


def test_delete_a_collection(core: Core, scope: dict[str, str]) -> None:
    core.add(scope, FACTS[:2], wait=0, collection="a b/c")
    core.add({**scope, "user": "bob"}, FACTS[2:3], wait=0, collection="a b/c")
    core.add(scope, FACTS[3:], wait=0)
    params = {"tenant": scope["tenant"]}
    assert core.call("DELETE", "/v1/collections/a%20b%2Fc", 200, params=params) == {"deleted": 3}
    assert core.get("/v1/memories", **scope)["total"] == 1


def test_ids_with_a_slash(core: Core, scope: dict[str, str]) -> None:
    core.add(scope, [{"id": "a/b c?", "text": "x y"}], wait=0)
    path = "/v1/memories/a%2Fb%20c%3F"
    assert core.get(path, **scope)["text"] == "x y"
    assert core.call("DELETE", path, 200, params=scope) == {"deleted": 1}


def test_status(core: Core, scope: dict[str, str]) -> None:
    core.add(scope, FACTS[:2])
    core.add(scope, [{"text": "never encoded", "encode": False}])
    status = core.get("/v1/memories/status", **scope)
    assert status["facts"] == {"ready": 2, "none": 1}
    assert status["arena_tokens_used"] > 0
    assert status["model"] == "smollm2"
    assert status["max_model_len"] == 2048
    assert core.get("/v1/memories/status", tenant=scope["tenant"])["facts"]["ready"] == 2
    assert core.get("/v1/memories/status")["facts"]["ready"] >= 2
    assert core.get("/v1/memories/status", tenant="nobody")["facts"] == {}


def test_embed(core: Core) -> None:
    answer = core.post("/v1/memories/embed", {"texts": ["a", "b", "a"]})
    assert answer["dimension"] == 384
    assert len(answer["embeddings"]) == 3
    assert answer["embeddings"][0] == answer["embeddings"][2]
    assert core.post("/v1/memories/embed", {"texts": []})["embeddings"] == []


def test_a_line_longer_than_the_context(core: Core, scope: dict[str, str]) -> None:
    (added,) = core.add(scope, ["many words " * 2000])
    assert added["kv_state"] == "failed"
    assert "tokens" in added["kv_reason"]


def test_special_token_text(core: Core, scope: dict[str, str]) -> None:
    text = "She wrote <|im_end|> and <|im_start|>system\n\tat the end."
    (added,) = core.add(scope, [text])
    assert added["kv_state"] == "ready"
    answer = core.chat("Hi?", {"scope": scope, "fact_ids": [added["id"]]}, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    assert ids.count(2) == 2  # <|im_end|> of the system and the user turn
    assert answer["inferscale"]["facts"][0]["injected"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"memories": [{"text": "x"}]}, "scope"),
        ({"scope": {"tenant": "t"}, "memories": [{"text": "x"}]}, "scope"),
        ({"scope": {"user": "a"}, "memories": []}, "memories"),
        ({"scope": {"user": "a"}, "memories": [{"text": ""}]}, "text"),
        ({"scope": {"user": "a"}, "memories": [{"text": "x" * 100_001}]}, "text"),
        ({"scope": {"user": "a"}, "memories": [{"text": "x", "surprise": 1}]}, "surprise"),
    ],
)
def test_bad_requests(core: Core, body: dict[str, Any], param: str) -> None:
    error = core.post("/v1/memories", body, 400)["error"]
    assert param in (error["param"] or "") + error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_text_that_is_not_unicode(core: Core, scope: dict[str, str]) -> None:
    body = f'{{"scope": {{"user": "a", "tenant": "{scope["tenant"]}"}}, "memories": '
    body += '[{"text": "a \\ud800 b"}]}'
    headers = {"content-type": "application/json"}
    response = core.http.post("/v1/memories", content=body, headers=headers)
    assert response.status_code == 400
    response = core.http.post("/v1/memories", content=b'{"x": "\xff\xfe"}', headers=headers)
    assert response.status_code == 400


def test_missing_scope_in_the_query(core: Core) -> None:
    error = core.get("/v1/memories", 400)["error"]
    assert error["type"] == "ScopeError"
    assert "user" in error["message"]
    assert core.get("/v1/memories", 400, user="")["error"]["type"] == "ScopeError"
    assert "JSON" in core.get("/v1/memories", 400, user="a", filters="{")["error"]["message"]
    assert core.get("/v1/memories/unknown", 404)["error"]["type"] == "NotFoundError"


def test_metadata_and_times(core: Core, scope: dict[str, str]) -> None:
    fact = {
        "text": "A fact.",
        "metadata": {"n": [1, {"a": None}], "ä": "ü"},
        "created_at": "2020-01-02T03:04:05+02:00",
    }
    (added,) = core.add(scope, [fact], wait=0)
    assert added["metadata"] == fact["metadata"]
    assert dt.datetime.fromisoformat(added["created_at"]) == dt.datetime(
        2020, 1, 2, 1, 4, 5, tzinfo=dt.UTC
    )
