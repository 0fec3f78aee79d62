"""The supervisor with a stand-in for the server, in states that vLLM cannot be brought to at will.

The stand-in answers ``/health`` on the socket, starts a child titled like vLLM's engine, and
ignores SIGTERM when told to.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_apps import eventually

from inferscale_core.client.errors import StoreLocked
from inferscale_core.client.locks import FileLock, Lease, is_free
from inferscale_core.client.rundir import CoreDir, Status, core_processes, write_json
from inferscale_core.client.stores import check_unlocked, claim_store

SERVER = """
import http.server, os, signal, socketserver, subprocess, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "fails":
    sys.exit(3)
child = subprocess.Popen(["VLLM::EngineCore", "-c", "import time; time.sleep(600)"],
                         executable=sys.executable, env={})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def address_string(self):
        return "unix"
socketserver.UnixStreamServer(sys.argv[1], Handler).serve_forever()
"""

Start = Callable[..., CoreDir]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts supervisors as the client does; whatever they leave is ended afterwards."""
    cores: list[CoreDir] = []

    def run(kind: str = "plain", grace: float = 60.0, **more: Any) -> CoreDir:
        core = CoreDir(tmp_path / "cores" / f"core{len(cores)}")
        core.create()
        socket = str(tmp_path / f"{len(cores)}.sock")
        spec = {
            "argv": [sys.executable, "-c", SERVER, socket, kind],
            "env": {},
            "cwd": str(tmp_path),
            "socket": socket,
            "model": "stand-in",
            "idle_grace": grace,
            **more,
        }
        write_json(core.spec, spec)
        core.write_status(Status(state="starting", socket=socket))
        cores.append(core)
        with FileLock(core.supervisor_lock) as lock, core.log.open("wb") as log:
            assert lock.try_acquire()
            assert lock.fd is not None
            module = "inferscale_core.client.supervisor"
            subprocess.run(
                [sys.executable, "-m", module, str(core.path), str(lock.fd)],
                pass_fds=[lock.fd],
                start_new_session=True,
                stdout=log,
                stderr=log,
                check=True,
            )
        return core

    yield run
    for core in cores:
        status = core.read_status()
        for pid in core_processes(core.path, status.session if status else 0):
            os.kill(pid, signal.SIGKILL)
        if status is not None and not is_free(core.supervisor_lock):
            os.kill(status.supervisor_pid, signal.SIGKILL)


def state(core: CoreDir) -> str:
    status = core.read_status()
    return status.state if status is not None else "none"


def left(core: CoreDir) -> list[int]:
    status = core.read_status()
    assert status is not None
    return core_processes(core.path, status.session)


def ended(core: CoreDir, seconds: float) -> bool:
    return eventually(lambda: is_free(core.supervisor_lock) and not left(core), seconds)


def test_lives_as_long_as_a_lease_is_held(start: Start) -> None:
    core = start(grace=1.0)
    lease = Lease(core.leases)
    assert eventually(lambda: state(core) == "ready", 10)
    assert not eventually(lambda: state(core) != "ready", 3)
    assert len(left(core)) == 2
    lease.release()
    assert ended(core, 5)
    assert state(core) == "stopped"


def test_ends_a_server_that_ignores_sigterm(start: Start) -> None:
    core = start("stubborn", grace=0.5)
    assert eventually(lambda: state(core) == "ready", 10)
    assert ended(core, 20)


def test_does_not_end_while_a_client_joins(start: Start) -> None:
    core = start(grace=0.5)
    with FileLock(core.lock) as joining:
        assert joining.try_acquire()
        assert eventually(lambda: state(core) == "ready", 10)
        assert not eventually(lambda: state(core) != "ready", 2)
        lease = Lease(core.leases)
    assert not eventually(lambda: state(core) != "ready", 2)
    lease.release()


def test_reports_a_server_that_fails(start: Start) -> None:
    core = start("fails")
    assert ended(core, 10)
    status = core.read_status()
    assert status is not None
    assert (status.state, status.reason) == ("failed", "the server ended with exit status 3")


def test_killed_server_leaves_no_child(start: Start) -> None:
    core = start()
    lease = Lease(core.leases)
    assert eventually(lambda: state(core) == "ready" and len(left(core)) == 2, 10)
    status = core.read_status()
    assert status is not None
    assert status.server_pid is not None
    os.kill(status.server_pid, signal.SIGKILL)
    assert ended(core, 10)
    assert state(core) == "failed"
    lease.release()


def test_killed_supervisor_takes_the_server_along(start: Start) -> None:
    core = start()
    assert eventually(lambda: state(core) == "ready", 10)
    status = core.read_status()
    assert status is not None
    server = status.server_pid
    os.kill(status.supervisor_pid, signal.SIGKILL)
    assert eventually(lambda: server not in left(core), 10)
    # What the server did not end itself is found by the next start.
    assert len(left(core)) == 1


def test_an_idle_core_gives_its_store_up(start: Start) -> None:
    core = start(grace=60.0, store="/facts.db")
    assert eventually(lambda: state(core) == "ready", 10)
    other = CoreDir(core.path.with_name("other"))
    claim_store("/another.db", other)
    assert state(core) == "ready"
    claim_store("/facts.db", other)
    assert ended(core, 1)
    assert state(core) == "stopped"


def test_a_core_that_was_started_by_hand_keeps_its_store(tmp_path: Path) -> None:
    store = str(tmp_path / "facts.db")
    check_unlocked(store)
    with FileLock(tmp_path / "facts.db.lock") as lock:
        assert lock.try_acquire()
        lock.path.write_text("4711\n")
        with pytest.raises(StoreLocked, match=r"process 4711: connect to it with base_url="):
            check_unlocked(store)
    check_unlocked(store)


def test_a_used_core_keeps_its_store(start: Start) -> None:
    core = start(store="/facts.db")
    lease = Lease(core.leases)
    assert eventually(lambda: state(core) == "ready", 10)
    with pytest.raises(StoreLocked, match=r"in use by another core, for stand-in, with 1 user:"):
        claim_store("/facts.db", CoreDir(core.path.with_name("other")))
    lease.release()
