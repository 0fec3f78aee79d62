"""Models of the memory API, shared by the client, the routes and the adapters."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from inferscale_core.facts.scope import Scope

__all__ = [
    "AddRequest", "AddResponse", "ChatMemory", "EmbedRequest", "EmbedResponse", "FactReport",
    "KVState", "Memory", "MemoryIn", "MemoryList", "MemoryReport", "Scope", "SearchRequest",
    "StatusResponse", "Turn", "UpdateRequest",
]  # fmt: skip

KVState = Literal["pending", "ready", "stale", "failed", "none"]
"""``none``: a row that is stored and searched but never gets KV (``encode=False``)."""

MAX_TEXT_CHARS = 100_000

UNNAMEABLE = frozenset({".", "..", "status"})
"""No URL of the API can name a fact with one of these ids: a client that tidies up the path of
``DELETE /v1/memories/.`` would delete all facts of the scope."""


class Turn(BaseModel):
    """One turn of the conversation a fact came from."""

    role: str = "user"
    content: str
    name: str | None = None


class MemoryIn(BaseModel):
    """A fact to store. ``id`` makes the call idempotent; without it one is made (UUID)."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1, max_length=MAX_TEXT_CHARS)
    id: str | None = Field(default=None, min_length=1, max_length=256)
    metadata: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime | None = None
    valid_at: datetime | None = Field(
        default=None, description="when given, the date is in the line"
    )
    invalid_at: datetime | None = None
    turns: list[Turn] = Field(default_factory=list)
    encode: bool = True

    @field_validator("id")
    @classmethod
    def _can_be_named(cls, value: str | None) -> str | None:
        if value is not None and (value in UNNAMEABLE or any(c < " " for c in value)):
            raise ValueError(
                f"{value!r} cannot be the id of a fact: an id holds no control characters and is "
                f"none of {', '.join(sorted(UNNAMEABLE))}"
            )
        return value


class Memory(BaseModel):
    """A stored fact, with ``score`` (cosine similarity, higher is closer) in search results."""

    id: str
    scope: Scope
    collection: str = "memories"
    text: str
    line: str
    hash: str = Field(description="md5 of text, hex")
    metadata: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime
    updated_at: datetime
    valid_at: datetime | None = None
    invalid_at: datetime | None = None
    kv_state: KVState
    kv_reason: str | None = None
    score: float | None = None


class AddRequest(BaseModel):
    """``POST /v1/memories``. ``wait``: seconds to wait for the KV (0 returns at once)."""

    scope: Scope
    memories: list[MemoryIn] = Field(min_length=1, max_length=10_000)
    collection: str = "memories"
    wait: float = Field(default=0, ge=0, le=3600)


class AddResponse(BaseModel):
    memories: list[Memory]


class MemoryList(BaseModel):
    memories: list[Memory]
    total: int | None = None


class SearchRequest(BaseModel):
    """``POST /v1/memories/search``; ``filters`` are over metadata (Mem0's operators)."""

    scope: Scope
    query: str
    k: int = Field(default=10, ge=0, le=10_000)
    filters: dict[str, Any] | None = None
    min_score: float | None = None
    collection: str = "memories"


class UpdateRequest(BaseModel):
    """``PATCH /v1/memories/{id}``; a field left out stays as it is."""

    tenant: str = "default"
    scope: Scope | None = None
    text: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT_CHARS)
    metadata: dict[str, Any] | None = None
    valid_at: datetime | None = None
    invalid_at: datetime | None = None


class EmbedRequest(BaseModel):
    texts: list[str] = Field(max_length=4096)


class EmbedResponse(BaseModel):
    model: str
    dimension: int
    embeddings: list[list[float]]


class ChatMemory(BaseModel):
    """The ``inferscale`` field of a chat completion request.

    Facts are either named (``fact_ids``, in prompt order, best last) or searched (``query``,
    default: the last user message, with ``k``). Without both, the prompt is taken as it is and
    lines that it already holds are injected.
    """

    model_config = ConfigDict(extra="forbid")

    scope: Scope
    k: int | None = Field(default=None, ge=0, le=10_000)
    query: str | None = None
    fact_ids: list[str] | None = None
    filters: dict[str, Any] | None = None
    min_score: float | None = None
    mode: Literal["inject", "text"] = "inject"
    tail: int | None = Field(default=None, ge=0)


class FactReport(BaseModel):
    """What became of one fact of the prompt. ``reason`` says why it was not injected."""

    id: str
    text: str
    tokens: int
    injected: bool
    reason: str | None = None


class MemoryReport(BaseModel):
    """The ``inferscale`` field of an answer; counts are tokens, times milliseconds."""

    prompt_tokens: int = 0
    memory_tokens: int = 0
    injected_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    reason: str | None = None
    match_ms: float | None = None
    write_ms: float | None = None
    bytes: int | None = None
    facts: list[FactReport] = Field(default_factory=list)


class StatusResponse(BaseModel):
    """``GET /v1/memories/status``: facts by KV state, and the arena's fill.

    ``queue`` facts wait for their KV; ``outgrown`` ones have KV that will be computed again,
    among more facts, when the engine has nothing better to do.
    """

    facts: dict[str, int]
    queue: int
    outgrown: int = 0
    arena_tokens: int | None = None
    arena_tokens_used: int | None = None
    segments: int | None = None
    evictions: int | None = None
    model: str | None = None
    embedder: str | None = None
    max_model_len: int | None = None
