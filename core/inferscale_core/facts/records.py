"""What the fact store takes and gives besides the models of the memory API."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inferscale_core.client.models import Memory, Turn

EVICTED = "evicted"
"""``kv_reason`` of a pending fact that waits for a question to retrieve it."""


OUTGROWN = "outgrown"
"""``kv_reason`` of a ready fact that is encoded again when nothing else waits: since its KV was
computed, so many facts came that it would stand among others."""


class Unset:
    """Type of ``UNSET``: the field of an update stays as it is (``None`` clears it)."""


UNSET = Unset()


def segment_key(line: str) -> str:
    """Name of a line's segment within its namespace: 32 hex digits of the line's sha256."""
    return hashlib.sha256(line.encode("utf-8", "replace")).hexdigest()[:32]


@dataclass(frozen=True)
class Forgotten:
    """What a change took away, committed already.

    The engine must drop ``keys`` and learn ``epochs`` (``protocol.drop_params``) before the
    change is answered. ``keys`` are ``(namespace, segment key)``: lines that no live fact has any
    more, and lines that were encoded behind a text that is gone; the latter, if a live fact has
    them, are in ``stale_keys`` as well. ``epochs`` holds the new epoch of every namespace
    touched, ``stale_ids`` the facts (of the same tenant) to encode again, ``lines`` the lines
    that were deleted or changed.
    """

    keys: list[tuple[str, str]] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)
    stale_ids: list[str] = field(default_factory=list)
    stale_keys: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.keys or self.epochs or self.stale_ids)


@dataclass(frozen=True)
class AddResult:
    """``memories`` in the order given. ``changed``: ids that existed with another text."""

    memories: list[Memory]
    created: list[str]
    changed: list[str]
    forgotten: Forgotten


@dataclass(frozen=True)
class UpdateResult:
    """``line_changed``: the line differs, so the KV of the old one is in ``forgotten``."""

    memory: Memory
    line_changed: bool
    forgotten: Forgotten


@dataclass(frozen=True)
class DeleteResult:
    """``ids``: the facts that were deleted (those unknown are left out)."""

    ids: list[str]
    forgotten: Forgotten


@dataclass(frozen=True)
class Claim:
    """A fact to encode, as it was when claimed; ``attempts`` counts failures so far."""

    memory: Memory
    line_key: str
    turns: list[Turn]
    attempts: int

    @property
    def id(self) -> str:
        return self.memory.id

    @property
    def line(self) -> str:
        return self.memory.line

    @property
    def ns(self) -> str:
        return self.memory.scope.key

    @property
    def segment(self) -> tuple[str, str]:
        return self.ns, self.line_key


@dataclass(frozen=True)
class VectorBatch:
    """Embeddings in order of arrival; ``owners`` are ``(tenant, user, agent, run)``.

    ``vectors`` is float32 ``[n, dim]``.
    """

    ids: list[str]
    owners: list[tuple[str, str | None, str | None, str | None]]
    collections: list[str]
    vectors: NDArray[np.float32]
