"""Tables of the fact store, and how an older file becomes a current one.

``seq`` is the order of arrival and what other tables point to: an id is unique per tenant only,
so that one tenant neither sees nor blocks the ids of another. ``behind`` belongs to segments, not
to facts: facts of a namespace with the same line share one segment.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)

from inferscale_core.facts.errors import FactError, StoreError

SCHEMA_VERSION = 2


def as_utc(moment: datetime) -> datetime:
    """The moment in UTC; one without a time zone is taken as UTC. Raises FactError."""
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError as error:
        raise FactError(
            f"the time {moment.isoformat()} has no equivalent in UTC; use a year from 2 to 9998"
        ) from error


class UTCDateTime(TypeDecorator[datetime]):
    """Aware datetimes in UTC; SQLite keeps them as text that sorts by time."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else as_utc(value).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


TABLES = MetaData()

schema_version = Table("schema_version", TABLES, Column("version", Integer, nullable=False))

settings = Table(
    "settings",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

namespaces = Table(
    "namespaces",
    TABLES,
    Column("ns", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("user", Text),
    Column("agent", Text),
    Column("run", Text),
    # Kept when the last fact is gone: an epoch that came back would find old cached blocks.
    Column("epoch", Integer, nullable=False, default=0),
    Index("namespaces_by_owner", "tenant", "user"),
)

facts = Table(
    "facts",
    TABLES,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("user", Text),
    Column("agent", Text),
    Column("run", Text),
    Column("ns", Text, ForeignKey("namespaces.ns"), nullable=False),
    Column("collection", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("line", Text, nullable=False),
    Column("line_key", Text, nullable=False),
    Column("hash", Text, nullable=False),
    Column("metadata", Text, CheckConstraint("json_valid(metadata)"), nullable=False),
    Column("turns", Text, CheckConstraint("json_valid(turns)"), nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
    Column("updated_at", UTCDateTime, nullable=False),
    Column("valid_at", UTCDateTime),
    Column("invalid_at", UTCDateTime),
    Column("encode", Boolean, nullable=False),
    Column("kv_state", Text, nullable=False),
    Column("kv_reason", Text),
    Column("kv_attempts", Integer, nullable=False, default=0),
    Column("kv_not_before", UTCDateTime),
    # Facts that its KV could be encoded behind, itself included; null without KV.
    Column("kv_peers", Integer),
    UniqueConstraint("tenant", "id"),
    Index("facts_by_owner", "tenant", "user", "collection"),
    Index("facts_by_agent", "tenant", "agent", "collection"),
    Index("facts_by_run", "tenant", "run", "collection"),
    Index("facts_by_segment", "ns", "line_key"),
    Index("facts_by_kv_state", "kv_state", "seq"),
    Index("facts_by_kv_reason", "kv_reason", "seq"),
    Index("facts_by_kv_peers", "ns", "collection", "kv_peers"),
    sqlite_autoincrement=True,
)

RESET_KV = {"kv_reason": None, "kv_attempts": 0, "kv_not_before": None, "kv_peers": None}
"""Columns that describe a fact's KV, or the tries to make it, when they start anew."""

embeddings = Table(
    "embeddings",
    TABLES,
    Column("seq", Integer, ForeignKey("facts.seq", ondelete="CASCADE"), primary_key=True),
    Column("vector", LargeBinary, nullable=False),  # float32, little endian, [dim]
)

behind = Table(
    "behind",
    TABLES,
    Column("ns", Text, primary_key=True),
    Column("line_key", Text, primary_key=True),
    Column("behind_seq", Integer, primary_key=True),
    Index("behind_by_fact", "behind_seq"),
)

# One per connection: the facts a transaction deletes or changes, so that the statements that
# follow are joins, whatever their number.
doomed = Table(
    "doomed", MetaData(), Column("seq", Integer, primary_key=True), prefixes=["TEMPORARY"]
)

Migration = Callable[[Connection], None]


def _add_peers(conn: Connection) -> None:
    conn.execute(text("ALTER TABLE facts ADD COLUMN kv_peers INTEGER"))
    new = ("facts_by_agent", "facts_by_run", "facts_by_kv_reason", "facts_by_kv_peers")
    for index in facts.indexes:
        if index.name in new:
            index.create(conn)


MIGRATIONS: Mapping[int, Migration] = {1: _add_peers}
"""Step from version ``n`` to ``n + 1``, for every ``n`` from 1 to ``SCHEMA_VERSION - 1``."""


def migrate(
    conn: Connection,
    subject: str,
    steps: Mapping[int, Migration] = MIGRATIONS,
    target: int = SCHEMA_VERSION,
) -> None:
    """Bring the database to ``target`` within the caller's transaction.

    ``subject`` names the store in errors.

    A database without tables, or one whose version is 0, gets the current tables. Raises
    StoreError when the file is newer than this program, or is some other program's database.
    """
    names = set(inspect(conn).get_table_names())
    if schema_version.name not in names:
        if names:
            raise StoreError(
                f"{subject} is an SQLite database of another program (it has tables "
                f"{', '.join(sorted(names)[:3])} but no {schema_version.name}); "
                "name another file as the store"
            )
        schema_version.create(conn)
    found = conn.scalar(select(func.max(schema_version.c.version))) or 0
    if found > target:
        raise StoreError(
            f"{subject} has schema version {found} and this release knows versions up to {target}; "
            "upgrade inferscale-adapters or name another file as the store"
        )
    if found == 0:
        TABLES.create_all(conn)
        conn.execute(schema_version.delete())
        conn.execute(insert(schema_version).values(version=target))
        return
    for version in range(found, target):
        steps[version](conn)
        conn.execute(update(schema_version).values(version=version + 1))
