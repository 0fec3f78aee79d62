"""Where a private core keeps its lock, status, log and socket."""

import json
import os
import signal
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from inferscale_core.client.errors import AddressInUse, StartupError
from inferscale_core.config import home

SUN_PATH_MAX = 107
"""Longest path of a Unix socket, bytes (``sun_path`` holds 108 with its NUL)."""

CORE_ENV = "INFERSCALE_CORE_DIR"
"""In the environment of a private core's processes; holds the core's directory."""

State = Literal["starting", "ready", "stopping", "stopped", "failed"]


@dataclass(frozen=True)
class Status:
    """What the supervisor of a core says about it; written by the supervisor alone."""

    state: State
    socket: str
    supervisor_pid: int = 0
    session: int = 0
    server_pid: int | None = None
    reason: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class CoreDir:
    """Paths of one configuration's core: ``home()/cores/<digest>``."""

    path: Path

    @classmethod
    def of(cls, digest: str) -> "CoreDir":
        return cls(home().absolute() / "cores" / digest[:32])

    @property
    def lock(self) -> Path:
        """Held for the moments in which somebody joins, starts or ends the core."""
        return self.path / "lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor for its whole life."""
        return self.path / "supervisor.lock"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        return self.path / "core.log"

    @property
    def leases(self) -> Path:
        return self.path / "leases"

    def create(self) -> None:
        """Make the directories, readable by this user alone.

        Raises:
            StartupError: they cannot be made or written.
        """
        try:
            self.leases.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise StartupError(
                f"cannot write the directory of the core, {self.path} ({error.strerror}); "
                "set INFERSCALE_HOME to a directory that you own"
            ) from error

    def read_status(self) -> Status | None:
        try:
            return Status(**json.loads(self.status_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_status(self, status: Status) -> None:
        write_json(self.status_file, asdict(status))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)


def _own_directory(path: Path) -> bool:
    """Make ``path``; whether it is a directory of this user that nobody else can enter."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        return False
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return True


def socket_path(digest: str) -> Path:
    """Where a core's socket goes: short, and in a directory of this user alone.

    Raises:
        StartupError: there is no such place.
    """
    name = f"{digest[:12]}.sock"
    tried = []
    bases = []
    if os.environ.get("XDG_RUNTIME_DIR"):
        bases.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "inferscale")
    for temporary in (tempfile.gettempdir(), "/tmp"):
        bases.append(Path(temporary) / f"inferscale-{os.getuid()}")
    for base in bases:
        path = base.absolute() / name
        if len(os.fsencode(path)) > SUN_PATH_MAX:
            tried.append(f"{base}: the path would have more than {SUN_PATH_MAX} bytes")
        elif not _own_directory(base):
            tried.append(f"{base}: not a directory of this user")
        else:
            return path
    raise StartupError("no directory for the socket of the core: " + "; ".join(tried))


def free_socket(path: Path) -> None:
    """Remove the socket file that a dead core left.

    Raises:
        AddressInUse: something else is there, or a server answers.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(
            f"{path} should be the socket of the core and is something else; remove it"
        )
    if listens(path):
        raise AddressInUse(
            f"another server listens on {path}, and no supervisor of this core runs; end it"
        )
    with suppress(FileNotFoundError):
        path.unlink()


def listens(path: Path) -> bool:
    """Whether a server accepts connections on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(os.fspath(path))
        except OSError:
            return False
        return True


def core_processes(directory: Path, session: int) -> list[int]:
    """Ids of the living processes of a core but its supervisor and this process (Linux).

    The API server and its helpers carry ``CORE_ENV`` in their environment. vLLM's engine and
    workers overwrite theirs with a title; they are known by it and by the supervisor's session.
    """
    mark = os.fsencode(f"{CORE_ENV}={directory}")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            if entry.stat().st_uid != os.getuid() or int(entry.name) == os.getpid():
                continue
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            state, its_session = fields[0], int(fields[3])
            titled = (entry / "cmdline").read_bytes().startswith(b"VLLM::")
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            if state != "Z" and (marked or (titled and its_session == session)):
                found.append(int(entry.name))
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL processes; one that has ended meanwhile is fine."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
