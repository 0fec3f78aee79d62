"""Files that are new, older, newer, foreign, damaged, read-only or taken, and after a crash."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, text

from inferscale_core.client.models import MemoryIn
from inferscale_core.facts.database import Database
from inferscale_core.facts.errors import StoreError
from inferscale_core.facts.schema import SCHEMA_VERSION, facts, migrate
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore

ALICE = Scope(user="alice")
V1 = Path(__file__).with_name("v1.sql")
NOBODY = 65534


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as conn:
        return conn.execute("SELECT version FROM schema_version").fetchone()[0]


def script(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as conn:
        conn.executescript(sql)


def columns(path: Path) -> set[tuple[str, ...]]:
    """Table and column names with their types."""
    with closing(sqlite3.connect(path)) as conn:
        tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {
            (name, *row[1:3])
            for (name,) in tables
            for row in conn.execute(f"PRAGMA table_info({name})")
        }


def indexes(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as conn:
        found = conn.execute("SELECT sql FROM sqlite_master WHERE type = 'index'")
        return {sql for (sql,) in found if sql}


def test_a_new_file_and_its_directory_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "facts?x=1 #.db"
    with FactStore(path) as store:
        store.add(ALICE, [MemoryIn(text="x", id="1")])
    assert path.exists()
    assert version_of(path) == SCHEMA_VERSION
    with FactStore(str(path)) as store:
        assert store.path == str(path)
        assert store.get("1", "default") is not None


@pytest.mark.parametrize(
    "sql",
    ["", "CREATE TABLE schema_version (version INTEGER); INSERT INTO schema_version VALUES (0)"],
)
def test_a_file_of_version_0_gets_the_tables(path: Path, sql: str) -> None:
    script(path, sql)
    with FactStore(path) as store:
        store.add(ALICE, [MemoryIn(text="x")])
    assert version_of(path) == SCHEMA_VERSION


def test_a_file_of_version_1_opens_with_its_facts(path: Path) -> None:
    script(path, V1.read_text())
    with FactStore(path) as store:
        memory = store.get("f1", "default")
        assert memory is not None
        assert (memory.text, memory.line, memory.metadata) == (
            "Likes tea",
            "- Likes tea\n",
            {"a": 1},
        )
        assert memory.created_at == datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
        assert memory.kv_state == "pending"
        assert store.epochs([ALICE.key]) == {ALICE.key: 7}
        assert store.get_vectors("default", ["f1"])["f1"].tolist() == [1.0, 0.0]
        assert store.delete(["f1"], "default").forgotten.epochs == {ALICE.key: 8}


def test_an_older_file_gets_the_tables_of_a_new_one(path: Path, tmp_path: Path) -> None:
    script(path, V1.read_text())
    new = tmp_path / "new.db"
    for file in (path, new):
        FactStore(file).close()
    assert version_of(path) == SCHEMA_VERSION
    assert columns(path) == columns(new)
    assert indexes(path) == indexes(new)


def test_steps_lead_an_older_file_to_a_newer_version(path: Path) -> None:
    def colour(conn: Connection) -> None:
        conn.execute(text("ALTER TABLE facts ADD COLUMN colour TEXT DEFAULT 'red'"))

    def size(conn: Connection) -> None:
        conn.execute(text("ALTER TABLE facts ADD COLUMN size INTEGER DEFAULT 3"))

    def broken(conn: Connection) -> None:
        conn.execute(text("UPDATE facts SET text = 'lost'"))
        raise RuntimeError("no")

    now = SCHEMA_VERSION
    script(path, V1.read_text())
    with closing(Database(path)) as database:
        with pytest.raises(RuntimeError), database.write() as conn:
            migrate(conn, "s", {now: colour, now + 1: broken}, now + 2)
        with database.write() as conn:
            migrate(conn, "s", {now: colour, now + 1: size}, now + 2)
        with database.read() as conn:
            row = conn.execute(text("SELECT text, colour, size FROM facts")).one()
            assert tuple(row) == ("Likes tea", "red", 3)
            assert conn.scalars(select(facts.c.id)).all() == ["f1"]
    assert version_of(path) == now + 2


def test_a_newer_file_is_refused_and_left_as_it_is(path: Path) -> None:
    script(path, V1.read_text() + "UPDATE schema_version SET version = 99;")
    with pytest.raises(StoreError, match=r"facts\.db has schema version 99.*upgrade"):
        FactStore(path)
    assert version_of(path) == 99


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    script(path, "CREATE TABLE songs (id INTEGER)")
    with pytest.raises(StoreError, match=r"another program.*songs"):
        FactStore(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is a directory; name a file in it"):
        FactStore(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be opened"):
        FactStore(tmp_path / "file" / "facts.db")


def test_what_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"this is not a database, but a long enough text " * 50)
    with pytest.raises(StoreError, match=r"not a database; .*restore it from a backup"):
        FactStore(path)
    assert path.read_bytes().startswith(b"this is not")


def test_a_damaged_file_is_reported(path: Path) -> None:
    with FactStore(path) as store:
        store.add(ALICE, [MemoryIn(text=f"text {i} " * 40) for i in range(400)])
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"malformed|damaged"), FactStore(path) as store:
        store.list(ALICE)


@contextmanager
def limited_rights(directory_mode: int) -> Iterator[Path]:
    """A store's file that this process, without a superuser's rights, may read and not write."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "facts.db"
        FactStore(path).close()
        path.chmod(0o444)
        superuser = os.geteuid() == 0
        if superuser:
            os.chown(name, NOBODY, NOBODY)
            os.chown(path.with_name("facts.db.lock"), NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            os.chmod(name, directory_mode)
            yield path
            os.chmod(name, 0o755)
        finally:
            if superuser:
                os.seteuid(0)


def test_a_read_only_place_is_refused() -> None:
    with limited_rights(0o555) as path:
        path.with_name("facts.db.lock").chmod(0o444)
        with pytest.raises(StoreError, match=r"cannot be opened: Permission denied.*writable"):
            FactStore(path)


def test_a_read_only_file_is_refused() -> None:
    with (
        limited_rights(0o755) as path,
        pytest.raises(StoreError, match=r"readonly.*make the file and its directory writable"),
    ):
        FactStore(path)


def test_another_programs_transaction_is_waited_for_and_named(path: Path) -> None:
    with FactStore(path, busy_timeout=0.1) as store, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"locked; another program"):
            store.add(ALICE, [MemoryIn(text="x")])
        other.rollback()
        store.add(ALICE, [MemoryIn(text="x")])


def test_a_second_store_in_this_process_is_refused(path: Path) -> None:
    with FactStore(path), pytest.raises(StoreError, match=f"process {os.getpid()};"):
        FactStore(path)
    FactStore(path).close()


HOLD = """
import sys, time
from inferscale_core.client.models import MemoryIn
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore

store = FactStore(sys.argv[1])
for number in range(int(sys.argv[2])):
    store.add(Scope(user="alice"), [MemoryIn(text=f"text {number}", id=str(number))])
    print(number, flush=True)
print("ready", flush=True)
time.sleep(600)
"""


def hold(path: Path, count: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(count)], stdout=subprocess.PIPE, text=True
    )


def test_a_core_that_has_the_file_is_named_and_a_killed_one_lets_go(path: Path) -> None:
    """What ``add`` returned for is there after kill -9."""
    with hold(path, 20) as child:
        try:
            assert child.stdout is not None
            added = -1
            while (line := child.stdout.readline().strip()) != "ready":
                added = int(line)
            with pytest.raises(StoreError, match=rf"in use by another core, process {child.pid};"):
                FactStore(path)
        finally:
            child.send_signal(signal.SIGKILL)
    with FactStore(path) as store:
        assert store.list(ALICE)[1] == added + 1 == 20


def test_rows_survive_a_kill_in_the_middle_of_writing(path: Path) -> None:
    with hold(path, 100_000) as child:
        try:
            assert child.stdout is not None
            for _ in range(30):
                added = int(child.stdout.readline())
        finally:
            child.send_signal(signal.SIGKILL)
    with FactStore(path) as store:
        memories, total = store.list(ALICE, limit=None)
        assert total > added
        assert [m.text for m in memories] == [f"text {i}" for i in range(total)]


def test_a_forked_child_does_not_keep_the_file(path: Path) -> None:
    store = FactStore(path)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        store.close()
        FactStore(path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
