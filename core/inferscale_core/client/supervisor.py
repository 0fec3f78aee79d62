"""Keeps a private core alive while somebody uses it, and leaves nothing of it behind.

Runs as ``python -m inferscale_core.client.supervisor DIRECTORY LOCK_FD``: the starter has locked
``supervisor.lock`` and hands the descriptor over, so that at no moment two supervisors run. It
starts vLLM's API server in a process group of its own, reports through ``status.json``, and ends
the group when no lease has been held for the grace time, when the API server has died, or when
it is told to (SIGTERM). The API server is killed when the supervisor dies: a gentler end would
wait for open streams, and the facts are on disk.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferscale_core.client.locks import FileLock, held_leases
from inferscale_core.client.rundir import (
    CORE_ENV,
    CoreDir,
    State,
    Status,
    core_processes,
    free_socket,
    kill,
)

TICK = 0.2
TERM_GRACE = 8.0
"""Seconds between SIGTERM and SIGKILL."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """``prctl(2)``; a kernel without the option leaves things as they are."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def server_answers(path: str) -> bool:
    """Whether ``GET /health`` on the socket is answered with 200."""
    request = b"GET /health HTTP/1.0\r\nHost: inferscale\r\n\r\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5.0)
            connection.connect(path)
            connection.sendall(request)
            return b" 200 " in connection.recv(64).split(b"\r\n")[0]
    except OSError:
        return False


class Supervisor:
    """The life of one core, from its spec to its last process."""

    def __init__(self, core: CoreDir, lock_fd: int) -> None:
        self._core = core
        self._lock_fd = lock_fd
        self._spec: dict[str, Any] = json.loads(core.spec.read_text())
        self._grace = float(self._spec["idle_grace"])
        self._server: subprocess.Popen[bytes] | None = None
        self._exit: int | None = None
        self._told_to_end = False
        self._status = Status(
            state="starting",
            socket=self._spec["socket"],
            supervisor_pid=os.getpid(),
            session=os.getsid(0),
            model=self._spec.get("model"),
        )

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._report("starting")
        try:
            free_socket(Path(self._status.socket))
            self._start_server()
            reason = self._watch()
            state: State = "failed" if reason else "stopped"
        except Exception as error:
            reason, state = f"{type(error).__name__}: {error}", "failed"
        self._end_server()
        with suppress(OSError):
            Path(self._status.socket).unlink()
        self._report(state, reason=reason)
        os.close(self._lock_fd)

    def _on_sigterm(self, *_: object) -> None:
        self._told_to_end = True

    def _report(self, state: State, reason: str | None = None) -> None:
        self._status = replace(self._status, state=state, reason=reason)
        self._core.write_status(self._status)

    def _start_server(self) -> None:
        environment = {**os.environ, **self._spec["env"], CORE_ENV: str(self._core.path)}

        def die_with_supervisor() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        self._server = subprocess.Popen(
            self._spec["argv"],
            env=environment,
            cwd=self._spec["cwd"],
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=die_with_supervisor,  # safe: this process has one thread
        )
        self._status = replace(self._status, server_pid=self._server.pid)
        self._report("starting")

    def _watch(self) -> str | None:
        """Returns when the core has to end; why, if that is a failure."""
        last_used = time.monotonic()
        while True:
            self._reap()
            if self._exit is not None:
                return _exit_reason(self._exit)
            if self._told_to_end:
                self._report("stopping")
                return None
            if self._status.state == "starting" and server_answers(self._status.socket):
                self._report("ready")
            if held_leases(self._core.leases):
                last_used = time.monotonic()
            elif time.monotonic() - last_used > self._grace and self._nobody_joins():
                return None
            time.sleep(TICK)

    def _nobody_joins(self) -> bool:
        """Decide to end, unless a client holds the lock that it needs to join."""
        with FileLock(self._core.lock) as lock:
            if not lock.try_acquire() or held_leases(self._core.leases):
                return False
            self._report("stopping")
            return True

    def _reap(self) -> None:
        """Collect children that ended; the engine's become ours when the API server dies."""
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._server is not None and pid == self._server.pid:
                self._exit = os.waitstatus_to_exitcode(code)

    def _end_server(self) -> None:
        if self._server is None:
            return
        # A dead API server cannot end its engine in order any more.
        soft = self._exit is None
        for sig, seconds in ((signal.SIGTERM, TERM_GRACE if soft else 1.0), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._server.pid, sig)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._reap()
                left = core_processes(self._core.path, self._status.session)
                if not left and self._exit is not None:
                    return
                if sig is signal.SIGKILL:
                    kill(left)
                time.sleep(0.1)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the server ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the server was ended by {name}"


def main() -> None:
    directory, lock_fd = sys.argv[1], int(sys.argv[2])
    # The app that started us neither waits for us nor shares its signal settings.
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for sig in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(sig, signal.SIG_DFL)
    os.set_inheritable(lock_fd, False)
    Supervisor(CoreDir(Path(directory)), lock_fd).run()


if __name__ == "__main__":
    main()
