"""Chat completions with memories, on a real server."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import MAX_MODEL_LEN, MODEL, Core

FACTS = [
    "Caroline likes green tea in the morning and black tea in the evening.",
    "Dave plays chess on Sundays with his brother Tom in the old library.",
    "The cat of Caroline is called Mochi and sleeps on the piano.",
    "Dave works as a nurse in Leeds and drives there every day.",
    "Caroline will fly to Lisbon in October to see her sister.",
    "Dave broke his left arm when he fell from his bicycle in March.",
]
HEAD = "You are a helpful AI. Answer the question based on query and memories.\nUser Memories:\n"
QUESTION = "What does Caroline drink?"


@pytest.fixture
def facts(core: Core, scope: dict[str, str]) -> list[dict[str, Any]]:
    return core.add(scope, FACTS)


def ids_of(memories: list[dict[str, Any]]) -> list[str]:
    return [memory["id"] for memory in memories]


def stream(core: Core, body: dict[str, Any]) -> list[dict[str, Any]]:
    chunks = []
    body = {"model": MODEL, "stream": True, **body}
    with core.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line[6:]))
    return chunks


def test_search_and_inject(core: Core, scope: dict[str, str], facts: list[dict[str, Any]]) -> None:
    answer = core.chat(QUESTION, {"scope": scope, "k": 3}, return_token_ids=True)
    report = answer["inferscale"]
    assert [f["injected"] for f in report["facts"]] == [True] * 3
    assert report["facts"][-1]["text"] == FACTS[0]
    assert report["reason"] is None
    assert report["injected_tokens"] >= report["memory_tokens"] > 0
    assert report["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    counted = report["injected_tokens"] + report["cached_tokens"] + report["prefilled_tokens"]
    assert counted == report["prompt_tokens"]
    assert answer["kv_transfer_params"] is None
    text = core.chat(QUESTION, {"scope": scope, "k": 3, "mode": "text"}, return_token_ids=True)
    assert text["prompt_token_ids"] == answer["prompt_token_ids"]
    assert text["inferscale"]["injected_tokens"] == 0
    assert text["inferscale"]["memory_tokens"] == report["memory_tokens"]
    assert {f["reason"] for f in text["inferscale"]["facts"]} == {"mode is text"}


def test_fact_ids_stand_in_the_order_given(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    wanted = [facts[i]["id"] for i in (4, 1, 3)]
    answer = core.chat(QUESTION, {"scope": scope, "fact_ids": wanted}, return_prompt_text=True)
    assert [f["id"] for f in answer["inferscale"]["facts"]] == wanted
    assert answer["inferscale"]["injected_tokens"] > 0
    doubled = core.chat(QUESTION, {"scope": scope, "fact_ids": wanted * 2})
    assert [f["id"] for f in doubled["inferscale"]["facts"]] == wanted


def test_streaming(core: Core, scope: dict[str, str], facts: list[dict[str, Any]]) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 5,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        "inferscale": {"scope": scope, "k": 2},
    }
    chunks = stream(core, body)
    with_report = [c for c in chunks if "inferscale" in c]
    assert len(with_report) == 1
    assert with_report[0]["choices"][0]["finish_reason"] == "length"
    assert [f["injected"] for f in with_report[0]["inferscale"]["facts"]] == [True, True]
    assert all(not c.get("kv_transfer_params") for c in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    whole = core.chat(QUESTION, {"scope": scope, "k": 2}, max_tokens=5)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]


def test_without_the_field_nothing_changes(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    answer = core.chat(QUESTION, return_token_ids=True)
    assert "inferscale" not in answer
    assert answer["kv_transfer_params"] is None
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}
    assert all("inferscale" not in chunk for chunk in stream(core, body))
    assert core.chat(QUESTION, status=404, model="other")["error"]["type"] == "NotFoundError"
    assert core.chat(QUESTION, status=400, max_tokens=10**6)["error"]["message"]
    # The same tokens, injected and then plain: the plain answer is the one computed from text.
    memory = {"scope": scope, "k": 3}
    injected = core.chat(QUESTION, memory, return_token_ids=True, max_tokens=1, logprobs=True)
    plain = core.chat(QUESTION, {**memory, "mode": "text"}, max_tokens=1, logprobs=True)
    assert injected["inferscale"]["injected_tokens"] > 0
    assert plain["inferscale"]["cached_tokens"] == 0


def test_other_ways_to_the_same_errors(core: Core, scope: dict[str, str]) -> None:
    memory = {"scope": scope, "k": 2}
    assert core.chat(QUESTION, memory, 404, model="other")["error"]["type"] == "NotFoundError"
    assert core.chat(QUESTION, memory, 400, temperature=-1)["error"]["message"]
    assert core.chat(QUESTION, memory, 400, tool_choice="auto", tools=[TOOL])["error"]["message"]


TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}


def test_bad_fields(core: Core, scope: dict[str, str]) -> None:
    error = core.chat(QUESTION, {"k": 3}, 400)["error"]
    assert error["type"] == "ScopeError"
    assert core.chat(QUESTION, {"scope": {"tenant": "x"}}, 400)["error"]["type"] == "ScopeError"
    for field, value in (("k", -1), ("k", "x"), ("mode", "y"), ("tail", -1), ("surprise", 1)):
        error = core.chat(QUESTION, {"scope": scope, field: value}, 400)["error"]
        assert error["param"] == f"inferscale.{field}"
    assert core.chat(QUESTION, "yes", 400)["error"]["type"] == "BadRequestError"
    bad = {"scope": scope, "k": 3, "filters": {"a": {"near": 1}}}
    assert "near" in core.chat(QUESTION, bad, 400)["error"]["message"]
    params = {"inferscale": {"op": "stats"}}
    for memory in (None, {"scope": scope}):
        error = core.chat(QUESTION, memory, 400, kv_transfer_params=params)["error"]
        assert error["param"] == "kv_transfer_params"


def test_prompts_that_cannot_hold_memories(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    memory = {"scope": scope, "k": 2}
    assert core.chat(QUESTION, memory, 400, echo=True)["error"]["param"] == "echo"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, picture]}]
    error = core.chat("", memory, 400, messages=messages)["error"]
    assert "image_url" in error["message"]
    assert core.chat("", memory, 400, messages=[{"role": "system", "content": "x"}])["error"]
    refused = core.chat(QUESTION, memory, 400, chat_template="{{ messages }}")["error"]
    assert "trust-request-chat-template" in refused["message"]


def test_unknown_facts(core: Core, scope: dict[str, str], facts: list[dict[str, Any]]) -> None:
    named = {"scope": scope, "fact_ids": [facts[0]["id"], "nowhere"]}
    error = core.chat(QUESTION, named, 404)["error"]
    assert "nowhere" in error["message"]
    assert facts[0]["id"] not in error["message"]
    other = {"scope": {**scope, "user": "bob"}, "fact_ids": [facts[0]["id"]]}
    assert facts[0]["id"] in core.chat(QUESTION, other, 404)["error"]["message"]


def test_k(core: Core, scope: dict[str, str], facts: list[dict[str, Any]]) -> None:
    own = core.chat(QUESTION, return_token_ids=True)["prompt_token_ids"]
    for memory in ({"k": 0}, {"fact_ids": []}, {}):
        answer = core.chat(QUESTION, {"scope": scope, **memory}, return_token_ids=True)
        assert answer["prompt_token_ids"] == own
        assert answer["inferscale"]["facts"] == []
    many = core.chat(QUESTION, {"scope": scope, "k": 99})["inferscale"]
    assert len(many["facts"]) == len(FACTS)
    empty = core.chat(QUESTION, {"scope": {**scope, "user": "bob"}, "k": 5}, return_token_ids=True)
    assert empty["prompt_token_ids"] == own
    query = core.chat(QUESTION, {"scope": scope, "query": "Dave's broken arm", "k": 1})
    assert query["inferscale"]["facts"][0]["text"] == FACTS[5]


def test_facts_that_do_not_fit(core: Core, scope: dict[str, str]) -> None:
    texts = [f"Fact number {i}: " + "word " * 300 for i in range(8)]
    added = core.add(scope, [{"text": text, "encode": False} for text in texts])
    memory = {"scope": scope, "fact_ids": ids_of(added)}
    answer = core.chat(QUESTION, memory, max_tokens=20)
    report = answer["inferscale"]
    assert report["prompt_tokens"] + 20 <= MAX_MODEL_LEN
    left = [f["id"] for f in report["facts"] if f["reason"] == "does not fit"]
    assert left == ids_of(added)[: len(left)]
    assert 0 < len(left) < 8
    assert report["memory_tokens"] > MAX_MODEL_LEN - 400
    # Prompt text is cached by vLLM as ever.
    text = {**memory, "mode": "text"}
    core.chat(QUESTION, text, max_tokens=20)
    assert core.chat(QUESTION, text, max_tokens=20)["inferscale"]["cached_tokens"] > 1000


def test_facts_without_kv_stand_last(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    (never,) = core.add(scope, [{"text": "Dave sings in a choir.", "encode": False}])
    wanted = [never["id"], *ids_of(facts[:2])]
    report = core.chat(QUESTION, {"scope": scope, "fact_ids": wanted})["inferscale"]
    assert [f["id"] for f in report["facts"]] == [*wanted[1:], never["id"]]
    assert [f["injected"] for f in report["facts"]] == [True, True, False]
    assert report["facts"][2]["reason"] == "it is stored without KV"


def test_tail(core: Core, scope: dict[str, str], facts: list[dict[str, Any]]) -> None:
    memory = {"scope": scope, "fact_ids": ids_of(facts), "tail": 2}
    report = core.chat(QUESTION, memory)["inferscale"]
    assert [f["injected"] for f in report["facts"]] == [True] * 4 + [False] * 2
    assert "tail" in report["facts"][-1]["reason"]
    core.until(lambda: core.get("/v1/memories/status", **scope)["facts"] == {"ready": 6}, 20)


def test_lines_that_the_app_pasted_itself(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    lines = "".join(f"- {text}\n" for text in FACTS[:4])
    messages = [
        {"role": "system", "content": HEAD + lines.rstrip("\n")},
        {"role": "user", "content": QUESTION},
    ]
    answer = core.chat("", {"scope": scope}, messages=messages)
    assert answer["inferscale"]["injected_tokens"] > 40
    other = core.chat("", {"scope": {**scope, "user": "bob"}}, messages=messages)
    assert other["inferscale"]["injected_tokens"] == 0


def test_the_apps_own_system_message(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    messages = [
        {"role": "system", "content": f"You answer in one word. {scope['tenant']}"},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "Tea."},
        {"role": "user", "content": "Which?"},
    ]
    memory = {"scope": scope, "k": 3, "query": QUESTION}
    core.chat("", memory, messages=messages)
    report = core.chat("", memory, messages=messages)["inferscale"]
    # The header was seen once, so it is known now, and the facts behind it are injected.
    assert [f["injected"] for f in report["facts"]] == [True] * 3


def test_options_of_vllm_keep_working(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    memory = {"scope": scope, "k": 2}
    several = core.chat(QUESTION, memory, n=2, temperature=1, logprobs=True, top_logprobs=2)
    assert len(several["choices"]) == 2
    assert several["choices"][1]["logprobs"]["content"][0]["top_logprobs"]
    assert several["inferscale"]["injected_tokens"] > 0
    schema = {
        "type": "object",
        "properties": {"drink": {"type": "string", "maxLength": 8}},
        "required": ["drink"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "drink", "schema": schema}}
    guided = core.chat(QUESTION, memory, response_format=form, max_tokens=40)
    assert set(json.loads(guided["choices"][0]["message"]["content"])) == {"drink"}
    beams = core.chat(QUESTION, memory, use_beam_search=True, n=2, max_tokens=2)
    assert beams["inferscale"]["injected_tokens"] == 0
    assert beams["inferscale"]["reason"]


def test_deleted_facts_are_not_injected(
    core: Core, scope: dict[str, str], facts: list[dict[str, Any]]
) -> None:
    lines = "".join(f"- {text}\n" for text in FACTS)
    messages = [{"role": "system", "content": HEAD + lines}, {"role": "user", "content": "?"}]
    before = core.chat("", {"scope": scope}, messages=messages)["inferscale"]
    assert before["injected_tokens"] > 60
    core.call("DELETE", f"/v1/memories/{facts[0]['id']}", 200, params=scope)
    after = core.chat("", {"scope": scope}, messages=messages)["inferscale"]
    assert after["injected_tokens"] + after["cached_tokens"] < 40
    core.call("DELETE", "/v1/memories", 200, params=scope)
    gone = core.chat("", {"scope": scope}, messages=messages)["inferscale"]
    assert gone["injected_tokens"] == 0
    assert gone["cached_tokens"] == 0


def test_many_at_once_while_facts_are_added(core: Core, scope: dict[str, str]) -> None:
    facts = core.add(scope, FACTS)
    core.add(scope, [f"Dave read book number {i} in May." for i in range(20)], wait=0)
    memory = {"scope": scope, "fact_ids": ids_of(facts)}

    def ask(i: int) -> Any:
        return core.chat(QUESTION, memory if i % 2 else None, seed=i)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(12)))
    reports = [a["inferscale"] for a in answers if "inferscale" in a]
    assert len(reports) == 6
    # Those that come later find most of what the first ones injected in the prefix cache.
    assert all(r["injected_tokens"] + r["cached_tokens"] > 60 for r in reports)
    assert reports[0]["injected_tokens"] > 60
    core.until(lambda: core.get("/v1/memories/status", **scope)["facts"] == {"ready": 26}, 120)


def test_a_client_that_leaves(core: Core, scope: dict[str, str], facts: list[Any]) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 1000,
        "ignore_eos": True,
        "inferscale": {"scope": scope, "k": 3},
    }
    with core.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as r:
        next(r.iter_lines())
    gone = threading.Event()

    def leave() -> None:
        transport = httpx.HTTPTransport(uds=core.socket)
        with (
            httpx.Client(transport=transport, base_url="http://core", timeout=1) as http,
            pytest.raises(httpx.TimeoutException),
        ):
            http.post("/v1/chat/completions", json=body)
        gone.set()

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(30)
    assert gone.is_set()

    def running() -> float:
        text = core.http.get("/metrics").text
        lines = [x for x in text.splitlines() if x.startswith("vllm:num_requests_running")]
        return float(lines[0].rsplit(" ", 1)[1])

    core.until(lambda: running() == 0, 30)
    # The encode queue runs again, so nobody counts the two as questions any more.
    (added,) = core.add(scope, ["Dave bought a boat."], wait=30)
    assert added["kv_state"] == "ready"
