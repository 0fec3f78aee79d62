"""The durable facts of a core: text is the truth, KV states say what is computed for it.

One core has the file open at a time; any thread may call any method. What a method returns is
committed. ``Memory.score`` is not set here.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from inferscale_core.client.models import MemoryIn
from inferscale_core.facts.database import Database, clean
from inferscale_core.facts.errors import FactError, FilterError, IdConflictError, StoreError
from inferscale_core.facts.forgetting import ensure_namespace, forget, ready_segments
from inferscale_core.facts.kv_states import KVStates
from inferscale_core.facts.reading import Reading, in_collection, named, rows_by_id, seen_by
from inferscale_core.facts.records import (
    EVICTED,
    UNSET,
    AddResult,
    Claim,
    DeleteResult,
    Forgotten,
    Unset,
    UpdateResult,
    VectorBatch,
    segment_key,
)
from inferscale_core.facts.rows import (
    LineFormat,
    chunks,
    clean_scope,
    item_values,
    memory_of,
    owned_within,
    render_line,
    to_json,
)
from inferscale_core.facts.schema import RESET_KV, as_utc, doomed, embeddings, facts, settings
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.vectors import Vectors, as_rows, put_vectors

__all__ = [
    "EVICTED", "UNSET", "AddResult", "Claim", "DeleteResult", "FactError", "FactStore",
    "FilterError", "Forgotten", "IdConflictError", "StoreError", "UpdateResult", "VectorBatch",
    "render_line", "segment_key",
]  # fmt: skip

DEFAULT_COLLECTION = "memories"


class FactStore(Reading, KVStates, Vectors):
    """Facts, their embeddings, KV states and namespaces' epochs in one SQLite file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        line_format: str = "- {text}\n",
        dated_line_format: str = "- {date}: {text}\n",
        busy_timeout: float = 10.0,
    ) -> None:
        """Open the file, or make it; bring an older one up to date; forget all KV.

        Lines are rendered again when the formats differ from those the file was written with.
        ``busy_timeout``: seconds to wait for another program that writes to the file.
        Raises StoreError when it cannot be used, FactError for a format without its fields.
        """
        KVStates.__init__(self)
        self._lines = LineFormat(line_format, dated_line_format)
        self._db = Database(path, busy_timeout=busy_timeout)
        try:
            self._render_again()
            self.reset_kv()
        except BaseException:
            self._db.close()
            raise

    @property
    def path(self) -> str:
        return str(self._db.path)

    def close(self) -> None:
        """Let another core open the file. May be called again; other methods fail from now on."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def add(
        self,
        scope: Scope,
        items: Sequence[MemoryIn],
        vectors: NDArray[np.float32] | None = None,
        collection: str = DEFAULT_COLLECTION,
    ) -> AddResult:
        """Store facts owned by ``scope``, all or none; ``vectors`` is float32 ``[n, dim]``.

        Idempotent by id: the same id with the same text gives the row as it is; with another
        text it is replaced, and ``forgotten`` says what the engine must drop. A new fact whose
        line has KV in its namespace already is ready at once. Raises IdConflictError when an id is
        another scope's or collection's within the tenant or stands twice with two texts,
        FactError for metadata that is not JSON.
        """
        scope, collection = clean_scope(scope), clean(collection)
        rows = None if vectors is None else as_rows(vectors, len(items))
        now = datetime.now(UTC)
        wanted: dict[str, dict[str, Any]] = {}
        position: dict[str, int] = {}
        order: list[str] = []
        for index, item in enumerate(items):
            fact_id = clean(item.id) if item.id is not None else str(uuid.uuid4())
            values = item_values(item, self._lines, now)
            if wanted.setdefault(fact_id, values)["text"] != values["text"]:
                raise IdConflictError(f"the id {fact_id!r} stands twice in one call with two texts")
            position.setdefault(fact_id, index)
            order.append(fact_id)
        owner = {**scope.model_dump(), "ns": scope.key, "collection": collection}
        with self._db.write() as conn:
            ensure_namespace(conn, scope)
            known = rows_by_id(conn, scope.tenant, list(wanted))
            changed: dict[str, int] = {}
            for fact_id, row in known.items():
                if row.ns != owner["ns"] or row.collection != collection:
                    raise IdConflictError(
                        f"the id {fact_id!r} belongs to another scope or collection of this "
                        "tenant; choose another id, or delete that fact first"
                    )
                if row.text != wanted[fact_id]["text"]:
                    changed[fact_id] = row.seq
            created = [fact_id for fact_id in wanted if fact_id not in known]
            forgotten = self._replace(conn, {s: wanted[i] for i, s in changed.items()})
            if created:
                self._insert(conn, [{**wanted[i], **owner, "id": i} for i in created])
            stored = rows_by_id(conn, scope.tenant, list(wanted))
            if rows is not None:
                # An unchanged fact takes a vector too: it may have been stored without one.
                seqs = [stored[fact_id].seq for fact_id in wanted]
                put_vectors(conn, seqs, rows[[position[fact_id] for fact_id in wanted]])
        if changed:
            self._db.scrub()
        by_id = {fact_id: memory_of(row) for fact_id, row in stored.items()}
        return AddResult([by_id[i] for i in order], created, list(changed), forgotten)

    def update(
        self,
        fact_id: str,
        tenant: str,
        *,
        scope: Scope | None = None,
        text: str | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
        valid_at: datetime | Unset | None = UNSET,
        invalid_at: datetime | Unset | None = UNSET,
        vector: NDArray[np.float32] | None = None,
    ) -> UpdateResult | None:
        """Change a fact; fields left out stay, ``metadata`` is replaced whole.

        None when the tenant has no such fact, or the reader ``scope`` does not see it. A line
        that differs (new text, or a new date in it) takes its KV away; without ``vector``, a new
        text also takes the embedding away. Raises FactError.
        """
        given: dict[str, Any] = {"updated_at": datetime.now(UTC)}
        if not isinstance(metadata, Unset):
            given["metadata"] = to_json(metadata, "metadata")
        for name, moment in (("valid_at", valid_at), ("invalid_at", invalid_at)):
            if not isinstance(moment, Unset):
                given[name] = None if moment is None else as_utc(moment)
        with self._db.write() as conn:
            row = conn.execute(
                select(facts).where(named(tenant, [fact_id]), seen_by(scope))
            ).one_or_none()
            if row is None:
                return None
            new_text = row.text if isinstance(text, Unset) else clean(text)
            if not new_text:
                raise FactError("the text of a fact may not be empty; delete the fact instead")
            lines = self._lines.values(new_text, given.get("valid_at", row.valid_at))
            line_changed = lines["line"] != row.line
            if line_changed or new_text != row.text:
                state = "pending" if row.encode else "none"
                values = {**given, **lines, **RESET_KV, "kv_state": state}
                forgotten = self._replace(
                    conn, {row.seq: values}, drop_vectors=new_text != row.text
                )
            else:
                conn.execute(update(facts).where(facts.c.seq == row.seq).values(**given))
                forgotten = Forgotten()
            if vector is not None:
                put_vectors(conn, [row.seq], as_rows(vector, 1))
            stored = conn.execute(select(facts).where(facts.c.seq == row.seq)).one()
        self._db.scrub()
        return UpdateResult(memory_of(stored), line_changed, forgotten)

    def delete(
        self, ids: Sequence[str], tenant: str, *, scope: Scope | None = None
    ) -> DeleteResult:
        """Delete facts of a tenant by id: those among them that the reader ``scope`` sees."""
        return self._delete([and_(named(tenant, c), seen_by(scope)) for c in chunks(ids)])

    def delete_scope(self, scope: Scope, collection: str | None = None) -> DeleteResult:
        """Delete all facts that the reader sees, in one collection or in all."""
        return self._delete([and_(owned_within(scope), in_collection(collection))])

    def delete_collection(self, collection: str, tenant: str) -> DeleteResult:
        """Delete all facts of a tenant's collection."""
        return self._delete([and_(facts.c.tenant == clean(tenant), in_collection(collection))])

    # Inside

    def _insert(self, conn: Connection, rows: Sequence[dict[str, Any]]) -> None:
        encoded = {(row["ns"], row["line_key"]) for row in rows if row["encode"]}
        ready = ready_segments(conn, encoded)
        for row in rows:
            if row["encode"] and (row["ns"], row["line_key"]) in ready:
                row["kv_state"] = "ready"
        conn.execute(insert(facts), rows)

    def _replace(
        self,
        conn: Connection,
        values_by_seq: Mapping[int, Mapping[str, Any]],
        drop_vectors: bool = True,
    ) -> Forgotten:
        """Give facts other lines, and with them other KV states."""
        if not values_by_seq:
            return Forgotten()

        def change() -> None:
            for seq, values in values_by_seq.items():
                conn.execute(update(facts).where(facts.c.seq == seq).values(**values))
                if drop_vectors:
                    conn.execute(delete(embeddings).where(embeddings.c.seq == seq))

        conn.execute(delete(doomed))
        conn.execute(insert(doomed), [{"seq": seq} for seq in values_by_seq])
        forgotten = forget(conn, change)
        for seq in values_by_seq:
            row = conn.execute(select(facts).where(facts.c.seq == seq)).one()
            if row.encode and ready_segments(conn, [(row.ns, row.line_key)]):
                conn.execute(update(facts).where(facts.c.seq == seq).values(kv_state="ready"))
        return forgotten

    def _delete(self, conditions: Sequence[ColumnElement[bool]]) -> DeleteResult:
        with self._db.write() as conn:
            conn.execute(delete(doomed))
            for condition in conditions:
                listed = select(facts.c.seq).where(condition)
                conn.execute(insert(doomed).prefix_with("OR IGNORE").from_select(["seq"], listed))
            listed = select(doomed.c.seq)
            ids = conn.scalars(
                select(facts.c.id).where(facts.c.seq.in_(listed)).order_by(facts.c.seq)
            )
            deleted = list(ids)
            if not deleted:
                return DeleteResult([], Forgotten())

            def remove() -> None:
                conn.execute(delete(facts).where(facts.c.seq.in_(listed)))

            forgotten = forget(conn, remove)
        self._db.scrub()
        return DeleteResult(deleted, forgotten)

    def _render_again(self) -> None:
        formats = {
            "line_format": self._lines.line_format,
            "dated_line_format": self._lines.dated_line_format,
        }
        with self._db.write() as conn:
            query = select(settings.c.name, settings.c.value).where(settings.c.name.in_(formats))
            known = dict(conn.execute(query).all())
            if known == formats:
                return
            if known:
                rows = conn.execute(select(facts.c.seq, facts.c.text, facts.c.valid_at)).all()
                for row in rows:
                    lines = self._lines.values(row.text, row.valid_at)
                    conn.execute(update(facts).where(facts.c.seq == row.seq).values(**lines))
            for name, value in formats.items():
                statement = sqlite_insert(settings).values(name=name, value=value)
                conn.execute(
                    statement.on_conflict_do_update(index_elements=["name"], set_={"value": value})
                )
