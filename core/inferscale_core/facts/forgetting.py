"""What a change to facts takes away: segments, what was encoded behind them, epochs."""

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, delete, select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from inferscale_core.facts.records import Forgotten
from inferscale_core.facts.rows import chunks
from inferscale_core.facts.schema import RESET_KV, behind, doomed, facts, namespaces
from inferscale_core.facts.scope import Scope

Segment = tuple[str, str]
"""``(namespace, segment key)``."""


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
    for within in segment_conditions(owned | dependent):
        found = select(facts.c.ns, facts.c.line_key).where(within(facts), facts.c.encode.is_(True))
        alive |= _segments(conn, found.distinct())
    gone = owned - alive
    stale_ids: list[str] = []
    for within in segment_conditions(dependent & alive):
        rows = conn.execute(
            update(facts)
            .where(within(facts), facts.c.kv_state == "ready")
            .values(**{**RESET_KV, "kv_state": "stale", "kv_reason": "a text before it is gone"})
            .returning(facts.c.id)
        )
        stale_ids.extend(rows.scalars())
    for within in segment_conditions(gone | dependent):
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


def segment_conditions(
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
    for within in segment_conditions(segments):
        ready = select(facts.c.ns, facts.c.line_key).where(
            within(facts), facts.c.kv_state == "ready"
        )
        found |= _segments(conn, ready.distinct())
    return found


def ensure_namespace(conn: Connection, scope: Scope) -> None:
    row = {"ns": scope.key, **scope.model_dump(), "epoch": 0}
    conn.execute(sqlite_insert(namespaces).values(row).on_conflict_do_nothing())
