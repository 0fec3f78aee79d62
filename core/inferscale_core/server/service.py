"""The memory service: what the routes do, over the fact store, the index and the encode queue."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inferscale_core.client.models import (
    AddRequest,
    EmbedResponse,
    Memory,
    MemoryIn,
    SearchRequest,
    StatusResponse,
    UpdateRequest,
)
from inferscale_core.config import CoreConfig
from inferscale_core.encoding.template import PromptTemplate
from inferscale_core.facts.embedder import Embedder
from inferscale_core.facts.index import EmbeddingIndex
from inferscale_core.facts.records import UNSET, DeleteResult, Forgotten
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore
from inferscale_core.server.engine import EngineMessages
from inferscale_core.server.errors import NotFoundError, ScopeError, UnavailableError
from inferscale_core.server.queue import IN_FLIGHT, IN_FLIGHT_ELSEWHERE, EncodeQueue
from inferscale_core.server.traffic import Traffic

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_THREADS = 8
EMBED_CHUNK = 64
"""Texts embedded in one go: a question's query waits for at most one chunk of an add."""
STATS_TIMEOUT = 5.0


class MemoryService:
    """Facts of a core: stored, searched and kept in step with the engine's KV.

    Methods are called on the event loop; blocking work runs in two small thread pools, one of
    them a single thread for the embedder.
    """

    def __init__(
        self,
        config: CoreConfig,
        store: FactStore,
        embedder: Embedder,
        index: EmbeddingIndex,
        template: PromptTemplate,
        engine_of: Callable[[Callable[[list[tuple[str, str]]], None]], EngineMessages],
        *,
        model: str,
        max_model_len: int,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.store = store
        self.template = template
        self.traffic = Traffic()
        self.model = model
        self.max_model_len = max_model_len
        self._embedder = embedder
        self._index = index
        self._threads = ThreadPoolExecutor(STORE_THREADS, "inferscale-store")
        self._embed_thread = ThreadPoolExecutor(1, "inferscale-embed")
        # One change at a time over store and index, so that they cannot get out of step.
        self._changes = asyncio.Lock()
        self._backfill: asyncio.Task[None] | None = None
        self.engine = engine_of(lambda segments: self.queue.evicted(segments))
        self.queue = EncodeQueue(
            config,
            store,
            index,
            template,
            self.engine,
            self.traffic,
            self.run,
            max_model_len,
            IN_FLIGHT.get(device, IN_FLIGHT_ELSEWHERE),
        )

    def start(self) -> None:
        """Begin to encode what is pending and to embed what has no embedding."""
        self.queue.start()
        self._backfill = asyncio.create_task(self._embed_missing(), name="inferscale-embed")

    async def close(self) -> None:
        """Stop and let another core open the store."""
        if self._backfill is not None:
            self._backfill.cancel()
            await asyncio.gather(self._backfill, return_exceptions=True)
        await self.queue.close()
        for pool in (self._threads, self._embed_thread):
            pool.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    async def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a blocking call of the store or the index in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    # Writing

    async def add(self, request: AddRequest) -> list[Memory]:
        """Store facts; returns them as they are once committed, or ``wait`` seconds later."""
        items, scope = request.memories, request.scope
        await self.queue.check_room(sum(item.encode for item in items))
        vectors = None
        if not await self.run(self._all_known, scope, items):
            vectors = await self.embed_texts([item.text for item in items])
        async with self._changes:
            result = await self.run(self._add, scope, items, vectors, request.collection)
        fresh = {*result.created, *result.changed}
        if vectors is None and fresh:  # deleted or changed since it was looked up
            memories = [memory for memory in result.memories if memory.id in fresh]
            vectors = await self.embed_texts([memory.text for memory in memories])
            async with self._changes:
                await self.run(self._set_vectors, memories, vectors)
        await self.queue.forget(result.forgotten)
        self.queue.notify()
        ids = [memory.id for memory in result.memories]
        if request.wait:
            await self.queue.wait(scope.tenant, ids, request.wait)
            by_id = {m.id: m for m in await self.run(self.store.get_many, ids, scope.tenant)}
            return [by_id.get(memory.id, memory) for memory in result.memories]
        return result.memories

    def _all_known(self, scope: Scope, items: Sequence[MemoryIn]) -> bool:
        """Whether an add only repeats what is stored, embeddings included."""
        wanted = {item.id: item.text for item in items if item.id is not None}
        if len(wanted) < len(items):
            return False
        found = self.store.get_many(list(wanted), scope.tenant)
        if any(m.text != wanted[m.id] for m in found) or len(found) < len(wanted):
            return False
        return len(self.store.get_vectors(scope.tenant, list(wanted))) == len(wanted)

    def _add(
        self,
        scope: Scope,
        items: Sequence[MemoryIn],
        vectors: NDArray[np.float32] | None,
        collection: str,
    ) -> Any:
        result = self.store.add(scope, items, vectors, collection)
        if vectors is not None:
            memories = result.memories
            ids, owners = [m.id for m in memories], [m.scope for m in memories]
            self._index.upsert(ids, owners, vectors, collection)
        return result

    async def update(self, fact_id: str, request: UpdateRequest) -> Memory:
        """Change a fact. Raises NotFoundError."""
        if request.scope is not None and request.scope.tenant != request.tenant:
            raise ScopeError(
                f"tenant {request.tenant!r} and the scope's tenant {request.scope.tenant!r} differ",
                param="scope.tenant",
            )
        given = {
            name: getattr(request, name) if name in request.model_fields_set else UNSET
            for name in ("valid_at", "invalid_at")
        }
        for name in ("text", "metadata"):
            value = getattr(request, name)
            given[name] = UNSET if value is None else value
        vector = None if request.text is None else (await self.embed_texts([request.text]))[0]

        def change() -> Any:
            result = self.store.update(
                fact_id, request.tenant, scope=request.scope, vector=vector, **given
            )
            if result is not None and vector is not None:
                memory = result.memory
                self._index.upsert([memory.id], [memory.scope], vector[None], memory.collection)
            return result

        async with self._changes:
            result = await self.run(change)
        if result is None:
            raise no_such_fact([fact_id])
        await self.queue.forget(result.forgotten)
        self.queue.notify()
        return result.memory

    async def delete(self, fact_id: str, tenant: str, scope: Scope | None = None) -> int:
        """Delete one fact. Raises NotFoundError."""
        deleted = await self._delete(
            tenant, lambda: self.store.delete([fact_id], tenant, scope=scope)
        )
        if not deleted:
            raise no_such_fact([fact_id])
        return deleted

    async def delete_scope(self, scope: Scope, collection: str | None) -> int:
        """Delete all facts that a reader sees; returns how many."""
        return await self._delete(scope.tenant, lambda: self.store.delete_scope(scope, collection))

    async def delete_collection(self, collection: str, tenant: str) -> int:
        """Delete all facts of a tenant's collection; returns how many."""
        return await self._delete(tenant, lambda: self.store.delete_collection(collection, tenant))

    async def _delete(self, tenant: str, delete: Callable[[], DeleteResult]) -> int:
        def change() -> tuple[int, Forgotten, list[str]]:
            result = delete()
            self._index.remove(result.ids, tenant)
            spaces = result.forgotten.epochs
            empty = [ns for ns in spaces if not self.store.counts(Scope.from_key(ns))]
            return len(result.ids), result.forgotten, empty

        async with self._changes:
            count, forgotten, empty = await self.run(change)
        await self.queue.forget(forgotten, empty)
        return count

    # Reading

    async def get(self, fact_id: str, tenant: str, scope: Scope | None = None) -> Memory:
        """One fact. Raises NotFoundError."""
        found = await self.run(self.store.get, fact_id, tenant, scope=scope)
        if found is None:
            raise no_such_fact([fact_id])
        return found

    async def get_visible(self, scope: Scope, ids: Sequence[str]) -> list[Memory]:
        """Facts that a reader names, in that order. Raises NotFoundError naming those unknown."""
        found = await self.run(self.store.get_many, ids, scope.tenant, scope=scope)
        known = {memory.id for memory in found}
        missing = [i for i in ids if i not in known]
        if missing:
            raise no_such_fact(missing)
        return found

    async def search(self, request: SearchRequest) -> list[Memory]:
        """The facts most similar to a query that the reader sees, best first, with ``score``."""
        if not request.k or not request.query.strip():
            return []
        vector = (await self.embed_texts([request.query]))[0]

        def find() -> list[Memory]:
            allowed = None
            if request.filters:
                allowed = self.store.matching_ids(
                    request.scope, collection=request.collection, filters=request.filters
                )
            (hits,) = self._index.search(
                request.scope,
                vector,
                request.k,
                collection=request.collection,
                allowed_ids=allowed,
            )
            scores = {
                fact_id: score
                for fact_id, score in hits
                if request.min_score is None or score >= request.min_score
            }
            found = self.store.get_many(list(scores), request.scope.tenant, scope=request.scope)
            return [m.model_copy(update={"score": scores[m.id]}) for m in found]

        return await self.run(find)

    async def status(self, scope: Scope | None, tenant: str | None) -> StatusResponse:
        """Facts by KV state (of a scope, a tenant or all), the queue, and the arena's fill."""
        facts = await self.run(self.store.counts, scope, tenant=None if scope else tenant)
        queued = await self.run(self.store.queue_depth)
        outgrown = await self.run(self.store.outgrown_count)
        try:
            stats = await self.engine.stats(STATS_TIMEOUT)
        except UnavailableError as error:
            logger.warning("no figures of the arena: %s", error)
            stats = {}
        return StatusResponse(
            facts=facts,
            queue=queued,
            outgrown=outgrown,
            arena_tokens=stats.get("arena_tokens"),
            arena_tokens_used=stats.get("arena_tokens_used"),
            segments=stats.get("segments"),
            evictions=stats.get("evictions"),
            model=self.model,
            embedder=self._embedder.name,
            max_model_len=self.max_model_len,
        )

    async def embed(self, texts: Sequence[str]) -> EmbedResponse:
        """Embeddings of texts by the core's embedder."""
        vectors = await self.embed_texts(texts)
        return EmbedResponse(
            model=self._embedder.name,
            dimension=self._embedder.dimension,
            embeddings=vectors.tolist(),
        )

    async def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, float32 ``[len(texts), dimension]``."""
        loop = asyncio.get_running_loop()
        parts = [np.empty((0, self._embedder.dimension), dtype=np.float32)]
        for start in range(0, len(texts), EMBED_CHUNK):
            chunk = list(texts[start : start + EMBED_CHUNK])
            part = await loop.run_in_executor(self._embed_thread, self._embedder.embed, chunk)
            parts.append(part)
        return np.concatenate(parts)

    async def _embed_missing(self) -> None:
        """Embed the facts that have no vector: another embedder wrote them, or none did."""
        try:
            while facts := await self.run(self.store.facts_without_vector, EMBED_CHUNK):
                vectors = await self.embed_texts([memory.text for memory in facts])
                async with self._changes:
                    await self.run(self._set_vectors, facts, vectors)
        except Exception:
            logger.exception("facts without an embedding stay out of searches until a restart")

    def _set_vectors(self, facts: Sequence[Memory], vectors: NDArray[np.float32]) -> None:
        rows = {(m.scope, m.id): row for m, row in zip(facts, vectors, strict=True)}
        for memory in self.store.set_vectors(facts, vectors):
            row = rows[memory.scope, memory.id][None]
            self._index.upsert([memory.id], [memory.scope], row, memory.collection)


def no_such_fact(ids: Sequence[str]) -> NotFoundError:
    named = ", ".join(repr(i) for i in ids[:20]) + (", ..." if len(ids) > 20 else "")
    return NotFoundError(
        f"no such fact in this scope: {named}; they were deleted, never stored, or belong to "
        "another scope",
        param="fact_ids",
    )
