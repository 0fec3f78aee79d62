"""Mem0's vector store on the core's fact store."""

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mem0.vector_stores.base import VectorStoreBase

from inferscale_adapters.mem0.core import CoreOptions, client_for
from inferscale_adapters.mem0.rows import Row, text_and_metadata, to_fact, to_row
from inferscale_adapters.mem0.scopes import owner_of, reader_of
from inferscale_core.client import Client, NotFound, ScopeError
from inferscale_core.client.models import Memory, MemoryIn, Turn
from inferscale_core.facts.scope import Scope

logger = logging.getLogger(__name__)

PAGE = 1000
"""Rows per request, when adding and when listing."""

MAX_K = 10_000
"""Most rows of one search; Mem0 asks for four times what the app does."""

Rows = list[Row]
Facts = list[MemoryIn]
Stored = list[Memory]
Names = list[str]  # inside the class, ``list`` is a method

_turns: ContextVar[tuple[Turn, ...]] = ContextVar("inferscale_mem0_turns", default=())


@contextmanager
def facts_from(turns: Sequence[Turn]) -> Iterator[None]:
    """Inserts made inside the block record ``turns`` as the conversation they came from."""
    token = _turns.set(tuple(turns))
    try:
        yield
    finally:
        _turns.reset(token)


class InferScaleVectorStore(VectorStoreBase):
    """Rows of Mem0 as facts of a core, in the collection of the same name.

    - ``payload["data"]`` is the fact's text. Vectors passed in are ignored, in inserts, updates
      and searches alike: the core embeds the text itself, with its own embedder.
    - ``user_id``, ``agent_id`` and ``run_id`` of the payload are the fact's scope. Reading needs
      one of them in the filters, each with one value; else ScopeError. Every row read is checked
      against the reader's scope once more.
    - KV is computed in the background after the row is committed; nothing here waits for it or
      fails because of it. Mem0's entity and migration rows (``*_entities``, ``mem0migrations``)
      never get KV, and those that name no owner belong to a run of their own
      (`inferscale_adapters.mem0.scopes.NO_OWNER`), which a search without a scope reads.
    - Safe to share between threads.

    Constructor arguments are the fields of `InferScaleVectorConfig`.
    """

    def __init__(
        self,
        collection_name: str = "memories",
        tenant: str = "default",
        embedding_model_dims: int | None = None,
        **core: Any,
    ) -> None:
        self.collection_name = collection_name
        self.tenant = tenant
        self.embedding_model_dims = embedding_model_dims
        self.core: Client = client_for(CoreOptions.read(core), self)

    @property
    def holds_facts(self) -> bool:
        """Whether the rows are facts for prompts, not Mem0's own bookkeeping."""
        return not (
            self.collection_name.endswith(("_entities", "-entities"))
            or self.collection_name == "mem0migrations"
        )

    def create_col(self, name: str, vector_size: int, distance: str = "cosine") -> None:
        """Nothing to do: a collection of the core exists from its first row on."""

    def insert(
        self,
        vectors: Sequence[Sequence[float]],
        payloads: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        """Store rows; one whose id exists already is brought to the payload given.

        Raises:
            ScopeError: a payload names no owner.
            Conflict: an id belongs to a row of another owner.
            ValueError: a payload's text is empty, or the three lists differ in length.
        """
        payloads = [{} for _ in vectors] if payloads is None else list(payloads)
        ids = [str(uuid.uuid4()) for _ in payloads] if ids is None else [str(id) for id in ids]
        if not len(vectors) == len(payloads) == len(ids):
            raise ValueError(
                f"insert got {len(vectors)} vectors, {len(payloads)} payloads and {len(ids)} ids"
            )
        by_owner: dict[Scope, Facts] = {}
        for id, payload in zip(ids, payloads, strict=True):
            owner = owner_of(payload, self.tenant, ownerless=not self.holds_facts)
            fact = to_fact(id, payload, encode=self.holds_facts, turns=_turns.get())
            by_owner.setdefault(owner, []).append(fact)
        for owner, facts in by_owner.items():
            for start in range(0, len(facts), PAGE):
                self._add(owner, facts[start : start + PAGE])

    def _add(self, owner: Scope, facts: Sequence[MemoryIn]) -> None:
        sent = {fact.id: fact.model_dump(mode="json") for fact in facts}
        answer = self.core.add(facts, scope=owner, collection=self.collection_name)
        for stored in answer.memories:
            wanted = sent[stored.id]
            if (stored.text, stored.metadata) != (wanted["text"], wanted["metadata"]):
                # The id was there before: the core keeps the row it has, Mem0 expects an upsert.
                self.core.update(
                    stored.id, text=wanted["text"], metadata=wanted["metadata"], scope=owner
                )

    def search(
        self,
        query: str,
        vectors: Sequence[float] | None = None,
        top_k: int = 5,
        filters: Mapping[str, Any] | None = None,
    ) -> Rows:
        """The rows closest to ``query``, best first; ``score`` is the cosine similarity.

        Raises ScopeError when the filters name no single owner.
        """
        reader, rest = self._reader(filters, "search")
        found = self.core.search(
            query, k=min(top_k, MAX_K), filters=rest, collection=self.collection_name, scope=reader
        )
        return self._rows(reader, found.memories)

    def list(
        self, filters: Mapping[str, Any] | None = None, top_k: int | None = None
    ) -> Sequence[Rows]:
        """``[rows]``, at most ``top_k`` of them (None: all). Raises ScopeError like `search`."""
        reader, rest = self._reader(filters, "list")
        facts: Stored = []
        while top_k is None or len(facts) < top_k:
            limit = PAGE if top_k is None else min(PAGE, top_k - len(facts))
            page = self.core.list(
                limit=limit,
                offset=len(facts),
                filters=rest,
                collection=self.collection_name,
                scope=reader,
            )
            facts.extend(page.memories)
            if len(page.memories) < limit:
                break
        return [self._rows(reader, facts)]

    def keyword_search(
        self, query: str, top_k: int = 5, filters: Mapping[str, Any] | None = None
    ) -> None:
        """None: keyword search is not supported, Mem0 ranks by similarity alone."""
        return None

    def get(self, vector_id: str) -> Row | None:
        """The row of that id in this collection, of any owner, or None."""
        try:
            fact = self.core.get(str(vector_id), tenant=self.tenant)
        except NotFound:
            return None
        return to_row(fact) if fact.collection == self.collection_name else None

    def update(
        self,
        vector_id: str,
        vector: Sequence[float] | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace a row's payload; its KV is computed anew only when the text changes.

        Raises:
            ScopeError: the payload names another owner than the row has; rows do not move.
            NotFound: no row of that id.
        """
        if payload is None:  # only a new vector, and the core makes its own
            return
        owner = owner_of(payload, self.tenant, ownerless=not self.holds_facts)
        fact = self.core.get(str(vector_id), tenant=self.tenant)
        if fact.scope != owner:
            raise ScopeError(
                f"memory {vector_id} belongs to {fact.scope.owner_fields}, and update() would "
                f"move it to {owner.owner_fields}; delete it there and add it here instead"
            )
        text, metadata = text_and_metadata(payload)
        self.core.update(
            str(vector_id),
            text=None if text == fact.text else text,
            metadata=metadata,
            scope=owner,
        )

    def delete(self, vector_id: str) -> None:
        """Remove a row of this collection with its KV; nothing happens when there is none."""
        row = self.get(vector_id)
        if row is None:
            return
        try:
            self.core.delete(str(vector_id), tenant=self.tenant)
        except NotFound:
            logger.debug("row %s was deleted in the meantime", vector_id)

    def delete_within(self, filters: Mapping[str, Any]) -> int:
        """Remove every row of this collection that the filters' owner sees; how many.

        Raises ScopeError for filters without one owner, ValueError for others than its ids.
        """
        reader, rest = self._reader(filters, "delete_within")
        if rest:
            raise ValueError(f"delete_within takes an owner only, not {sorted(rest)}")
        return self.core.delete_all(scope=reader, collection=self.collection_name)

    def delete_col(self) -> None:
        """Remove every row of this tenant's collection, and nothing else."""
        self.core.delete_collection(self.collection_name, tenant=self.tenant)

    def reset(self) -> None:
        """Empty this tenant's collection, and nothing else."""
        self.delete_col()

    def list_cols(self) -> Names:
        """This collection's name; the core names no other to an app."""
        return [self.collection_name]

    def col_info(self) -> dict[str, Any]:
        """Name, tenant and distance of the collection, and the core's fact counts by KV state."""
        status = self.core.status(tenant=self.tenant)
        return {
            "name": self.collection_name,
            "tenant": self.tenant,
            "distance": "cosine",
            "embedder": status.embedder,
            "facts": status.facts,
        }

    def _reader(
        self, filters: Mapping[str, Any] | None, what: str
    ) -> tuple[Scope, dict[str, Any] | None]:
        return reader_of(filters, self.tenant, what=what, ownerless=not self.holds_facts)

    def _rows(self, reader: Scope, facts: Sequence[Memory]) -> Rows:
        rows: Rows = []
        for fact in facts:
            if reader.sees(fact.scope):
                rows.append(to_row(fact))
            else:
                logger.error("the core gave %s a fact of another owner: %s", reader.key, fact.id)
        return rows
