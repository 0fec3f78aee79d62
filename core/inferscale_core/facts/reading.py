"""Reading facts, always within a scope or a tenant."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, select, true

from inferscale_core.client.models import Memory
from inferscale_core.facts.database import Database, clean
from inferscale_core.facts.errors import FactError
from inferscale_core.facts.filters import Filters, compile_filters
from inferscale_core.facts.rows import chunks, memory_of, owned_within
from inferscale_core.facts.schema import facts
from inferscale_core.facts.scope import Scope


def in_collection(collection: str | None) -> ColumnElement[bool]:
    return true() if collection is None else facts.c.collection == clean(collection)


def seen_by(scope: Scope | None) -> ColumnElement[bool]:
    """Condition: the reader, if there is one, sees the fact."""
    return true() if scope is None else owned_within(scope)


def named(tenant: str, ids: Sequence[str]) -> ColumnElement[bool]:
    return and_(facts.c.tenant == clean(tenant), facts.c.id.in_([clean(i) for i in ids]))


def rows_by_id(
    conn: Connection,
    tenant: str,
    ids: Sequence[str],
    condition: ColumnElement[bool] | None = None,
) -> dict[str, Row[Any]]:
    found: dict[str, Row[Any]] = {}
    for chunk in chunks(ids):
        query = select(facts).where(named(tenant, chunk))
        if condition is not None:
            query = query.where(condition)
        found.update((row.id, row) for row in conn.execute(query))
    return found


def _within(
    scope: Scope | None,
    tenant: str | None,
    collection: str | None,
    filters: Filters | None,
) -> ColumnElement[bool]:
    if scope is None and tenant is None:
        raise FactError("name a scope or a tenant: nothing reads across tenants")
    owner = owned_within(scope) if scope is not None else true()
    if tenant is not None:
        owner = and_(owner, facts.c.tenant == clean(tenant))
    return and_(owner, in_collection(collection), compile_filters(filters))


class Reading:
    """The part of the fact store that answers questions about facts."""

    _db: Database

    def get(self, fact_id: str, tenant: str, *, scope: Scope | None = None) -> Memory | None:
        """A fact of the tenant; with ``scope``, only if that reader sees it."""
        found = self.get_many([fact_id], tenant, scope=scope)
        return found[0] if found else None

    def get_many(
        self, ids: Sequence[str], tenant: str, *, scope: Scope | None = None
    ) -> list[Memory]:
        """Facts in the order of ``ids``; those unknown or not seen by ``scope`` are left out."""
        with self._db.read() as conn:
            rows = rows_by_id(conn, clean(tenant), ids, seen_by(scope))
        return [memory_of(rows[i]) for i in map(clean, ids) if i in rows]

    def preceding(self, memory: Memory, count: int) -> list[Memory]:
        """Facts of the collection stored before one, latest first, that its owner scope sees."""
        owner = memory.scope
        arrival = select(facts.c.seq).where(named(owner.tenant, [memory.id])).scalar_subquery()
        query = (
            select(facts)
            .where(owned_within(owner), in_collection(memory.collection), facts.c.seq < arrival)
            .order_by(facts.c.seq.desc())
            .limit(max(count, 0))
        )
        with self._db.read() as conn:
            return [memory_of(row) for row in conn.execute(query)]

    def matching_ids(
        self,
        scope: Scope | None = None,
        *,
        tenant: str | None = None,
        collection: str | None = None,
        filters: Filters | None = None,
    ) -> set[str]:
        """Ids of all facts that ``list`` would give: ``allowed_ids`` of an index search."""
        where = _within(scope, tenant, collection, filters)
        with self._db.read() as conn:
            return set(conn.scalars(select(facts.c.id).where(where)))

    def list(
        self,
        scope: Scope | None = None,
        *,
        tenant: str | None = None,
        collection: str | None = None,
        filters: Filters | None = None,
        limit: int | None = 100,
        offset: int = 0,
    ) -> tuple[list[Memory], int]:
        """Facts in order of arrival that a reader sees (or all of a tenant), and how many there
        are without ``limit`` and ``offset``. Raises FilterError."""
        where = _within(scope, tenant, collection, filters)
        query = select(facts).where(where).order_by(facts.c.seq).limit(limit).offset(offset)
        with self._db.read() as conn:
            total = conn.scalar(select(func.count()).select_from(facts).where(where)) or 0
            return [memory_of(row) for row in conn.execute(query)], total
