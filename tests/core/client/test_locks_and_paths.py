"""Leases, file locks, and where sockets go."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from client_apps import eventually

from inferscale_core.client.errors import AddressInUse, StartupError, Timeout
from inferscale_core.client.locks import FileLock, Lease, held_leases, is_free
from inferscale_core.client.rundir import SUN_PATH_MAX, free_socket, listens, socket_path

HOLD = """
import sys, time
from pathlib import Path
from inferscale_core.client.locks import Lease
lease = Lease(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_lease_dies_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert held_leases(tmp_path) == 1
        holder.kill()
    assert held_leases(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_leases_count_and_are_given_back(tmp_path: Path) -> None:
    leases = [Lease(tmp_path) for _ in range(3)]
    assert held_leases(tmp_path) == 3
    for lease in leases:
        lease.release()
        lease.release()
    assert held_leases(tmp_path) == 0


def test_a_child_that_drops_its_share_does_not_take_the_parents(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    pid = os.fork()
    if pid == 0:
        lease.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert held_leases(tmp_path) == 1
    lease.release()


def test_a_started_program_does_not_inherit_a_lease(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    lease.release()
    assert held_leases(tmp_path) == 0
    child.kill()
    child.wait()


def test_counting_never_takes_a_lease_that_is_being_made(tmp_path: Path) -> None:
    made: list[Lease] = []
    maker = threading.Thread(target=lambda: made.extend(Lease(tmp_path) for _ in range(300)))
    maker.start()
    while maker.is_alive():
        held_leases(tmp_path)
    assert held_leases(tmp_path) == len(made) == 300
    for lease in made:
        lease.release()


def test_a_lock_is_waited_for_and_no_longer_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert is_free(path)
    holder, waiter = FileLock(path), FileLock(path)
    assert holder.try_acquire()
    assert not is_free(path)
    start = time.monotonic()
    with pytest.raises(Timeout, match="the thing is still held"):
        waiter.acquire(0.3, "the thing")
    assert 0.3 <= time.monotonic() - start < 2
    threading.Timer(0.3, holder.release).start()
    waiter.acquire(5, "the thing")
    assert waiter.fd is not None
    waiter.release()
    assert eventually(lambda: is_free(path), 1)


def test_socket_paths_are_short_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = socket_path("a" * 64)
    assert path.parent == tmp_path / "inferscale"
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_with_a_long_name_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    path = socket_path("b" * 64)
    assert not path.is_relative_to(deep)
    assert len(os.fsencode(path)) <= SUN_PATH_MAX


def test_a_directory_that_is_not_ours_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "inferscale").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert not socket_path("c" * 64).is_relative_to(tmp_path)
    open_to_all = tmp_path / "open"
    (open_to_all / "inferscale").mkdir(parents=True, mode=0o777)
    (open_to_all / "inferscale").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_to_all))
    assert socket_path("c" * 64).parent.stat().st_mode & 0o077 == 0


def test_nowhere_to_put_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale_core.client.rundir.SUN_PATH_MAX", 5)
    with pytest.raises(StartupError, match="no directory for the socket"):
        socket_path("d" * 64)


def test_what_stands_where_the_socket_should(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    free_socket(path)
    path.write_text("a file")
    with pytest.raises(AddressInUse, match="something else"):
        free_socket(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert listens(path)
        with pytest.raises(AddressInUse, match="another server listens"):
            free_socket(path)
    assert not listens(path)
    free_socket(path)
    assert not path.exists()
