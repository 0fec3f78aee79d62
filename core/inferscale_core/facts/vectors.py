"""Embeddings in the fact store."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from inferscale_core.client.models import Memory
from inferscale_core.facts.database import Database
from inferscale_core.facts.errors import FactError
from inferscale_core.facts.records import VectorBatch
from inferscale_core.facts.rows import chunks, memory_of
from inferscale_core.facts.schema import embeddings, facts, settings

_EMBEDDER = "embedder"


def as_rows(vectors: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The vectors as float32 ``[count, dim]``. Raises FactError."""
    rows = np.asarray(vectors, dtype="<f4")
    if rows.ndim == 1 and count == 1:
        rows = rows[None]
    if rows.ndim != 2 or len(rows) != count:
        raise FactError(f"{count} facts need vectors of shape [{count}, dim], not {rows.shape}")
    if not np.isfinite(rows).all():
        raise FactError("an embedding holds a value that is not a finite number")
    return rows


def put_vectors(conn: Connection, seqs: Sequence[int], vectors: NDArray[np.float32]) -> None:
    """Store one vector per fact, in place of the one it has."""
    if not seqs:
        return
    statement = sqlite_insert(embeddings)
    statement = statement.on_conflict_do_update(
        index_elements=["seq"], set_={"vector": statement.excluded.vector}
    )
    rows = [{"seq": seq, "vector": row.tobytes()} for seq, row in zip(seqs, vectors, strict=True)]
    conn.execute(statement, rows)


class Vectors:
    """The part of the fact store that the index and the embedder use."""

    _db: Database

    def use_embedder(self, name: str, dimension: int) -> bool:
        """Record the model that embeds facts; vectors of another model are deleted.

        True when they were: embed the facts of ``facts_without_vector`` again then.
        """
        value = f"{dimension} {name}"
        with self._db.write() as conn:
            known = conn.scalar(select(settings.c.value).where(settings.c.name == _EMBEDDER))
            if known == value:
                return False
            removed = conn.execute(delete(embeddings)).rowcount
            statement = sqlite_insert(settings).values(name=_EMBEDDER, value=value)
            conn.execute(
                statement.on_conflict_do_update(index_elements=["name"], set_={"value": value})
            )
        return removed > 0

    def facts_without_vector(self, limit: int = 256) -> list[Memory]:
        """Facts that no search can find yet, oldest first."""
        query = (
            select(facts)
            .outerjoin(embeddings, embeddings.c.seq == facts.c.seq)
            .where(embeddings.c.seq.is_(None))
            .order_by(facts.c.seq)
            .limit(limit)
        )
        with self._db.read() as conn:
            return [memory_of(row) for row in conn.execute(query)]

    def set_vectors(self, memories: Sequence[Memory], vectors: NDArray[np.float32]) -> list[Memory]:
        """Store float32 ``[n, dim]`` embeddings; returns the facts that took theirs.

        A fact that was deleted, or whose text changed since it was read, is left out.
        """
        rows = as_rows(vectors, len(memories))
        taken: list[int] = []
        seqs: list[int] = []
        with self._db.write() as conn:
            for position, memory in enumerate(memories):
                seq = conn.scalar(
                    select(facts.c.seq).where(
                        facts.c.tenant == memory.scope.tenant,
                        facts.c.id == memory.id,
                        facts.c.text == memory.text,
                    )
                )
                if seq is not None:
                    taken.append(position)
                    seqs.append(seq)
            put_vectors(conn, seqs, rows[taken])
        return [memories[position] for position in taken]

    def get_vectors(self, tenant: str, ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Embeddings, float32 ``[dim]``, of those of the facts that have one."""
        found: dict[str, NDArray[np.float32]] = {}
        with self._db.read() as conn:
            for chunk in chunks(ids):
                query = (
                    select(facts.c.id, embeddings.c.vector)
                    .join(embeddings, embeddings.c.seq == facts.c.seq)
                    .where(facts.c.tenant == tenant, facts.c.id.in_(chunk))
                )
                for fact_id, blob in conn.execute(query):
                    found[fact_id] = np.frombuffer(blob, dtype="<f4")
        return found

    def iter_vectors(self, dimension: int, batch: int = 8192) -> Iterator[VectorBatch]:
        """All embeddings of ``dimension``, in order of arrival, ``batch`` at a time."""
        owner = (facts.c.tenant, facts.c.user, facts.c.agent, facts.c.run)
        query = (
            select(facts.c.id, *owner, facts.c.collection, embeddings.c.vector)
            .join(facts, facts.c.seq == embeddings.c.seq)
            .where(func.length(embeddings.c.vector) == 4 * dimension)
            .order_by(embeddings.c.seq)
            .execution_options(yield_per=batch)
        )
        with self._db.read() as conn:
            for rows in conn.execute(query).partitions():
                ids, tenants, users, agents, runs, collections, blobs = zip(*rows, strict=True)
                yield VectorBatch(
                    ids=list(ids),
                    owners=list(zip(tenants, users, agents, runs, strict=True)),
                    collections=list(collections),
                    vectors=np.frombuffer(b"".join(blobs), dtype="<f4").reshape(-1, dimension),
                )
