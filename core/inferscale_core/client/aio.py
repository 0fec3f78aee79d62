"""The asynchronous client of a core: ``Client``'s methods, awaited."""

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from inferscale_core.client import calls
from inferscale_core.client.calls import Call, MemoryLike, Messages, Names, Who
from inferscale_core.client.client import DEFAULT_TIMEOUT, Address, _nothing
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

T = TypeVar("T")


class AsyncChatStream:
    """Chunks of a streamed answer, as dicts; iterate once, or ``aclose`` to abort."""

    def __init__(self, response: httpx.Response, address: str, timeout: float) -> None:
        self._response = response
        self._address = address
        self._timeout = timeout
        self._chunks = self._read()

    async def _read(self) -> AsyncIterator[dict[str, Any]]:
        try:
            async for line in self._response.aiter_lines():
                chunk = calls.chunk_of(line)
                if chunk is not None:
                    yield chunk
        except httpx.TransportError as error:
            raise calls.transport_error(error, self._address, self._timeout) from error
        finally:
            await self._response.aclose()

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._chunks

    async def __anext__(self) -> dict[str, Any]:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncClient:
    """``Client`` for asyncio; see there for the arguments, the methods and what they raise.

    May be used from several event loops, one after the other (connections belong to a loop).
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
        self._http: httpx.AsyncClient | None = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._model: str | None = None
        self._closed = False
        # Also when the client is forgotten instead of closed; never more than once.
        self._release = weakref.finalize(self, core.release if core is not None else _nothing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._address})"

    @property
    def core(self) -> "PrivateCore | None":
        """The private core behind this client; None for a served one."""
        return self._address.core

    async def close(self) -> None:
        """Close the connections; a private core ends when its last client has closed."""
        if self._closed:
            return
        self._closed = True
        await self._drop_connections()
        self._release()

    aclose = close

    async def add(
        self,
        memories: MemoryLike | Iterable[MemoryLike],
        *,
        collection: str = "memories",
        wait: float | bool = 0,
        **who: Unpack[Who],
    ) -> AddResponse:
        """Store facts; see ``Client.add``."""
        return await self._run(calls.add(memories, collection, wait, who))

    async def get(self, fact_id: str, **who: Unpack[Who]) -> Memory:
        """One fact; see ``Client.get``."""
        return await self._run(calls.get(fact_id, who))

    async def list(
        self,
        *,
        limit: int = 100,
        offset: int = 0,
        filters: Mapping[str, Any] | None = None,
        collection: str | None = None,
        **who: Unpack[Who],
    ) -> MemoryList:
        """The facts that the scope sees."""
        return await self._run(calls.list_facts(limit, offset, filters, collection, who))

    async def search(
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
        return await self._run(calls.search(query, k, filters, min_score, collection, who))

    async def update(
        self,
        fact_id: str,
        *,
        text: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        valid_at: Any = None,
        invalid_at: Any = None,
        **who: Unpack[Who],
    ) -> Memory:
        """Change a fact; see ``Client.update``."""
        changes = {
            "text": text,
            "metadata": metadata,
            "valid_at": valid_at,
            "invalid_at": invalid_at,
        }
        return await self._run(calls.update(fact_id, changes, who))

    async def delete(self, fact_id: str, **who: Unpack[Who]) -> int:
        """Delete a fact; see ``Client.delete``."""
        return await self._run(calls.delete(fact_id, who))

    async def delete_all(self, *, collection: str | None = None, **who: Unpack[Who]) -> int:
        """Delete every fact that the scope sees; how many."""
        return await self._run(calls.delete_all(collection, who))

    async def delete_collection(self, collection: str, *, tenant: str = "default") -> int:
        """Delete a tenant's whole collection; how many facts."""
        return await self._run(calls.delete_collection(collection, tenant))

    async def status(self, **who: Unpack[Who]) -> StatusResponse:
        """Facts by KV state and the arena's fill."""
        return await self._run(calls.status(who))

    async def embed(self, texts: str | Iterable[str]) -> EmbedResponse:
        """Embeddings of texts by the core's embedder."""
        return await self._run(calls.embed(texts))

    async def models(self) -> Names:
        """Names under which the core serves its model."""
        return await self._run(calls.models())

    async def health(self) -> bool:
        """Whether a core answers and its engine lives. Never raises, never retries."""
        with suppress(InferScaleError):
            response = await self._send(calls.health(), attempts=1)
            return calls.read_answer(calls.health(), response)
        return False

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Any
    ) -> dict[str, Any]: ...
    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Any
    ) -> AsyncChatStream: ...
    async def chat(
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
    ) -> dict[str, Any] | AsyncChatStream:
        """A chat completion over the scope's facts; see ``Client.chat``."""
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
        call = calls.chat(messages, model or await self._default_model(), memory, who, params)
        if not stream:
            return await self._run(call)
        response = await self._send(call, stream=True)
        return AsyncChatStream(response, str(self._address), self._timeout)

    async def _default_model(self) -> str:
        if self._model is None:
            names = await self.models()
            if not names:
                raise NotFound(f"the core at {self._address} serves no model; pass model=")
            self._model = names[0]
        return self._model

    async def _connection(self) -> httpx.AsyncClient:
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            # Connections of another process or of a closed loop are of no use here.
            self._http, self._owner = None, owner
        if self._closed:
            raise ConnectionFailed("this client is closed; make a new one")
        if self._http is None:
            if self._address.core is not None:
                await asyncio.to_thread(self._address.core.ensure_lease)
            uds = self._address.uds
            self._http = self._http or httpx.AsyncClient(
                base_url=self._address.base_url,
                headers=self._address.headers,
                timeout=self._timeout,
                transport=httpx.AsyncHTTPTransport(uds=uds) if uds else None,
            )
        return self._http

    async def _drop_connections(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._owner == (os.getpid(), asyncio.get_running_loop()):
            await http.aclose()

    async def _send(
        self, call: Call[Any], *, stream: bool = False, attempts: int | None = None
    ) -> httpx.Response:
        """The answer of a successful request, its body unread when ``stream`` is set."""
        tries = attempts or self._max_retries + 1
        revivable = self._address.core is not None and attempts is None
        attempt = 0
        while True:
            http = await self._connection()
            cause: Exception
            try:
                request = calls.request_of(http, call, self._timeout)
                response = await http.send(request, stream=stream)
                if not response.is_error:
                    return response
                await response.aread()
                await response.aclose()
                cause = error = calls.failure(response)
            except httpx.TransportError as problem:
                cause = problem
                error = calls.transport_error(problem, str(self._address), self._timeout)
            if revivable and calls.never_sent(cause) and self._address.core is not None:
                revivable = False
                if self._http is http:
                    await self._drop_connections()
                await asyncio.to_thread(self._address.core.revive)
                continue
            attempt += 1
            if attempt >= tries or not calls.may_retry(call, cause):
                raise error from (None if cause is error else cause)
            await asyncio.sleep(calls.backoff(attempt - 1, cause))

    async def _run(self, call: Call[T]) -> T:
        return calls.read_answer(call, await self._send(call))
