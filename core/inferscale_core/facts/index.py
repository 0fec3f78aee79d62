"""Exact nearest neighbours over the embeddings of facts, on one device."""

import threading
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferscale_core.facts.records import VectorBatch
from inferscale_core.facts.scope import Scope

Owner = tuple[str, str | None, str | None, str | None]
Hits = list[tuple[str, float]]

DEFAULT_COLLECTION = "memories"

_FIRST_CAPACITY = 256
_SCORES_AT_ONCE = 1 << 24
_REFINED_AT_ONCE = 1 << 14

# A float32 product is off by about 1e-6, one in TF32 (if the process allows it) by 1e-3: all that
# come this close to the k-th score are scored again in float64.
_MARGIN = 2e-3


class HasVectors(Protocol):
    """What ``load`` reads from: the fact store."""

    def iter_vectors(self, dimension: int) -> Iterable[VectorBatch]: ...


class _Shard:
    """Rows of one tenant's collection, in order of arrival.

    ``vectors`` float32 ``[capacity, dim]`` of unit length; ``codes`` int64 ``[capacity, 3]`` for
    user, agent and run (0: not set); ``live`` bool ``[capacity]``, false for removed rows.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self.dim = dim
        self.device = device
        self.size = 0
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        self.vectors = torch.zeros(capacity, self.dim, device=self.device)
        self.codes = torch.zeros(capacity, 3, dtype=torch.int64, device=self.device)
        self.live = torch.zeros(capacity, dtype=torch.bool, device=self.device)

    def _move(self, kept: Tensor | slice, capacity: int) -> None:
        vectors, codes, live = self.vectors[kept], self.codes[kept], self.live[kept]
        self._allocate(capacity)
        self.vectors[: len(live)], self.codes[: len(live)] = vectors, codes
        self.live[: len(live)] = live

    def put(self, ids: Sequence[str], codes: Tensor, vectors: Tensor) -> None:
        """Rows for ids, each once; a known id keeps its place."""
        rows = []
        for fact_id in ids:
            row = self.row_of.get(fact_id)
            if row is None:
                row = len(self.ids)
                self.ids.append(fact_id)
                self.row_of[fact_id] = row
            rows.append(row)
        if len(self.ids) > len(self.live):
            self._move(slice(0, self.size), max(2 * len(self.live), len(self.ids)))
        self.size = len(self.ids)
        at = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.vectors[at] = vectors
        self.codes[at] = codes
        self.live[at] = True

    def drop(self, ids: Iterable[str]) -> None:
        rows = [row for row in (self.row_of.pop(i, None) for i in ids) if row is not None]
        if not rows:
            return
        at = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.live[at] = False
        self.vectors[at] = 0
        if self.size > _FIRST_CAPACITY and len(self.row_of) < self.size // 2:
            kept = self.live[: self.size].nonzero().squeeze(1)
            self.ids = [self.ids[row] for row in kept.tolist()]
            self.row_of = {fact_id: row for row, fact_id in enumerate(self.ids)}
            self._move(kept, max(_FIRST_CAPACITY, 2 * len(self.ids)))
            self.size = len(self.ids)

    def rows(self, ids: Collection[str]) -> Tensor:
        """Rows of those of the ids that are here, int64 ``[n]``."""
        found = np.fromiter(map(self.row_of.get, ids, repeat(-1)), np.int64, len(ids))
        return torch.from_numpy(found[found >= 0]).to(self.device)


class EmbeddingIndex:
    """Embeddings of one dimension, kept apart per tenant and collection.

    Any thread may call any method; calls take turns.
    """

    def __init__(self, dim: int, device: str | torch.device = "cpu") -> None:
        self.dim = dim
        self.device = torch.device(device)
        self._lock = threading.Lock()
        self._shards: dict[tuple[str, str], _Shard] = {}
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(len(shard.row_of) for shard in self._shards.values())

    def load(self, store: HasVectors) -> int:
        """Replace everything by the store's embeddings of this dimension; returns how many."""
        with self._lock:
            self._shards.clear()
            self._codes.clear()
            count = 0
            for batch in store.iter_vectors(self.dim):
                self._put(batch.ids, batch.owners, batch.vectors, batch.collections)
                count += len(batch.ids)
            return count

    def upsert(
        self,
        ids: Sequence[str],
        scopes: Sequence[Scope],
        vectors: NDArray[np.float32],
        collection: str = DEFAULT_COLLECTION,
    ) -> None:
        """Add facts or replace their vectors, float32 ``[n, dim]`` of any length but zero.

        Raises ValueError for another shape or values that are not finite.
        """
        owners: list[Owner] = [(s.tenant, s.user, s.agent, s.run) for s in scopes]
        if len(owners) != len(ids):
            raise ValueError(f"{len(ids)} ids need as many scopes, not {len(owners)}")
        with self._lock:
            self._put(ids, owners, vectors, [collection] * len(ids))

    def remove(self, ids: Collection[str], tenant: str) -> None:
        """Forget facts of a tenant in all collections; unknown ids are passed over."""
        with self._lock:
            for (owner, _), shard in self._shards.items():
                if owner == tenant:
                    shard.drop(ids)

    def search(
        self,
        scope: Scope,
        vectors: NDArray[np.float32],
        k: int,
        *,
        collection: str = DEFAULT_COLLECTION,
        allowed_ids: Collection[str] | None = None,
        exclude_ids: Collection[str] = (),
        before_id: str | None = None,
    ) -> list[Hits]:
        """The ``k`` most similar facts that the reader sees, per query, best first.

        ``vectors`` is ``[q, dim]`` or ``[dim]``. Each hit is ``(id, cosine similarity)``; equal
        ones come in order of arrival, fewer than ``k`` when there are no more. ``allowed_ids``
        narrows to these facts, ``exclude_ids`` leaves some out, ``before_id`` narrows to facts
        that arrived before that one. Raises ValueError as ``upsert`` does.
        """
        queries = self._tensor(vectors)
        nothing: list[Hits] = [[] for _ in range(len(queries))]
        with self._lock:
            shard = self._shards.get((scope.tenant, collection))
            if shard is None or k <= 0 or not shard.row_of:
                return nothing
            size = shard.size
            mask = shard.live[:size].clone()
            for position, value in enumerate((scope.user, scope.agent, scope.run)):
                if value is not None:
                    mask &= shard.codes[:size, position] == self._codes.get(value, -1)
            if allowed_ids is not None:
                allowed = torch.zeros_like(mask)
                allowed[shard.rows(allowed_ids)] = True
                mask &= allowed
            if exclude_ids:
                mask[shard.rows(exclude_ids)] = False
            if before_id is not None:
                mask[shard.row_of.get(before_id, size) :] = False
            rows = mask.nonzero().squeeze(1)
            if not len(rows):
                return nothing
            keys = shard.vectors[:size] if len(rows) == size else shard.vectors[rows]
            step = max(1, _SCORES_AT_ONCE // len(rows))
            hits: list[Hits] = []
            for some in queries.split(step):
                scores = some @ keys.T
                for query, row_scores in zip(some, scores, strict=True):
                    best, exact = _best(query, keys, row_scores, k)
                    ids = [shard.ids[row] for row in rows[best].tolist()]
                    hits.append(list(zip(ids, exact.tolist(), strict=True)))
            return hits

    def _put(
        self,
        ids: Sequence[str],
        owners: Sequence[Owner],
        vectors: NDArray[np.float32],
        collections: Sequence[str],
    ) -> None:
        if not ids:
            return
        values = self._tensor(vectors)
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} ids need vectors [{len(ids)}, {self.dim}]")
        last: dict[tuple[str, str], dict[str, int]] = {}
        for position, (fact_id, owner, name) in enumerate(
            zip(ids, owners, collections, strict=True)
        ):
            last.setdefault((owner[0], name), {})[fact_id] = position
        for place, positions in last.items():
            shard = self._shards.get(place)
            if shard is None:
                shard = self._shards[place] = _Shard(self.dim, self.device)
            codes = torch.tensor(
                [[self._code(name) for name in owners[at][1:]] for at in positions.values()]
            )
            chosen = values[torch.tensor(list(positions.values()), device=self.device)]
            shard.put(list(positions), codes.to(self.device), chosen)

    def _code(self, name: str | None) -> int:
        return 0 if name is None else self._codes.setdefault(name, len(self._codes) + 1)

    def _tensor(self, vectors: NDArray[np.float32]) -> Tensor:
        """Unit rows on the device, float32 ``[n, dim]``."""
        array = np.array(vectors, dtype=np.float32, ndmin=2)
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise ValueError(
                f"the index holds vectors of dimension {self.dim} and these have shape "
                f"{array.shape}; use the embedder that the store was built with"
            )
        if not np.isfinite(array).all():
            raise ValueError("a vector holds a value that is not a finite number")
        tensor = torch.from_numpy(array).to(self.device)
        return torch.nn.functional.normalize(tensor, dim=1)


def _best(query: Tensor, keys: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions and exact cosines of the ``k`` best of ``scores`` ``[n]``, ties by position.

    A matrix product may round equal rows differently, depending on where they lie: those that
    can be among the best are scored again in float64, each row by itself.
    """
    k = min(k, len(scores))
    threshold = scores.topk(k).values[-1] - _MARGIN
    near = (scores >= threshold).nonzero().squeeze(1)
    wide = query.double()
    exact = torch.cat(
        [
            torch.nn.functional.cosine_similarity(keys[some].double(), wide[None], dim=1)
            for some in near.split(_REFINED_AT_ONCE)
        ]
    )
    order = (-exact.round(decimals=12)).argsort(stable=True)[:k]
    return near[order], exact[order]
