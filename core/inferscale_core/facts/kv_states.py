"""KV states of facts: the durable queue of what to encode, and what a change makes stale."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from inferscale_core.facts.database import Database
from inferscale_core.facts.records import EVICTED, Claim, Forgotten, segment_key
from inferscale_core.facts.rows import chunks, memory_of, owned_within, turns_of
from inferscale_core.facts.schema import behind, doomed, facts, namespaces
from inferscale_core.facts.scope import Scope

Segment = tuple[str, str]
"""``(namespace, segment key)``."""

_RESET = {"kv_reason": None, "kv_attempts": 0, "kv_not_before": None}
_SEGMENT = tuple_(facts.c.ns, facts.c.line_key)


def forget(conn: Connection, change: Callable[[], None]) -> Forgotten:
    """Make a change to the facts listed in ``doomed`` and work out what it takes away.

    ``change`` deletes the facts or gives them other lines. Within the caller's transaction:
    segments encoded behind one of them go stale, the epochs of all namespaces touched advance.
    """
    listed = select(doomed.c.seq)
    owned = _segments(
        conn, select(facts.c.ns, facts.c.line_key).where(facts.c.seq.in_(listed)).distinct()
    )
    lines = conn.scalars(select(facts.c.line).where(facts.c.seq.in_(listed)).distinct()).all()
    dependent = _segments(
        conn,
        select(behind.c.ns, behind.c.line_key).where(behind.c.behind_seq.in_(listed)).distinct(),
    )
    change()
    alive: set[Segment] = set()
    for within in _conditions(owned | dependent):
        found = select(facts.c.ns, facts.c.line_key).where(within(facts), facts.c.encode.is_(True))
        alive |= _segments(conn, found.distinct())
    gone = owned - alive
    stale_ids: list[str] = []
    for within in _conditions(dependent & alive):
        rows = conn.execute(
            update(facts)
            .where(within(facts), facts.c.kv_state == "ready")
            .values(**{**_RESET, "kv_state": "stale", "kv_reason": "a text before it is gone"})
            .returning(facts.c.id)
        )
        stale_ids.extend(rows.scalars())
    for within in _conditions(gone | dependent):
        conn.execute(delete(behind).where(within(behind)))
    conn.execute(delete(behind).where(behind.c.behind_seq.in_(listed)))
    epochs = advance_epochs(conn, {ns for ns, _ in owned | dependent})
    return Forgotten(
        keys=sorted(gone | dependent),
        epochs=epochs,
        stale_ids=stale_ids,
        stale_keys=sorted(dependent - gone),
        lines=sorted(lines),
    )


def advance_epochs(conn: Connection, spaces: Iterable[str]) -> dict[str, int]:
    """Put questions out of reach of what vLLM has cached for the namespaces; the new epochs."""
    epochs: dict[str, int] = {}
    for some in chunks(sorted(spaces)):
        advanced = (
            update(namespaces)
            .where(namespaces.c.ns.in_(some))
            .values(epoch=namespaces.c.epoch + 1)
            .returning(namespaces.c.ns, namespaces.c.epoch)
        )
        epochs.update(dict(conn.execute(advanced).all()))
    return epochs


def _conditions(
    segments: Iterable[Segment],
) -> Iterator[Callable[[Table], ColumnElement[bool]]]:
    """Conditions that together name the segments, in a form that SQLite answers by index."""
    keys: dict[str, set[str]] = {}
    for ns, key in segments:
        keys.setdefault(ns, set()).add(key)
    for ns, some in keys.items():
        for chunk in chunks(sorted(some)):

            def within(table: Table, ns: str = ns, of: list[str] = chunk) -> ColumnElement[bool]:
                return and_(table.c.ns == ns, table.c.line_key.in_(of))

            yield within


def _segments(conn: Connection, query: Select[str, str]) -> set[Segment]:
    return {(ns, key) for ns, key in conn.execute(query)}


def ready_segments(conn: Connection, segments: Iterable[Segment]) -> set[Segment]:
    """Those of the segments whose KV exists already."""
    found: set[Segment] = set()
    for within in _conditions(segments):
        ready = select(facts.c.ns, facts.c.line_key).where(
            within(facts), facts.c.kv_state == "ready"
        )
        found |= _segments(conn, ready.distinct())
    return found


def ensure_namespace(conn: Connection, scope: Scope) -> None:
    row = {"ns": scope.key, **scope.model_dump(), "epoch": 0}
    conn.execute(sqlite_insert(namespaces).values(row).on_conflict_do_nothing())


class KVStates:
    """The part of the fact store that the encoding worker and the read path use."""

    _db: Database

    def __init__(self) -> None:
        self._claimed: set[Segment] = set()
        self._claims_lock = threading.Lock()

    # The queue

    def claim_pending(self, limit: int, now: datetime | None = None) -> list[Claim]:
        """Take facts of one namespace to encode, oldest first.

        They are pending or stale, or failed with a retry time that has passed; not evicted ones
        (see ``wake_evicted``). One fact per line: its siblings share the segment. A claim lasts
        until ``mark_ready``, ``mark_failed`` or ``release``, or until the store is closed.
        """
        now = now or datetime.now(UTC)
        with self._claims_lock, self._db.read() as conn:
            free = _SEGMENT.not_in(sorted(self._claimed))
            oldest = _first_waiting(conn, now, free, 1)
            if not oldest or limit <= 0:
                return []
            # Siblings of a line may stand among the rows: the next call has the rest.
            of_space = and_(free, facts.c.ns == oldest[0].ns)
            by_line: dict[str, Row[Any]] = {}
            for row in _first_waiting(conn, now, of_space, limit):
                by_line.setdefault(row.line_key, row)
            rows = by_line.values()
            claims = [
                Claim(memory_of(row), row.line_key, turns_of(row), row.kv_attempts) for row in rows
            ]
            self._claimed.update(claim.segment for claim in claims)
            return claims

    def release(self, claims: Iterable[Claim]) -> None:
        """Give claims up: their facts can be claimed again."""
        with self._claims_lock:
            self._claimed.difference_update([claim.segment for claim in claims])

    def mark_ready(
        self, claims: Sequence[Claim], behind_of: Mapping[str, Sequence[tuple[str, str]]]
    ) -> list[Claim]:
        """Record that the claims' segments are in the arena.

        ``behind_of`` maps a claim's id to ``(fact id, line)`` of the facts that stood before it
        in the encoding request. Facts with the same line in the namespace become ready as well.
        Returns the claims refused because their fact, or one before it, was changed or deleted
        in the meantime: the engine must drop the segments of these, and the facts wait to be
        encoded again. The epochs of their namespaces advance, since a question may have used
        such a segment already.
        """
        refused: list[Claim] = []
        with self._db.write() as conn:
            for claim in claims:
                tenant = claim.memory.scope.tenant
                own = _unchanged(conn, tenant, [(claim.id, claim.memory.line)])
                before = _unchanged(conn, tenant, behind_of.get(claim.id, ()))
                if own is None or before is None:
                    refused.append(claim)
                    continue
                conn.execute(
                    update(facts)
                    .where(*_segment_is(claim.segment), facts.c.encode.is_(True))
                    .values(**_RESET, kv_state="ready")
                )
                edges = [
                    {"ns": claim.ns, "line_key": claim.line_key, "behind_seq": seq}
                    for seq in before
                ]
                if edges:
                    # Added to those it has: if an eviction was reported late, the segment of the
                    # earlier encoding may be the one that is resident.
                    conn.execute(sqlite_insert(behind).on_conflict_do_nothing(), edges)
            advance_epochs(conn, {claim.ns for claim in refused})
        self.release(claims)
        return refused

    def mark_failed(self, claim: Claim, reason: str, retry_at: datetime | None) -> bool:
        """Record why a claim could not be encoded; ``retry_at`` None means never again.

        False when its fact has another line by now, and so waits for its turn.
        """
        with self._db.write() as conn:
            values = {
                "kv_state": "failed",
                "kv_reason": reason,
                "kv_not_before": retry_at,
                "kv_attempts": facts.c.kv_attempts + 1,
            }
            done = conn.execute(
                update(facts).where(*_segment_is(claim.segment), _ENCODABLE).values(**values)
            )
        self.release([claim])
        return done.rowcount > 0

    def mark_pending(self, segments: Iterable[Segment], reason: str | None = EVICTED) -> int:
        """Record that segments left the arena; with reason ``evicted`` their facts wait for a
        question, with any other they are encoded again. Returns the number of facts."""
        count = 0
        with self._db.write() as conn:
            for within in _conditions(segments):
                values = {**_RESET, "kv_state": "pending", "kv_reason": reason}
                done = conn.execute(
                    update(facts).where(within(facts), facts.c.kv_state == "ready").values(**values)
                )
                count += done.rowcount
        return count

    def wake_evicted(self, tenant: str, ids: Sequence[str]) -> int:
        """Queue those of the facts whose segment was evicted: a question retrieved them."""
        evicted = and_(facts.c.kv_state == "pending", facts.c.kv_reason == EVICTED)
        count = 0
        with self._db.read() as conn:
            found: list[int] = []
            for chunk in chunks(ids):
                named = and_(facts.c.tenant == tenant, facts.c.id.in_(chunk))
                found.extend(conn.scalars(select(facts.c.seq).where(named, evicted)))
        if not found:
            return 0
        with self._db.write() as conn:
            for seqs in chunks(found):
                done = conn.execute(
                    update(facts).where(facts.c.seq.in_(seqs), evicted).values(kv_reason=None)
                )
                count += done.rowcount
        return count

    def reset_kv(self) -> int:
        """Forget all KV, as after a restart of the engine: every fact that has KV is pending.

        Failed ones too: the model or a limit may be another now.
        """
        with self._db.write() as conn:
            conn.execute(delete(behind))
            done = conn.execute(
                update(facts)
                .where(
                    or_(
                        facts.c.kv_state.in_(("ready", "stale", "failed")),
                        and_(facts.c.kv_state == "pending", facts.c.kv_reason.is_not(None)),
                    )
                )
                .values(**_RESET, kv_state="pending")
            )
        with self._claims_lock:
            self._claimed.clear()
        return done.rowcount

    def queue_depth(self) -> int:
        """Facts that wait to be encoded now or at their retry time, claimed ones included."""
        with self._db.read() as conn:
            return conn.scalar(select(func.count()).select_from(facts).where(_waiting(None))) or 0

    def counts(self, scope: Scope | None = None, *, tenant: str | None = None) -> dict[str, int]:
        """Facts by KV state: of what a scope sees, of a tenant, or of the whole store."""
        query = select(facts.c.kv_state, func.count()).group_by(facts.c.kv_state)
        if scope is not None:
            query = query.where(owned_within(scope))
        if tenant is not None:
            query = query.where(facts.c.tenant == tenant)
        with self._db.read() as conn:
            return dict(conn.execute(query).all())

    # Epochs

    def epochs(self, spaces: Iterable[str]) -> dict[str, int]:
        """Current epoch of each namespace; 0 for one that never had a fact."""
        wanted = sorted(set(spaces))
        epochs = dict.fromkeys(wanted, 0)
        with self._db.read() as conn:
            for chunk in chunks(wanted):
                found = select(namespaces.c.ns, namespaces.c.epoch).where(
                    namespaces.c.ns.in_(chunk)
                )
                epochs.update(dict(conn.execute(found).all()))
        return epochs

    def visible_epochs(self, reader: Scope) -> dict[str, int]:
        """Namespaces of all facts that a reader may see, with their epochs."""
        query = select(namespaces.c.ns, namespaces.c.epoch).where(
            namespaces.c.tenant == reader.tenant,
            *(namespaces.c[name] == value for name, value in reader.owner_fields.items()),
            exists().where(facts.c.ns == namespaces.c.ns),
        )
        with self._db.read() as conn:
            return dict(conn.execute(query).all())

    def dependents(self, tenant: str, fact_id: str) -> list[Segment]:
        """Segments that were encoded behind a fact."""
        query = (
            select(behind.c.ns, behind.c.line_key)
            .join(facts, facts.c.seq == behind.c.behind_seq)
            .where(facts.c.tenant == tenant, facts.c.id == fact_id)
            .order_by(behind.c.ns, behind.c.line_key)
        )
        with self._db.read() as conn:
            return [(ns, key) for ns, key in conn.execute(query)]


_ENCODABLE = facts.c.encode.is_(True)


def _segment_is(segment: Segment) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return facts.c.ns == segment[0], facts.c.line_key == segment[1]


def _waiting(now: datetime | None) -> ColumnElement[bool]:
    """Waits to be encoded: at ``now``, or with None at any time."""
    fresh = and_(
        facts.c.kv_state.in_(("pending", "stale")),
        func.coalesce(facts.c.kv_reason, "") != EVICTED,
    )
    time = facts.c.kv_not_before
    retry = and_(facts.c.kv_state == "failed", time.is_not(None) if now is None else time <= now)
    return and_(_ENCODABLE, or_(fresh, retry))


def _first_waiting(
    conn: Connection, now: datetime, condition: ColumnElement[bool], limit: int
) -> list[Row[Any]]:
    """The oldest facts that wait: a query per state, each in the order of an index."""
    rows: list[Row[Any]] = []
    for state in ("pending", "stale", "failed"):
        query = select(facts).where(facts.c.kv_state == state, _waiting(now), condition)
        rows += conn.execute(query.order_by(facts.c.seq).limit(limit))
    return sorted(rows, key=lambda row: row.seq)[:limit]


def _unchanged(conn: Connection, tenant: str, lines: Sequence[tuple[str, str]]) -> list[int] | None:
    """The ``seq`` of facts, or None when one is gone or has another line than it had."""
    keys = {fact_id: segment_key(line) for fact_id, line in lines}
    seqs: list[int] = []
    for chunk in chunks(list(keys)):
        query = select(facts.c.seq, facts.c.id, facts.c.line_key)
        query = query.where(facts.c.tenant == tenant, facts.c.id.in_(chunk))
        seqs += [row.seq for row in conn.execute(query) if row.line_key == keys[row.id]]
    return seqs if len(seqs) == len(keys) else None
