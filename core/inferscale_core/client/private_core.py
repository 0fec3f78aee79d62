"""A private core: found or started, shared by processes, gone with its last user."""

import atexit
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferscale_core.client import rundir
from inferscale_core.client.errors import ConnectionFailed, InferScaleError, StartupError
from inferscale_core.client.launch import (
    check_cpu_memory,
    check_model,
    interpreter,
    named_options,
    probe,
    server_argv,
    server_env,
)
from inferscale_core.client.locks import FileLock, Lease, is_free
from inferscale_core.client.rundir import CoreDir, Status
from inferscale_core.client.startup import Progress, diagnose
from inferscale_core.client.stores import check_unlocked, claim_store
from inferscale_core.config import CoreConfig, home

IDLE_GRACE_ENV = "INFERSCALE_IDLE_GRACE"
IDLE_GRACE = 10.0
"""Seconds without a user after which a private core ends."""

_JOIN_TIMEOUT = 120.0
_TICK = 0.1

_SHAPING_ENV = ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
"""Inherited variables that make another core of the same arguments."""


@dataclass(frozen=True)
class CoreSpec:
    """The full configuration of a private core; equal ones share a core."""

    model: str
    config: CoreConfig
    names: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    python: str = field(default_factory=lambda: interpreter(None))

    @property
    def digest(self) -> str:
        """Hex SHA-256 over everything that makes one core differ from another."""
        content = {
            "home": str(home().absolute()),
            "model": self.model,
            "config": self.config.model_dump(mode="json"),
            "names": self.names,
            "options": self.options,
            "arguments": self.arguments,
            "python": self.python,
            "env": {name: os.environ.get(name) for name in _SHAPING_ENV},
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()


class PrivateCore:
    """One configuration's core, as the clients of this process use it.

    All of them share one lease; the core's supervisor ends it when no process holds one.
    """

    def __init__(self, spec: CoreSpec) -> None:
        self.spec = spec
        self.digest = spec.digest
        self.directory = CoreDir.of(self.digest)
        self.socket = Path()
        self.users = 0
        self._mutex = threading.RLock()
        self._lease: Lease | None = None
        self._start_timeout = 600.0

    @property
    def status(self) -> Status | None:
        """What the supervisor last reported."""
        return self.directory.read_status()

    @property
    def log(self) -> Path:
        return self.directory.log

    def start(
        self, timeout: float, progress: bool, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Join the running core of this configuration or start one; returns when it serves.

        Raises:
            StartupError: with the cause as its type, where the log tells it.
        """
        self._start_timeout = timeout
        end = time.monotonic() + timeout
        if not self._mutex.acquire(timeout=timeout):
            raise StartupError(f"another thread still starts the core after {timeout:.0f} s")
        try:
            self.directory.create()
            self._join(min(end, time.monotonic() + _JOIN_TIMEOUT))
            self._wait_until_ready(end, progress, cancelled)
        except BaseException:
            if self.users <= 1:
                self._drop_lease()
            raise
        finally:
            self._mutex.release()

    def ensure_lease(self) -> None:
        """Take a lease of this process's own; in a forked child the parent's does not count."""
        with self._mutex:
            if self._lease is None or self._lease.pid != os.getpid():
                self.start(self._start_timeout, progress=False)

    def revive(self) -> None:
        """Start the core again after it went away; returns when it serves.

        Raises:
            StartupError: it does not start.
            ConnectionFailed: it runs, and does not answer.
        """
        with self._mutex:
            end = time.monotonic() + 15.0
            while not self._accepts():
                # The supervisor needs a moment to notice that the server is gone.
                if time.monotonic() > end:
                    raise ConnectionFailed(
                        f"the core on {self.socket} does not accept connections, and its "
                        f"supervisor says it is {self.status}; see {self.log}"
                    )
                time.sleep(2 * _TICK)
                self.start(self._start_timeout, progress=False)

    def release(self) -> None:
        """One client less; the last one gives the lease back."""
        with _registry_lock:
            self.users = max(0, self.users - 1)
            if self.users == 0:
                _registry.pop(self.digest, None)
                self._drop_lease()

    def _accepts(self) -> bool:
        status = self.status
        if status is None or status.state != "ready" or is_free(self.directory.supervisor_lock):
            return False
        return rundir.listens(self.socket)

    def _join(self, end: float) -> None:
        """Hold a lease on a core that starts or runs; start one if none does."""
        while True:
            with FileLock(self.directory.lock) as lock:
                lock.acquire(max(0.0, end - time.monotonic()), "the core's directory")
                if self._lease is None or self._lease.pid != os.getpid():
                    self._drop_lease()
                    self._lease = Lease(self.directory.leases)
                with FileLock(self.directory.supervisor_lock) as supervisor:
                    if supervisor.try_acquire():
                        self._spawn(supervisor)
                        return
                status = self.status
                if status is not None and status.state in ("starting", "ready"):
                    return
            if time.monotonic() > end:
                raise StartupError(
                    f"the previous core of this configuration does not end (supervisor: {status})",
                    log=self.log,
                )
            time.sleep(_TICK)

    def _spawn(self, supervisor: FileLock) -> None:
        """Start the supervisor, which inherits the held ``supervisor`` lock."""
        spec, directory = self.spec, self.directory
        check_model(spec.model)
        engine = probe(spec.python)
        options = dict(spec.options)
        if spec.names and "served-model-name" not in named_options(spec.arguments):
            options.setdefault("served_model_name", list(spec.names))
        options.setdefault("disable_uvicorn_access_log", True)
        store = str(spec.config.store_path)
        claim_store(store, directory)
        self._end_leftovers(self.status)
        check_unlocked(store)
        path = rundir.socket_path(self.digest)
        rundir.free_socket(path)
        argv = server_argv(
            engine, spec.model, spec.config, options, [*spec.arguments, "--uds", str(path)]
        )
        env = server_env(engine, argv)
        if engine.cpu:
            check_cpu_memory(spec.model, spec.config, env)
        grace = _idle_grace()
        rundir.write_json(
            directory.spec,
            {
                "argv": argv,
                "env": env,
                "cwd": os.getcwd(),
                "socket": str(path),
                "model": spec.model,
                "store": store,
                "idle_grace": grace,
            },
        )
        directory.write_status(Status(state="starting", socket=str(path), model=spec.model))
        with suppress(FileNotFoundError):
            directory.log.replace(directory.log.with_name("core.log.1"))
        fd = supervisor.fd
        if fd is None:
            raise AssertionError("the supervisor's lock is not held")
        with directory.log.open("wb") as log:
            starter = subprocess.Popen(
                [
                    sys.executable or spec.python,
                    "-m",
                    "inferscale_core.client.supervisor",
                    str(directory.path),
                    str(fd),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[fd],
                start_new_session=True,
            )
        try:
            # It forks once and goes on in the background.
            starter.wait(timeout=60)
        except subprocess.TimeoutExpired as error:
            starter.kill()
            raise StartupError("the supervisor did not start", log=directory.log) from error

    def _end_leftovers(self, status: Status | None) -> None:
        """End what outlived a supervisor that was itself killed."""
        session = status.session if status is not None else 0
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            left = rundir.core_processes(self.directory.path, session)
            if not left:
                return
            rundir.kill(left)
            time.sleep(_TICK)

    def _wait_until_ready(self, end: float, progress: bool, cancelled: Callable[[], bool]) -> None:
        """Follow the start; the state is the supervisor's, its absence means that it died."""
        shown = Progress(f"core for {Path(self.spec.model).name}", self.log, progress)
        try:
            while True:
                alive = not is_free(self.directory.supervisor_lock)
                status = self.status
                if status is not None and status.state == "ready" and alive:
                    self.socket = Path(status.socket)
                    shown.finish("ready")
                    return
                if status is None or status.state in ("failed", "stopped") or not alive:
                    reason = status.reason if status is not None else None
                    raise diagnose(self.log, self.spec.model, reason or "its supervisor ended")
                if cancelled():
                    raise StartupError("the start was cancelled")
                if time.monotonic() > end:
                    raise StartupError(
                        f"the core for {self.spec.model} was not ready within "
                        f"{self._start_timeout:.0f} s; pass a longer start_timeout",
                        log=self.log,
                    )
                shown.update()
                time.sleep(_TICK)
        except BaseException:
            shown.finish("failed")
            raise

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def after_fork_in_child(self) -> None:
        """A forked child may use the client that it inherited: it gets a lease of its own."""
        self._mutex = threading.RLock()
        inherited, self._lease = self._lease, None
        if inherited is None:
            return
        with suppress(OSError):
            self._lease = Lease(self.directory.leases)
        inherited.release()


_registry: dict[str, PrivateCore] = {}
_registry_lock = threading.RLock()


def use_core(
    spec: CoreSpec,
    timeout: float,
    progress: bool,
    cancelled: Callable[[], bool] = lambda: False,
) -> PrivateCore:
    """The core of a configuration, running, with one more user in this process."""
    digest = spec.digest
    with _registry_lock:
        core = _registry.setdefault(digest, PrivateCore(spec))
        core.users += 1
    try:
        core.start(timeout, progress, cancelled)
    except BaseException:
        core.release()
        raise
    return core


def _idle_grace() -> float:
    text = os.environ.get(IDLE_GRACE_ENV)
    try:
        return IDLE_GRACE if not text else max(0.0, float(text))
    except ValueError as error:
        raise StartupError(f"{IDLE_GRACE_ENV}={text!r} is not a number of seconds") from error


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.RLock()
    for core in _registry.values():
        core.after_fork_in_child()


def _at_exit() -> None:
    for core in list(_registry.values()):
        with suppress(OSError, InferScaleError):
            core.users = 1
            core.release()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
