"""KV states of facts: the durable queue of what to encode, and what a change makes stale."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from inferscale_core.facts.database import Database
from inferscale_core.facts.forgetting import Segment, advance_epochs, segment_conditions
from inferscale_core.facts.records import EVICTED, OUTGROWN, Claim, segment_key
from inferscale_core.facts.rows import chunks, memory_of, owned_within, turns_of
from inferscale_core.facts.schema import RESET_KV, behind, facts, namespaces
from inferscale_core.facts.scope import Scope

MOST_PEERS = 4096
"""Facts that ``peers`` counts at most: among so many, a fact has its neighbours already."""

_SEGMENT = tuple_(facts.c.ns, facts.c.line_key)


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
        (see ``wake_evicted``). When none waits, outgrown ones. One fact per line: its siblings
        share the segment. A claim lasts until ``mark_ready``, ``mark_failed`` or ``release``, or
        until the store is closed.
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
        self,
        claims: Sequence[Claim],
        behind_of: Mapping[str, Sequence[tuple[str, str]]],
        peers_of: Mapping[str, int] | None = None,
    ) -> list[Claim]:
        """Record that the claims' segments are in the arena.

        ``behind_of`` maps a claim's id to ``(fact id, line)`` of the facts that stood before it
        in the encoding request, ``peers_of`` to the ``peers`` they were chosen from. Facts
        with the same line in the namespace become ready as well.
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
                    # An earlier segment of the line is dropped with this one.
                    had = update(facts).where(*_segment_is(claim.segment), _READY)
                    conn.execute(had.values(**RESET_KV, kv_state="pending"))
                    continue
                conn.execute(
                    update(facts)
                    .where(*_segment_is(claim.segment), facts.c.encode.is_(True))
                    .values(
                        **RESET_KV | {"kv_peers": (peers_of or {}).get(claim.id)},
                        kv_state="ready",
                    )
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

        An outgrown fact keeps the KV it has, and is tried again like any other. False when the
        fact has another line by now, and so waits for its turn.
        """
        again = {"kv_not_before": retry_at, "kv_attempts": facts.c.kv_attempts + 1}
        outgrown = again if retry_at else {**RESET_KV, "kv_peers": MOST_PEERS}
        with self._db.write() as conn:
            own = _segment_is(claim.segment)
            conn.execute(update(facts).where(*own, _READY).values(**outgrown))
            done = conn.execute(
                update(facts)
                .where(*own, _ENCODABLE, ~_READY)
                .values(**again, kv_state="failed", kv_reason=reason)
            )
        self.release([claim])
        return done.rowcount > 0

    def mark_pending(self, segments: Iterable[Segment], reason: str | None = EVICTED) -> int:
        """Record that segments left the arena; with reason ``evicted`` their facts wait for a
        question, with any other they are encoded again. Returns the number of facts."""
        count = 0
        with self._db.write() as conn:
            for within in segment_conditions(segments):
                values = {**RESET_KV, "kv_state": "pending", "kv_reason": reason}
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

    def peers(self, scope: Scope, collection: str) -> int:
        """How many facts to encode the reader sees in a collection, up to ``MOST_PEERS``."""
        with self._db.read() as conn:
            return _peers(conn, scope, collection)

    def mark_outgrown(self, scope: Scope, collection: str, growth: float) -> int:
        """Queue facts to be encoded again that stand among others now that ``scope`` has grown.

        Those with KV, of any reader that sees facts of ``scope``, whose ``peers`` have become
        ``growth`` times as many. They stay ready. Returns the number of facts.
        """
        with self._db.read() as conn:
            found: list[int] = []
            readers = {reader.key: reader for reader in scope.readers()}
            known = select(namespaces.c.ns).where(namespaces.c.ns.in_(readers))
            for reader in [readers[ns] for ns in conn.scalars(known)]:
                among = _peers(conn, reader, collection)
                due = select(facts.c.seq).where(
                    facts.c.ns == reader.key,
                    facts.c.collection == collection,
                    # None: its KV was made for another fact of the same line.
                    or_(facts.c.kv_peers.is_(None), facts.c.kv_peers <= among / growth),
                    *_OUTGROWABLE,
                )
                found.extend(conn.scalars(due))
        if not found:
            return 0
        count = 0
        with self._db.write() as conn:
            for seqs in chunks(found):
                due_rows = update(facts).where(facts.c.seq.in_(seqs), *_OUTGROWABLE)
                count += conn.execute(due_rows.values(kv_reason=OUTGROWN)).rowcount
        return count

    def outgrown_count(self) -> int:
        """Facts that are encoded again when nothing else waits."""
        query = select(func.count()).select_from(facts).where(_OUTGROWN)
        with self._db.read() as conn:
            return conn.scalar(query) or 0

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
                .values(**RESET_KV, kv_state="pending")
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
_READY = facts.c.kv_state == "ready"
_OUTGROWN = and_(_READY, facts.c.kv_reason == OUTGROWN)
_OUTGROWABLE = (_READY, facts.c.kv_reason.is_(None))


def _segment_is(segment: Segment) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return facts.c.ns == segment[0], facts.c.line_key == segment[1]


def _peers(conn: Connection, scope: Scope, collection: str) -> int:
    one = select(literal(1)).where(owned_within(scope), facts.c.collection == collection)
    found = one.where(_ENCODABLE).limit(MOST_PEERS).subquery()
    return conn.scalar(select(func.count()).select_from(found)) or 0


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
    """The oldest facts that wait, outgrown ones last: queries each in the order of an index."""
    rows: list[Row[Any]] = []
    for state in ("pending", "stale", "failed"):
        query = select(facts).where(facts.c.kv_state == state, _waiting(now), condition)
        rows += conn.execute(query.order_by(facts.c.seq).limit(limit))
    if not rows:
        due = or_(facts.c.kv_not_before.is_(None), facts.c.kv_not_before <= now)
        query = select(facts).where(_OUTGROWN, due, condition)
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
