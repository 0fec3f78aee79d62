"""The SQLite file under the fact store: opened by one core at a time."""

import errno
import fcntl
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateTable

from inferscale_core.facts.errors import FactError, StoreError
from inferscale_core.facts.schema import doomed, migrate


def clean(text: str) -> str:
    """The text with lone surrogates replaced: neither SQLite nor a tokenizer can hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _casefold(text: Any) -> Any:
    return text.casefold() if isinstance(text, str) else text


class Database:
    """Transactions over one SQLite file, which this process alone may have open.

    Any thread may call ``read`` and ``write``; writers take turns, readers see the last commit.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 10.0) -> None:
        """Open or make the file. ``busy_timeout`` in seconds. Raises StoreError."""
        self.path = Path(path)
        self._write_lock = threading.Lock()
        self._busy_ms = int(busy_timeout * 1000)
        self._engine: Engine | None = None
        self._lock_fd: int | None = None
        self._take_lock()
        try:
            self._engine = self._make_engine()
            with self._outside_transactions() as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            with self.write() as conn:
                migrate(conn, f"the fact store {self.path}")
        except BaseException:
            self.close()
            raise
        _open_databases.add(self)

    def close(self) -> None:
        """Release the file and its lock. May be called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()
        self.drop_lock_handle()

    def drop_lock_handle(self) -> None:
        """Close the lock file: the lock itself is free when every copy of it is closed."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one commit throughout. Raises StoreError."""
        with self._translated(), self._opened().connect() as conn, conn.begin():
            yield conn

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction: on disk when the block ends, undone when it raises.

        Raises StoreError.
        """
        engine = self._opened()
        with self._write_lock, self._translated(), engine.connect() as conn:
            conn = conn.execution_options(inferscale_write=True)
            with conn.begin():
                yield conn

    def scrub(self) -> None:
        """Move the log into the file and empty it, so that deleted text is in neither.

        Left to a later call when a reader is in the way.
        """
        with self._write_lock, self._outside_transactions() as connection:
            connection.execute("PRAGMA busy_timeout = 0")
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute(f"PRAGMA busy_timeout = {self._busy_ms}")

    @contextmanager
    def _outside_transactions(self) -> Iterator[sqlite3.Connection]:
        with self._translated():
            pooled = self._opened().raw_connection()
            try:
                connection = pooled.driver_connection
                assert isinstance(connection, sqlite3.Connection)
                yield connection
            finally:
                pooled.close()

    def _opened(self) -> Engine:
        if self._engine is None:
            raise StoreError(f"the fact store {self.path} is closed; open it again")
        return self._engine

    def _take_lock(self) -> None:
        if self.path.is_dir():
            raise StoreError(
                f"the fact store {self.path} is a directory; name a file in it, for example "
                f"{self.path / 'facts.db'}"
            )
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(
                f"the fact store {self.path} cannot be opened: {error.strerror} ({lock}); make "
                "its directory writable for this user or name another file"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
            self.drop_lock_handle()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StoreError(
                    f"the fact store {self.path} cannot be locked: {error.strerror}; put it on "
                    "a local disk"
                ) from error
            raise StoreError(
                f"the fact store {self.path} is in use by another core, process "
                f"{holder or 'unknown'}; connect to that core, end it, or name another file"
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _make_engine(self) -> Engine:
        engine = create_engine(
            URL.create("sqlite+pysqlite", database=str(self.path)),
            connect_args={"timeout": self._busy_ms / 1000, "check_same_thread": False},
            pool_size=4,
            max_overflow=60,
        )

        @event.listens_for(engine, "connect")
        def prepare(connection: sqlite3.Connection, _record: Any) -> None:
            connection.isolation_level = None  # transactions are begun below, not by sqlite3
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute(str(CreateTable(doomed)))
            connection.create_function("inferscale_casefold", 1, _casefold, deterministic=True)

        @event.listens_for(engine, "begin")
        def begin(conn: Connection) -> None:
            # A writer takes its lock at once: upgrading a read transaction could only fail.
            writes = conn.get_execution_options().get("inferscale_write")
            conn.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> StoreError:
        cause = getattr(error, "orig", None) or error
        message = str(cause)
        lower = message.lower()
        if isinstance(cause, FactError):
            return cause
        if "check constraint failed: json_valid" in lower:
            return FactError(
                "metadata and turns must be JSON that SQLite accepts: nested less deeply"
            )
        if "expression tree is too large" in lower or "too many sql variables" in lower:
            return FactError(f"the filter has too many conditions ({message}); ask with fewer")
        if "readonly" in lower or "unable to open" in lower:
            remedy = "make the file and its directory writable for this user or name another file"
        elif "locked" in lower or "busy" in lower:
            remedy = "another program has it open and is writing: close that program and try again"
        elif "malformed" in lower or "not a database" in lower:
            remedy = (
                "the file is damaged or no SQLite database: restore it from a backup, or move it "
                "away to start empty"
            )
        elif "full" in lower or "disk i/o" in lower:
            remedy = "free some space on its disk and check the disk"
        else:
            remedy = "see the cause for details"
        return StoreError(f"the fact store {self.path} failed: {message}; {remedy}")


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked engine process would keep the lock alive after the core that took it is dead.
    for database in list(_open_databases):
        database.drop_lock_handle()


os.register_at_fork(after_in_child=_release_in_child)
