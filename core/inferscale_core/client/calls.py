"""The requests of the memory API, built and read the same way by both clients.

A function here turns typed arguments into a ``Call``; ``Call.parse`` turns the JSON answer into
the typed result. Nothing here does I/O.
"""

import json
import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from inferscale_core.client.chat_fields import check_spelling
from inferscale_core.client.errors import (
    BadRequest,
    ConnectionFailed,
    InferScaleError,
    RateLimited,
    ScopeError,
    ServerError,
    Timeout,
    error_from_response,
)
from inferscale_core.client.models import (
    AddRequest,
    AddResponse,
    ChatMemory,
    EmbedRequest,
    EmbedResponse,
    Memory,
    MemoryIn,
    MemoryList,
    Scope,
    SearchRequest,
    StatusResponse,
    UpdateRequest,
)

T = TypeVar("T")

MemoryLike = str | MemoryIn | Mapping[str, Any]
Messages = str | Sequence[Mapping[str, Any]]
Names = list[str]

CONNECT_TIMEOUT = 10.0
MAX_BACKOFF = 8.0
WAIT_TRUE = 300.0
"""Seconds that ``wait=True`` stands for."""


class Who(TypedDict, total=False):
    """How a call names its scope: the fields, or a ready ``scope``."""

    user: str | None
    agent: str | None
    run: str | None
    tenant: str | None
    scope: Scope | Mapping[str, Any] | None


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP request. ``extra_time`` (seconds) is added to the read timeout."""

    method: str
    path: str
    parse: Callable[[Any], T]
    params: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    idempotent: bool = True
    extra_time: float = 0.0


def scope_of(who: Who) -> Scope:
    """The scope that a call names.

    Raises:
        ScopeError: none is named, or both ``scope`` and single fields are given.
    """
    fields = {name: who.get(name) for name in ("tenant", "user", "agent", "run")}
    given = {name: value for name, value in fields.items() if value is not None}
    scope = who.get("scope")
    try:
        if scope is None:
            return Scope.model_validate(given)
        if given:
            raise ScopeError(
                f"both scope= and {', '.join(sorted(given))} are given; pass one of the two forms"
            )
        return scope if isinstance(scope, Scope) else Scope.model_validate(scope)
    except ValidationError as error:
        raise ScopeError(f"invalid scope: {_first_problem(error)}") from error


def scope_or_none(who: Who) -> Scope | None:
    """Like ``scope_of``; None when the call names none."""
    if any(who.get(name) is not None for name in ("user", "agent", "run", "scope")):
        return scope_of(who)
    return None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _checked(model: type[BaseModel], **values: Any) -> dict[str, Any]:
    """The JSON body of a request; only what the caller gave.

    Raises:
        BadRequest: a value is not valid; nothing was sent.
    """
    try:
        return model.model_validate(values).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        raise BadRequest(f"invalid {model.__name__}: {_first_problem(error)}") from error
    except ValueError as error:  # text that is not valid Unicode fails when it is serialized
        raise BadRequest(f"invalid {model.__name__}: {error}") from error


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _scope_params(scope: Scope) -> dict[str, str]:
    return {"tenant": scope.tenant, **scope.owner_fields}


def _by_id_params(who: Who) -> dict[str, str]:
    scope = scope_or_none(who)
    return _scope_params(scope) if scope else {"tenant": who.get("tenant") or "default"}


def _memory_path(fact_id: str) -> str:
    if fact_id in ("", ".", ".."):  # an HTTP client takes "." for all facts of the scope
        raise BadRequest(f"the id of a fact is empty or no id ({fact_id!r}); pass add()'s")
    return f"/v1/memories/{quote(fact_id, safe='')}"


def _deleted(answer: Any) -> int:
    return int(answer["deleted"])


def _memory_in(item: MemoryLike) -> MemoryIn:
    """A fact with an id: with one, a repeated request stores nothing twice."""
    try:
        if isinstance(item, str):
            memory = MemoryIn(text=item)
        elif isinstance(item, MemoryIn):
            memory = item
        else:
            memory = MemoryIn.model_validate(item)
    except ValidationError as error:
        raise BadRequest(f"invalid memory: {_first_problem(error)}") from error
    return memory if memory.id else memory.model_copy(update={"id": str(uuid.uuid4())})


def add(
    memories: MemoryLike | Iterable[MemoryLike], collection: str, wait: float | bool, who: Who
) -> Call[AddResponse]:
    items = [memories] if isinstance(memories, str | MemoryIn | Mapping) else list(memories)
    seconds = WAIT_TRUE if wait is True else float(wait)
    body = _checked(
        AddRequest,
        scope=scope_of(who),
        memories=[_memory_in(item) for item in items],
        collection=collection,
        wait=seconds,
    )
    return Call("POST", "/v1/memories", AddResponse.model_validate, body=body, extra_time=seconds)


def get(fact_id: str, who: Who) -> Call[Memory]:
    return Call("GET", _memory_path(fact_id), Memory.model_validate, params=_by_id_params(who))


def list_facts(
    limit: int, offset: int, filters: Mapping[str, Any] | None, collection: str | None, who: Who
) -> Call[MemoryList]:
    params = _scope_params(scope_of(who)) | {"limit": str(limit), "offset": str(offset)}
    if collection is not None:
        params["collection"] = collection
    if filters is not None:
        params["filters"] = json.dumps(filters)
    return Call("GET", "/v1/memories", MemoryList.model_validate, params=params)


def search(
    query: str,
    k: int,
    filters: Mapping[str, Any] | None,
    min_score: float | None,
    collection: str | None,
    who: Who,
) -> Call[MemoryList]:
    body = _checked(
        SearchRequest,
        scope=scope_of(who),
        query=query,
        k=k,
        **_given(filters=filters, min_score=min_score, collection=collection),
    )
    return Call("POST", "/v1/memories/search", MemoryList.model_validate, body=body)


def update(fact_id: str, changes: Mapping[str, Any], who: Who) -> Call[Memory]:
    scope = scope_or_none(who)
    owner: dict[str, Any] = {"tenant": scope.tenant if scope else who.get("tenant") or "default"}
    if scope is not None:
        owner["scope"] = scope
    body = _checked(UpdateRequest, **owner, **_given(**changes))
    return Call("PATCH", _memory_path(fact_id), Memory.model_validate, body=body)


def delete(fact_id: str, who: Who) -> Call[int]:
    return Call("DELETE", _memory_path(fact_id), _deleted, params=_by_id_params(who))


def delete_all(collection: str | None, who: Who) -> Call[int]:
    params = _scope_params(scope_of(who)) | _given(collection=collection)
    return Call("DELETE", "/v1/memories", _deleted, params=params)


def delete_collection(collection: str, tenant: str) -> Call[int]:
    if collection in ("", ".", ".."):
        raise BadRequest(f"the name of the collection is empty or no name: {collection!r}")
    path = f"/v1/collections/{quote(collection, safe='')}"
    return Call("DELETE", path, _deleted, params={"tenant": tenant})


def status(who: Who) -> Call[StatusResponse]:
    scope = scope_or_none(who)
    tenant = who.get("tenant")
    params = _scope_params(scope) if scope else ({"tenant": tenant} if tenant else {})
    return Call("GET", "/v1/memories/status", StatusResponse.model_validate, params=params)


def embed(texts: str | Iterable[str]) -> Call[EmbedResponse]:
    body = _checked(EmbedRequest, texts=[texts] if isinstance(texts, str) else list(texts))
    return Call("POST", "/v1/memories/embed", EmbedResponse.model_validate, body=body)


def models() -> Call[list[str]]:
    return Call("GET", "/v1/models", lambda answer: [m["id"] for m in answer["data"]])


def health() -> Call[bool]:
    return Call("GET", "/health", lambda answer: True, idempotent=False)


def chat(
    messages: Messages, model: str, memory: Mapping[str, Any], who: Who, openai: Mapping[str, Any]
) -> Call[dict[str, Any]]:
    """A chat completion; ``memory`` are the fields of ``ChatMemory`` but the scope.

    Raises:
        ScopeError: a memory field is given and no scope.
        TypeError: a parameter is misspelt.
    """
    check_spelling(openai)
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    body: dict[str, Any] = {**openai, "model": model, "messages": [dict(turn) for turn in turns]}
    given = _given(**memory)
    scope = scope_or_none(who)
    if scope is not None:
        body["inferscale"] = _checked(ChatMemory, scope=scope, **given)
    elif given:
        raise ScopeError(
            f"{', '.join(sorted(given))} given without a scope: a question over stored facts "
            "needs one; pass for example user='alice'"
        )
    return Call("POST", "/v1/chat/completions", dict, body=body, idempotent=False)


def request_of(http: httpx.Client | httpx.AsyncClient, call: Call[Any], timeout: float) -> Any:
    """The httpx request of a call; ``timeout`` in seconds for one read."""
    try:
        content = None if call.body is None else json.dumps(call.body).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise BadRequest(f"the request cannot be written as JSON: {error}") from error
    headers = {"content-type": "application/json"} if content is not None else {}
    limits = httpx.Timeout(timeout + call.extra_time, connect=min(CONNECT_TIMEOUT, timeout))
    return http.build_request(
        call.method,
        call.path,
        params=call.params or None,
        content=content,
        headers=headers,
        timeout=limits,
    )


def read_answer(call: Call[T], response: httpx.Response) -> T:
    """Typed result of a complete answer.

    Raises:
        InferScaleError: the one that the status and the error body stand for.
    """
    if response.is_error:
        raise failure(response)
    try:
        return call.parse(response.json() if response.content else None)
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(
            f"{call.method} {call.path} gave an answer that is not InferScale's ({error}); "
            "is the address that of a core with the same version?",
            status=response.status_code,
        ) from error


def failure(response: httpx.Response) -> InferScaleError:
    """The typed error of a complete answer with an error status."""
    try:
        body = response.json()
    except ValueError:
        body = response.text[:2000]
    retry_after: float | None = None
    try:
        retry_after = float(response.headers.get("retry-after", ""))
    except ValueError:
        retry_after = None
    return error_from_response(response.status_code, body, retry_after=retry_after)


def transport_error(error: httpx.TransportError, address: str, timeout: float) -> InferScaleError:
    """The typed error of a request that got no answer."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return Timeout(
            f"no answer from {address} within {timeout:.0f} s; the core may be busy: "
            "pass a longer timeout= or look at its log"
        )
    reason = str(error) or type(error).__name__
    todo = "start one with `inferscale serve MODEL`, or pass the right base_url"
    if address.startswith("unix:"):
        todo = "the next call starts a private one again"
    return ConnectionFailed(f"no core answers at {address} ({reason}); {todo}")


def never_sent(error: Exception) -> bool:
    """Whether a failed request certainly did not reach the core."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def may_retry(call: Call[Any], error: Exception) -> bool:
    """Whether the same call may be sent again: it never arrived, or it does no harm twice."""
    if never_sent(error):
        return True
    if not call.idempotent:
        return False
    if isinstance(error, httpx.TransportError):
        return not isinstance(error, httpx.TimeoutException)
    return isinstance(error, RateLimited) or getattr(error, "status", None) == 503


def backoff(attempt: int, error: Exception) -> float:
    """Seconds to wait before try ``attempt + 1`` (attempts count from 0)."""
    said = getattr(error, "retry_after", None)
    if said is not None:
        return min(float(said), MAX_BACKOFF)
    return min(0.2 * 2**attempt, MAX_BACKOFF) * random.uniform(0.75, 1.25)


def chunk_of(line: str) -> dict[str, Any] | None:
    """One server-sent event of a streamed answer; None for anything but a chunk.

    Raises:
        InferScaleError: the event reports an error.
    """
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    if not data or data == "[DONE]":
        return None
    chunk = json.loads(data)
    if isinstance(chunk, dict) and "error" in chunk:
        code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
        raise error_from_response(code if isinstance(code, int) else 500, chunk)
    return dict(chunk)


def server_address(base_url: str) -> str:
    """``base_url`` without the ``/v1`` that OpenAI clients put at its end.

    Raises:
        BadRequest: not an http(s) address.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise BadRequest(f"base_url {base_url!r} is not an address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise BadRequest(
            f"base_url {base_url!r} is not an http address; for example http://127.0.0.1:8000"
        )
    return str(url).rstrip("/").removesuffix("/v1")
