"""The synchronous client of a core."""

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from inferscale_core.client import calls
from inferscale_core.client.calls import Call, MemoryLike, Messages, Names, Who
from inferscale_core.client.errors import ConnectionFailed, InferScaleError, NotFound
from inferscale_core.client.models import (
    AddResponse,
    EmbedResponse,
    Memory,
    MemoryList,
    StatusResponse,
)

if TYPE_CHECKING:
    from inferscale_core.client.private_core import PrivateCore

BASE_URL_ENV = "INFERSCALE_BASE_URL"
API_KEY_ENV = "INFERSCALE_API_KEY"
DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT = 600.0

T = TypeVar("T")


def _nothing() -> None:
    """What closing the client of a served core releases."""


class Address:
    """Where a core listens and what each request carries; shared by both clients."""

    def __init__(
        self,
        base_url: str | None,
        uds: str | os.PathLike[str] | None,
        api_key: str | None,
        core: "PrivateCore | None",
    ) -> None:
        self.core = core
        self._uds = None if uds is None else os.fspath(uds)
        if self._uds is None and core is None:
            url = base_url or os.environ.get(BASE_URL_ENV) or DEFAULT_BASE_URL
            self.base_url = calls.server_address(url)
        else:
            self.base_url = calls.server_address(base_url) if base_url else "http://inferscale"
        key = api_key or os.environ.get(API_KEY_ENV)
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    @property
    def uds(self) -> str | None:
        """Path of the Unix socket; a private core that was started again may have a new one."""
        return str(self.core.socket) if self.core is not None else self._uds

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else self.base_url


class ChatStream:
    """Chunks of a streamed answer, as dicts; iterate once, or close to abort the request."""

    def __init__(self, response: httpx.Response, address: str, timeout: float) -> None:
        self._response = response
        self._address = address
        self._timeout = timeout
        self._chunks = self._read()

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            for line in self._response.iter_lines():
                chunk = calls.chunk_of(line)
                if chunk is not None:
                    yield chunk
        except httpx.TransportError as error:
            raise calls.transport_error(error, self._address, self._timeout) from error
        finally:
            self._response.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._chunks

    def __next__(self) -> dict[str, Any]:
        return next(self._chunks)

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """Talks HTTP to a core, over TCP (``base_url``) or a Unix socket (``uds``).

    Without both, ``INFERSCALE_BASE_URL`` names the core, else ``http://127.0.0.1:8000``. Safe to
    share between threads, and to use in a child process after a fork. Every method that reads or
    writes facts takes the scope as ``user=``, ``agent=``, ``run=``, ``tenant=``, or ``scope=``.

    Args:
        timeout: seconds without a byte of the answer before ``Timeout``.
        api_key: sent as a bearer token; default ``INFERSCALE_API_KEY``.
        max_retries: further tries, with backoff, after a failed connection, 429 or 503; only for
            calls that may be repeated (a chat is repeated only when it never reached the core).

    Raises (any method): ``ConnectionFailed``, ``Timeout``, ``ScopeError``, ``NotFound``,
        ``Conflict``, ``BadRequest``, ``RateLimited`` or ``ServerError``.
    """

    def __init__(
        self,
        base_url: str | None = None,
        uds: str | os.PathLike[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        api_key: str | None = None,
        *,
        max_retries: int = 3,
        core: "PrivateCore | None" = None,
    ) -> None:
        self._address = Address(base_url, uds, api_key, core)
        self._timeout = float(timeout)
        self._max_retries = max_retries
        self._lock = threading.Lock()
        self._http: httpx.Client | None = None
        self._pid = os.getpid()
        self._model: str | None = None
        self._closed = False
        # Also when the client is forgotten instead of closed; never more than once.
        self._release = weakref.finalize(self, core.release if core is not None else _nothing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._address})"

    @property
    def core(self) -> "PrivateCore | None":
        """The private core behind this client; None for a served one."""
        return self._address.core

    def close(self) -> None:
        """Close the connections; a private core ends when its last client has closed."""
        if self._closed:
            return
        self._closed = True
        self._drop_connections()
        self._release()

    def add(
        self,
        memories: MemoryLike | Iterable[MemoryLike],
        *,
        collection: str = "memories",
        wait: float | bool = 0,
        **who: Unpack[Who],
    ) -> AddResponse:
        """Store facts: texts, ``MemoryIn`` or dicts of its fields.

        Args:
            wait: seconds to wait for the KV as well (True: 300); 0 returns when the rows are
                committed.
        """
        return self._run(calls.add(memories, collection, wait, who))

    def get(self, fact_id: str, **who: Unpack[Who]) -> Memory:
        """One fact. A scope, when given, is verified: another's fact is ``NotFound``."""
        return self._run(calls.get(fact_id, who))

    def list(
        self,
        *,
        limit: int = 100,
        offset: int = 0,
        filters: Mapping[str, Any] | None = None,
        collection: str | None = None,
        **who: Unpack[Who],
    ) -> MemoryList:
        """The facts that the scope sees."""
        return self._run(calls.list_facts(limit, offset, filters, collection, who))

    def search(
        self,
        query: str,
        *,
        k: int = 10,
        filters: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        collection: str | None = None,
        **who: Unpack[Who],
    ) -> MemoryList:
        """The ``k`` facts closest to the query, best first, with ``score``."""
        return self._run(calls.search(query, k, filters, min_score, collection, who))

    def update(
        self,
        fact_id: str,
        *,
        text: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        valid_at: Any = None,
        invalid_at: Any = None,
        **who: Unpack[Who],
    ) -> Memory:
        """Change a fact; what is not given stays. A new text gets new KV."""
        changes = {
            "text": text,
            "metadata": metadata,
            "valid_at": valid_at,
            "invalid_at": invalid_at,
        }
        return self._run(calls.update(fact_id, changes, who))

    def delete(self, fact_id: str, **who: Unpack[Who]) -> int:
        """Delete a fact, its embedding and its KV. Returns 1, or raises ``NotFound``."""
        return self._run(calls.delete(fact_id, who))

    def delete_all(self, *, collection: str | None = None, **who: Unpack[Who]) -> int:
        """Delete every fact that the scope sees; how many."""
        return self._run(calls.delete_all(collection, who))

    def delete_collection(self, collection: str, *, tenant: str = "default") -> int:
        """Delete a tenant's whole collection; how many facts."""
        return self._run(calls.delete_collection(collection, tenant))

    def status(self, **who: Unpack[Who]) -> StatusResponse:
        """Facts by KV state (of the scope, when one is given) and the arena's fill."""
        return self._run(calls.status(who))

    def embed(self, texts: str | Iterable[str]) -> EmbedResponse:
        """Embeddings of texts by the core's embedder."""
        return self._run(calls.embed(texts))

    def models(self) -> Names:
        """Names under which the core serves its model."""
        return self._run(calls.models())

    def health(self) -> bool:
        """Whether a core answers and its engine lives. Never raises, never retries."""
        with suppress(InferScaleError):
            return calls.read_answer(calls.health(), self._send(calls.health(), attempts=1))
        return False

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Any
    ) -> dict[str, Any]: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Any) -> ChatStream: ...
    def chat(
        self,
        messages: Messages,
        *,
        user: str | None = None,
        agent: str | None = None,
        run: str | None = None,
        tenant: str | None = None,
        scope: Any = None,
        k: int | None = None,
        query: str | None = None,
        fact_ids: Any = None,
        filters: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        mode: Literal["inject", "text"] | None = None,
        tail: int | None = None,
        model: str | None = None,
        stream: bool = False,
        **openai_params: Any,
    ) -> dict[str, Any] | ChatStream:
        """A chat completion over the scope's facts.

        Facts are named (``fact_ids``, best last) or searched (``query``, default the last user
        message, with ``k``); without both the messages are taken as they are. Without a scope it
        is a plain chat. ``openai_params`` go to the core as they are.

        Returns:
            The OpenAI answer with the field ``inferscale`` (``MemoryReport``), or with
            ``stream=True`` its chunks; the last but one carries ``inferscale``.
        """
        who: Who = {"user": user, "agent": agent, "run": run, "tenant": tenant, "scope": scope}
        memory = {
            "k": k,
            "query": query,
            "fact_ids": fact_ids,
            "filters": filters,
            "min_score": min_score,
            "mode": mode,
            "tail": tail,
        }
        params = {**openai_params, "stream": True} if stream else openai_params
        call = calls.chat(messages, model or self._default_model(), memory, who, params)
        if not stream:
            return self._run(call)
        return ChatStream(self._send(call, stream=True), str(self._address), self._timeout)

    def _default_model(self) -> str:
        if self._model is None:
            names = self.models()
            if not names:
                raise NotFound(f"the core at {self._address} serves no model; pass model=")
            self._model = names[0]
        return self._model

    def _connection(self) -> httpx.Client:
        if self._pid != os.getpid():
            # A connection or lock shared with the parent process would mix the two up.
            self._lock, self._http, self._pid = threading.Lock(), None, os.getpid()
        if self._closed:
            raise ConnectionFailed("this client is closed; make a new one")
        with self._lock:
            if self._http is None:
                if self._address.core is not None:
                    self._address.core.ensure_lease()
                uds = self._address.uds
                self._http = httpx.Client(
                    base_url=self._address.base_url,
                    headers=self._address.headers,
                    timeout=self._timeout,
                    transport=httpx.HTTPTransport(uds=uds) if uds else None,
                )
            return self._http

    def _drop_connections(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._pid == os.getpid():
            http.close()

    def _send(
        self, call: Call[Any], *, stream: bool = False, attempts: int | None = None
    ) -> httpx.Response:
        """The answer of a successful request, its body unread when ``stream`` is set."""
        tries = attempts or self._max_retries + 1
        revivable = self._address.core is not None and attempts is None
        attempt = 0
        while True:
            http = self._connection()
            cause: Exception
            try:
                request = calls.request_of(http, call, self._timeout)
                response = http.send(request, stream=stream)
                if not response.is_error:
                    return response
                response.read()
                response.close()
                cause = error = calls.failure(response)
            except httpx.TransportError as problem:
                cause = problem
                error = calls.transport_error(problem, str(self._address), self._timeout)
            if revivable and calls.never_sent(cause) and self._address.core is not None:
                revivable = False
                if self._http is http:
                    self._drop_connections()
                self._address.core.revive()
                continue
            attempt += 1
            if attempt >= tries or not calls.may_retry(call, cause):
                raise error from (None if cause is error else cause)
            time.sleep(calls.backoff(attempt - 1, cause))

    def _run(self, call: Call[T]) -> T:
        return calls.read_answer(call, self._send(call))
