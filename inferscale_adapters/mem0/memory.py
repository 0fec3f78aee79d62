"""Mem0's ``Memory`` on a core, with answers from injected KV."""

import logging
import time
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any, Literal, overload

import mem0
from mem0.configs.base import MemoryConfig

from inferscale_adapters.mem0.answers import ChatAnswer, ChatAnswerStream
from inferscale_adapters.mem0.core import release
from inferscale_adapters.mem0.prompting import SYSTEM_PROMPT, messages_from
from inferscale_adapters.mem0.registry import install
from inferscale_adapters.mem0.rows import Row
from inferscale_adapters.mem0.scopes import ID_FIELDS, reader_of
from inferscale_adapters.mem0.sections import complete_config
from inferscale_adapters.mem0.vector_store import InferScaleVectorStore, facts_from
from inferscale_core.client import Client, NotFound, ScopeError, Timeout
from inferscale_core.client.models import StatusResponse, Turn
from inferscale_core.facts.scope import Scope

logger = logging.getLogger(__name__)

DEFAULT_K = 20
"""Memories per question, as in Mem0's ``search``."""

POLL_SECONDS = 0.5


class Memory(mem0.Memory):
    """A drop-in for ``mem0.Memory`` that answers questions from injected KV.

    Everything that the config leaves out (a section, or its provider) is ``inferscale``; without
    a config, all three run on a private core with the default model. Facts get their KV in the
    background once ``add`` has stored them, and lose it with ``update``, ``delete``,
    ``delete_all`` and ``reset``. ``history.db`` stays Mem0's own file.

    Args:
        config: a ``MemoryConfig``, a dict of its fields, or nothing.
    """

    def __init__(self, config: MemoryConfig | Mapping[str, Any] | None = None) -> None:
        install()
        super().__init__(complete_config(config))

    @classmethod
    def from_config(cls, config_dict: Mapping[str, Any]) -> "Memory":
        """Like ``Memory(config_dict)``. Raises pydantic's ValidationError for a wrong config."""
        return cls(config_dict)

    @property
    def core(self) -> Client:
        """Client of the core that holds the facts.

        Raises TypeError when the vector store is not ``inferscale``.
        """
        return self._facts.core

    def add(self, messages: Any, **options: Any) -> dict[str, Any]:
        """Mem0's ``add``; the facts also keep the turns that they came from."""
        with facts_from(_turns_of(messages)):
            return super().add(messages, **options)

    def search(
        self, query: str, *, filters: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Mem0's ``search``, which never answers with another owner's memories.

        Raises ScopeError for filters that would: ``user_id="*"``, a list of users, or an ``AND``
        with a second value, which Mem0 takes as the only one.
        """
        wanted = self._checked(filters, "search()")
        found = super().search(query, filters=_plain(filters), **options)
        return {**found, "results": _of_owner(found["results"], wanted)}

    def get_all(
        self, *, filters: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Mem0's ``get_all``, with the same refusals as `search`."""
        wanted = self._checked(filters, "get_all()")
        found = super().get_all(filters=_plain(filters), **options)
        return {**found, "results": _of_owner(found["results"], wanted)}

    def delete_all(
        self,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> dict[str, str]:
        """Mem0's ``delete_all``, in one go: facts with their KV, entities, and the history."""
        ids = _trimmed({"user_id": user_id, "agent_id": agent_id, "run_id": run_id})
        filters = {key: value for key, value in ids.items() if value}
        if "*" in filters.values():
            raise ScopeError(
                "delete_all() takes no '*': name the user, agent or run whose memories are to go"
            )
        store = self.vector_store
        if not filters or not isinstance(store, InferScaleVectorStore):
            return super().delete_all(user_id=user_id, agent_id=agent_id, run_id=run_id)
        (rows,) = store.list(filters)
        store.delete_within(filters)
        self.db.batch_add_history([_deletion(row) for row in rows])
        self._unlink(filters, {row.id for row in rows})
        return {"message": "Memories deleted successfully!"}

    def _unlink(self, filters: Mapping[str, Any], deleted: Set[str]) -> None:
        """Take deleted memories out of the entities that name them; an entity of none goes too."""
        entities = self.entity_store
        (rows,) = entities.list(filters)
        kept = []
        for row in rows:
            linked = row.payload.get("linked_memory_ids") or []
            remaining = [id for id in linked if id not in deleted]
            if remaining:
                kept.append((row, remaining, len(remaining) < len(linked)))
        if not kept:
            entities.delete_within(filters)
            return
        for id in {row.id for row in rows} - {row.id for row, _, _ in kept}:
            entities.delete(id)
        for row, remaining, changed in kept:
            if changed:
                entities.update(row.id, payload={**row.payload, "linked_memory_ids": remaining})

    def reset(self) -> None:
        """Mem0's ``reset``, with the entities that other processes stored for the collection."""
        if isinstance(self.vector_store, InferScaleVectorStore):
            _ = self.entity_store  # Mem0 resets it only in a process that has used it
        super().reset()

    @overload
    def chat(self, query: str, *, stream: Literal[False] = False, **options: Any) -> ChatAnswer: ...
    @overload
    def chat(self, query: str, *, stream: Literal[True], **options: Any) -> ChatAnswerStream: ...
    def chat(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        filters: Mapping[str, Any] | None = None,
        k: int = DEFAULT_K,
        threshold: float = 0.1,
        rerank: bool = False,
        messages: Sequence[Mapping[str, Any]] | None = None,
        mode: Literal["inject", "text"] | None = None,
        tail: int | None = None,
        stream: bool = False,
        **openai_params: Any,
    ) -> ChatAnswer | ChatAnswerStream:
        """Answer a question from the ``k`` memories that Mem0's search finds for it.

        Args:
            query: the question; also what is searched for.
            filters: Mem0's filters on top of the ids (which they may hold as well).
            threshold, rerank: as in ``search``.
            messages: the conversation so far; the query is added to it unless it is the last
                user message already.
            mode: ``"text"`` puts the same memories into the prompt without injecting them.
            tail: memories at the end of the prompt to prefill as text.
            stream: give the chunks as they come.
            openai_params: ``max_tokens``, ``temperature`` and so on, for the core.

        Returns:
            The OpenAI answer, with ``answer.inferscale`` telling what was injected.

        Raises:
            ScopeError: no user_id, agent_id or run_id, or more than one value of one.
            TypeError: the vector store is not ``inferscale``.
            ValueError: ``k`` is negative.
        """
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        given = {key: value for key, value in ids.items() if value is not None}
        asked = dict(filters or {})
        for key, value in given.items():
            if asked.setdefault(key, value) != value:
                raise ScopeError(f"chat() names two values for {key}: {asked[key]!r}, {value!r}")
        if k < 0:
            raise ValueError(f"k is {k}; expected 0 (no memories) or how many to use")
        reader = self._reader(asked, "chat()")
        conversation = _conversation(messages, query)
        options = {"scope": reader, "mode": mode, "tail": tail, **openai_params}

        def ask() -> ChatAnswer | ChatAnswerStream:
            ids: list[str] = []
            if k > 0:
                found = self.search(
                    query, filters=asked, top_k=k, threshold=threshold, rerank=rerank
                )
                ids = [row["id"] for row in reversed(found["results"])]  # best next to the question
            return self._ask(conversation, stream, fact_ids=ids, **options)

        try:
            return ask()
        except NotFound:  # a memory was deleted between the search and the answer
            return ask()

    def messages(
        self,
        query: str,
        results: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        system: str = SYSTEM_PROMPT,
    ) -> list[dict[str, str]]:
        """Messages for a question over ``search`` results, in the format of Mem0's README.

        Send them with `complete`, or through any OpenAI client that names a scope. The memories
        stand best last, each as the line ``- {memory}``; ``system`` is what comes before them.
        """
        return messages_from(query, results, system)

    @overload
    def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> ChatAnswer: ...
    @overload
    def complete(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **options: Any
    ) -> ChatAnswerStream: ...
    def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        mode: Literal["inject", "text"] | None = None,
        tail: int | None = None,
        stream: bool = False,
        **openai_params: Any,
    ) -> ChatAnswer | ChatAnswerStream:
        """Answer messages as they are; the memory lines that they hold are injected.

        The prompt is the one that the app built, word for word. Lines ``- {memory}`` of the
        scope's facts are recognized in it; everything else is prefilled.
        Arguments, result and errors as in `chat`.
        """
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        reader = self._reader(ids, "complete()")
        return self._ask(messages, stream, scope=reader, mode=mode, tail=tail, **openai_params)

    def wait_for_kv(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        timeout: float = 300.0,
    ) -> StatusResponse:
        """Wait until no fact of the scope is waiting for its KV; counts by state.

        Not waited for, but logged: facts whose encoding failed, and those whose KV found no place
        in the arena. They are answered from as text.
        Raises Timeout after ``timeout`` seconds, ScopeError like `chat`.
        """
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        reader = self._reader(ids, "wait_for_kv()")
        end = time.monotonic() + timeout
        while True:
            status = self.core.status(scope=reader)
            waiting = status.facts.get("pending", 0) + status.facts.get("stale", 0)
            if not waiting or not status.queue:
                _warn_of_missing_kv(status, waiting)
                return status
            if time.monotonic() > end:
                raise Timeout(
                    f"{waiting} facts still have no KV after {timeout:.0f} s: {status.facts}; "
                    "they are answered from as text until then"
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Mem0's ``close``, and the core's: one that nobody else uses ends."""
        super().close()
        for part in (self.vector_store, self._entity_store, self.llm, self.embedding_model):
            if part is not None:
                release(part)

    @property
    def _facts(self) -> InferScaleVectorStore:
        if not isinstance(self.vector_store, InferScaleVectorStore):
            raise TypeError(
                "answers from injected KV need the facts in a core: set vector_store to "
                f"{{'provider': 'inferscale'}} (it is {type(self.vector_store).__name__})"
            )
        return self.vector_store

    def _reader(self, filters: Mapping[str, Any], what: str) -> Scope:
        reader, _ = reader_of(_trimmed(filters), self._facts.tenant, what=what)
        return reader

    def _checked(self, filters: Mapping[str, Any] | None, what: str) -> dict[str, str]:
        """The owner that the filters name; {} when they name none, which Mem0 itself refuses."""
        if not any(key in (filters or {}) for key in ID_FIELDS):
            return {}
        reader, _ = reader_of(_trimmed(filters or {}), "any", what=what)
        return {
            key: getattr(reader, name)
            for key, name in ID_FIELDS.items()
            if getattr(reader, name) is not None
        }

    def _ask(
        self, messages: Sequence[Mapping[str, Any]], stream: bool, **options: Any
    ) -> ChatAnswer | ChatAnswerStream:
        if stream:
            return ChatAnswerStream(self.core.chat(messages, stream=True, **options))
        return ChatAnswer(self.core.chat(messages, **options))

    def _remove_memory_from_entity_store(self, memory_id: str, filters: Any) -> None:
        """Mem0 unlinks entities only in a process that has used them; here in every one."""
        if isinstance(self.vector_store, InferScaleVectorStore):
            _ = self.entity_store
        super()._remove_memory_from_entity_store(memory_id, filters)


def _warn_of_missing_kv(status: StatusResponse, evicted: int) -> None:
    if evicted:
        logger.warning(
            "%d facts have no KV, since the arena is full (%s tokens): they are answered from as "
            "text; raise the core's arena_bytes",
            evicted,
            status.arena_tokens,
        )
    failed = status.facts.get("failed", 0)
    if failed:
        logger.warning(
            "the KV of %d facts could not be computed: they are answered from as text where they "
            "fit; get() tells the reason of each",
            failed,
        )


def _deletion(row: Row) -> dict[str, Any]:
    """The entry of Mem0's history for a row that is deleted."""
    return {
        "memory_id": row.id,
        "old_memory": row.payload.get("data", ""),
        "new_memory": None,
        "event": "DELETE",
        "created_at": row.payload.get("created_at"),
        "updated_at": datetime.now(UTC).isoformat(),
        "is_deleted": 1,
        "actor_id": row.payload.get("actor_id"),
        "role": row.payload.get("role"),
    }


def _plain(filters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if filters is None else dict(filters)


def _trimmed(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Filters with their top-level ids as Mem0 trims them before it stores or searches."""
    return {
        key: value.strip() if key in ID_FIELDS and isinstance(value, str) else value
        for key, value in filters.items()
    }


def _of_owner(rows: list[dict[str, Any]], wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    kept = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted.items())]
    if len(kept) < len(rows):
        logger.error(
            "%d memories of another owner were found for %s", len(rows) - len(kept), wanted
        )
    return kept


def _conversation(
    messages: Sequence[Mapping[str, Any]] | None, query: str
) -> list[Mapping[str, Any]]:
    turns = list(messages or [])
    if turns and turns[-1].get("role") == "user" and turns[-1].get("content") == query:
        return turns
    return [*turns, {"role": "user", "content": query}]


def _turns_of(messages: Any) -> list[Turn]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        messages = [messages]
    turns = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and content and message.get("role") != "system":
            role = str(message.get("role") or "user")
            turns.append(Turn(role=role, content=content, name=message.get("name")))
    return turns
