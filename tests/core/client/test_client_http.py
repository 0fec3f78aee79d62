"""Both clients over real HTTP, against a server that answers what each test scripts."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from client_apps import eventually
from fastapi.responses import JSONResponse, Response, StreamingResponse
from scripted_server import MEMORY, ScriptedServer, error

from inferscale_core.client import (
    AsyncClient,
    BadRequest,
    Client,
    Conflict,
    ConnectionFailed,
    InferScaleError,
    MemoryIn,
    NotFound,
    RateLimited,
    Scope,
    ScopeError,
    ServerError,
    Timeout,
)

CHUNKS = [
    {"choices": [{"delta": {"content": "He"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "y"}, "finish_reason": "stop"}], "inferscale": {}},
]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Any]:
    """A ``Client``, or an ``AsyncClient`` whose methods run to their end."""
    if request.param == "sync":
        with Client(server.url, timeout=5) as plain:
            yield plain
        return

    loop = asyncio.new_event_loop()
    target = AsyncClient(server.url, timeout=5)

    class Blocking:
        def __getattr__(self, name: str) -> Any:
            method = getattr(target, name)
            return lambda *args, **options: loop.run_until_complete(method(*args, **options))

    yield Blocking()
    loop.run_until_complete(target.close())
    loop.close()


def test_add_sends_ids_and_only_what_was_given(client: Any, server: ScriptedServer) -> None:
    server.answers = [{"memories": [MEMORY]}]
    memories = ["one", MemoryIn(text="two", id="2"), {"text": "three", "metadata": {"a": None}}]
    answer = client.add(memories, user="alice", wait=True)
    assert answer.memories[0].text == "Alice has a cat."
    body = server.requests[0]["body"]
    assert body["scope"] == {"user": "alice"}
    assert body["wait"] == 300
    assert [m["text"] for m in body["memories"]] == ["one", "two", "three"]
    assert body["memories"][1] == {"text": "two", "id": "2"}
    assert body["memories"][2]["metadata"] == {"a": None}
    assert len({m["id"] for m in body["memories"]}) == 3


def test_every_memory_call(client: Any, server: ScriptedServer) -> None:
    many = {"memories": [MEMORY], "total": 1}
    status = {"facts": {"ready": 1}, "queue": 0}
    vectors = {"model": "m", "dimension": 2, "embeddings": [[0.0, 1.0]]}
    server.answers = [
        MEMORY, many, many, MEMORY, *({"deleted": n} for n in (1, 2, 3)), status, vectors,
    ]  # fmt: skip
    scope = Scope(user="alice", agent="helper")
    assert client.get("a/b c", user="alice").id == "m1"
    assert client.list(scope=scope, limit=5, filters={"kind": "pet"}).total == 1
    assert client.search("cat", k=3, scope={"user": "alice"}).memories[0].kv_state == "ready"
    assert client.update("m1", text="Alice has a dog.", user="alice").id == "m1"
    assert client.delete("m1", tenant="acme") == 1
    assert client.delete_all(user="alice", collection="pets") == 2
    assert client.delete_collection("pets", tenant="acme") == 3
    assert client.status().facts == {"ready": 1}
    assert client.embed("cat").embeddings == [[0.0, 1.0]]
    sent = [(r["method"], r["path"], r["query"], r["body"]) for r in server.requests]
    assert server.requests[0]["raw_path"] == "/v1/memories/a%2Fb%20c"
    assert sent[1:] == [
        (
            "GET",
            "/v1/memories",
            {
                "tenant": "default",
                "user": "alice",
                "agent": "helper",
                "limit": "5",
                "offset": "0",
                "filters": '{"kind": "pet"}',
            },
            None,
        ),
        (
            "POST",
            "/v1/memories/search",
            {},
            {"scope": {"user": "alice"}, "query": "cat", "k": 3},
        ),
        (
            "PATCH",
            "/v1/memories/m1",
            {},
            {"tenant": "default", "scope": {"user": "alice"}, "text": "Alice has a dog."},
        ),
        ("DELETE", "/v1/memories/m1", {"tenant": "acme"}, None),
        (
            "DELETE",
            "/v1/memories",
            {"tenant": "default", "user": "alice", "collection": "pets"},
            None,
        ),
        ("DELETE", "/v1/collections/pets", {"tenant": "acme"}, None),
        ("GET", "/v1/memories/status", {}, None),
        ("POST", "/v1/memories/embed", {}, {"texts": ["cat"]}),
    ]


def test_chat_asks_for_the_model_once(client: Any, server: ScriptedServer) -> None:
    server.answers = [{"choices": [], "inferscale": {"injected_tokens": 7}}]
    for _ in range(2):
        answer = client.chat("Who?", user="alice", k=5, max_tokens=4, temperature=0)
        assert answer["inferscale"]["injected_tokens"] == 7
    assert [r["path"] for r in server.requests] == ["/v1/models"] + ["/v1/chat/completions"] * 2
    assert server.requests[1]["body"] == {
        "model": "the-model",
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 4,
        "temperature": 0,
        "inferscale": {"scope": {"user": "alice"}, "k": 5},
    }


def test_chat_without_a_scope_is_a_plain_chat(client: Any, server: ScriptedServer) -> None:
    client.chat([{"role": "user", "content": "Hi"}], model="m")
    assert "inferscale" not in server.requests[0]["body"]
    with pytest.raises(ScopeError, match="k given without a scope"):
        client.chat("Hi", model="m", k=5)


def events(*lines: str, cut: bool = False) -> Any:
    async def stream() -> Response:
        async def body() -> Any:
            for line in lines:
                yield line + "\n\n"
            if cut:
                raise RuntimeError("the server breaks here")

        return StreamingResponse(body(), media_type="text/event-stream")

    return stream


DATA = [f"data: {json.dumps(chunk)}" for chunk in CHUNKS]


def test_streamed_chat(server: ScriptedServer) -> None:
    server.answers = [events(": a comment", *DATA, "data: [DONE]")]
    with Client(server.url) as client:
        assert list(client.chat("Hi", model="m", stream=True)) == CHUNKS
        assert server.requests[0]["body"]["stream"] is True
        with client.chat("Hi", model="m", stream=True) as chunks:
            assert next(chunks) == CHUNKS[0]


async def test_streamed_chat_awaited(server: ScriptedServer) -> None:
    server.answers = [events(*DATA, "data: [DONE]")]
    async with AsyncClient(server.url) as client:
        stream = await client.chat("Hi", model="m", stream=True)
        assert [chunk async for chunk in stream] == CHUNKS


def test_stream_that_fails(server: ScriptedServer) -> None:
    failed = 'data: {"error": {"message": "the engine died", "code": 500}}'
    with Client(server.url) as client:
        server.answers = [error(404, "no such model")]
        with pytest.raises(NotFound, match="no such model"):
            client.chat("Hi", model="m", stream=True)
        server.answers = [events(DATA[0], failed)]
        with pytest.raises(ServerError, match="the engine died"):
            list(client.chat("Hi", model="m", stream=True))
        server.answers = [events(DATA[0], cut=True)]
        with pytest.raises(ConnectionFailed):
            list(client.chat("Hi", model="m", stream=True))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, None, BadRequest),
        (400, "scope_required", ScopeError),
        (401, None, BadRequest),
        (404, None, NotFound),
        (409, None, Conflict),
        (413, None, BadRequest),
        (422, None, BadRequest),
        (429, None, RateLimited),
        (500, None, ServerError),
        (503, None, ServerError),
        (504, None, Timeout),
    ],
)
def test_status_to_error(
    server: ScriptedServer, status: int, code: str | None, expected: type[InferScaleError]
) -> None:
    server.answers = [error(status, "why and what to do", code)]
    with Client(server.url, max_retries=0) as client, pytest.raises(expected) as caught:
        client.get("m1")
    assert type(caught.value) is expected
    assert str(caught.value) == "why and what to do"
    assert (caught.value.status, caught.value.code) == (status, code)


def test_answers_that_are_not_a_cores(client: Any, server: ScriptedServer) -> None:
    server.answers = [Response("<html>a proxy</html>")]
    with pytest.raises(ServerError, match="not InferScale's"):
        client.get("m1")
    server.answers = [{"unexpected": 1}]
    with pytest.raises(ServerError, match="not InferScale's"):
        client.delete("m1")
    server.answers = [Response("plain trouble", status_code=418)]
    with pytest.raises(BadRequest, match="plain trouble"):
        client.get("m1")
    server.answers = [JSONResponse({"detail": [{"msg": "field required"}]}, status_code=422)]
    with pytest.raises(BadRequest):
        client.get("m1")


def test_busy_core_is_asked_again(client: Any, server: ScriptedServer) -> None:
    server.answers = [
        error(503, "starting"),
        error(429, "slow down", **{"retry-after": "0.1"}),
        MEMORY,
    ]
    assert client.get("m1").id == "m1"
    assert len(server.requests) == 3


def test_retries_end(server: ScriptedServer) -> None:
    server.answers = [error(503, "overloaded")]
    with Client(server.url, max_retries=2) as client, pytest.raises(ServerError, match="overload"):
        client.get("m1")
    assert len(server.requests) == 3


def test_what_may_have_happened_is_not_repeated(client: Any, server: ScriptedServer) -> None:
    server.answers = [error(500, "broken")]
    with pytest.raises(ServerError, match="broken"):
        client.get("m1")
    server.answers = [error(503, "overloaded")]
    with pytest.raises(ServerError, match="overloaded"):
        client.chat("Hi", model="m")
    assert len(server.requests) == 2


def test_no_answer_in_time(server: ScriptedServer) -> None:
    async def late() -> dict[str, Any]:
        await asyncio.sleep(1.5)
        return {"memories": []}

    server.answers = [late]
    with Client(server.url, timeout=0.3) as client:
        with pytest.raises(Timeout, match=r"no answer from http://127.0.0.1:\d+ within 0 s"):
            client.list(user="alice")
        # The time that the core was asked to wait is added to the client's own.
        assert client.add("x", user="alice", wait=3).memories == []


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    start = time.monotonic()
    with Client(url, max_retries=1) as client, pytest.raises(ConnectionFailed, match=url):
        client.list(user="alice")
    with Client(url) as client:
        assert client.health() is False
    assert time.monotonic() - start < 3


def test_one_connection_for_many_calls(client: Any, server: ScriptedServer) -> None:
    server.answers = [MEMORY]
    for _ in range(5):
        client.get("m1")
    assert len(server.clients) == 1
    assert client.health() is True


def test_scopes_and_values_are_checked_before_anything_is_sent(
    client: Any, server: ScriptedServer
) -> None:
    with pytest.raises(ScopeError, match="needs a user, an agent or a run"):
        client.search("cat")
    with pytest.raises(ScopeError, match="pass one of the two forms"):
        client.list(user="alice", scope=Scope(user="bob"))
    with pytest.raises(ScopeError, match="usr: Extra inputs"):
        client.list(scope={"usr": "alice"})
    with pytest.raises(ScopeError):
        client.delete_all(tenant="acme")
    with pytest.raises(BadRequest, match="text"):
        client.add("", user="alice")
    with pytest.raises(BadRequest, match="memories"):
        client.add([], user="alice")
    with pytest.raises(BadRequest):
        client.add("bad \ud800 text", user="alice")
    for no_id in ("", ".", ".."):  # the path of "." would be that of all facts
        with pytest.raises(BadRequest, match="id of a fact is empty"):
            client.delete(no_id, user="alice")
        with pytest.raises(BadRequest, match="name of the collection"):
            client.delete_collection(no_id)
    for unusable in (".", "status", "two\nlines", "nul\0"):
        with pytest.raises(BadRequest, match="cannot be the id"):
            client.add({"text": "x", "id": unusable}, user="alice")
    with pytest.raises(BadRequest, match="written as JSON"):
        client.chat([{"role": "user", "content": object()}], model="m")
    assert server.requests == []


def test_address_and_key(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [MEMORY]
    with Client(f"{server.url}/v1/", api_key="secret") as client:
        client.get("m1")
    assert server.requests[0]["key"] == "Bearer secret"
    assert server.requests[0]["path"] == "/v1/memories/m1"
    monkeypatch.setenv("INFERSCALE_BASE_URL", server.url)
    with Client() as client:
        assert client.get("m1").id == "m1"
    for bad in ("localhost:8000", "ftp://x"):
        with pytest.raises(BadRequest, match=r"is not an http address"):
            Client(bad)


def test_client_used_in_a_forked_child(server: ScriptedServer) -> None:
    server.answers = [MEMORY]
    with Client(server.url) as client:
        client.get("m1")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if client.get("m1").id == "m1" else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.get("m1")
    assert len(server.clients) == 2


def test_a_client_serves_many_threads(server: ScriptedServer) -> None:
    server.answers = [MEMORY]
    found: list[str] = []
    with Client(server.url) as client:
        threads = [
            threading.Thread(target=lambda: found.append(client.get("m1").id)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == ["m1"] * 16


def test_an_async_client_outlives_its_event_loop(server: ScriptedServer) -> None:
    server.answers = [MEMORY]
    client = AsyncClient(server.url)
    for _ in range(2):
        assert asyncio.run(client.get("m1")).id == "m1"
    asyncio.run(client.close())


def test_closed_client(server: ScriptedServer) -> None:
    client = Client(server.url)
    client.close()
    client.close()
    with pytest.raises(ConnectionFailed, match="closed"):
        client.get("m1")


def test_unix_socket(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = json.dumps({"data": [{"id": "over-uds"}]}).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

    path = str(tmp_path / "s")
    server = uvicorn.Server(uvicorn.Config(app, uds=path, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert eventually(lambda: server.started, 10)
    with Client(uds=path) as client:
        assert client.models() == ["over-uds"]
        assert client.health()
    server.should_exit = True
    thread.join()
