"""File locks that the kernel releases when their holder dies, whatever the way."""

import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from inferscale_core.client.errors import Timeout

_POLL = 0.05


class FileLock:
    """An exclusive ``flock`` on a file.

    The lock belongs to the open file: closing the last descriptor of it releases it, and a child
    process that inherited the descriptor holds it too. It is therefore released by closing, never
    by ``LOCK_UN``, which would take it from both.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    @property
    def fd(self) -> int | None:
        """Descriptor of the locked file; None while the lock is not held."""
        return self._fd

    def try_acquire(self) -> bool:
        """Take the lock if it is free; whether it is held now."""
        if self._fd is not None:
            return True
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True

    def acquire(self, timeout: float, what: str) -> None:
        """Wait for the lock.

        Args:
            timeout: seconds.
            what: names the thing waited for, in the message of ``Timeout``.
        """
        end = time.monotonic() + timeout
        while not self.try_acquire():
            if time.monotonic() >= end:
                raise Timeout(
                    f"{what} is still held by another process after {timeout:.0f} s "
                    f"(lock file {self.path})"
                )
            time.sleep(_POLL)

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock on a file (a file that is not there is free)."""
    if not path.exists():
        return True
    with FileLock(path) as lock:
        return lock.try_acquire()


class Lease:
    """Says that this process uses a core: a locked file of its own in the ``leases`` directory."""

    def __init__(self, directory: Path) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.pid = os.getpid()
        self._path = directory / f"{name}.lease"
        # Locked under a hidden name first: whoever counts leases never sees it free.
        self._lock = FileLock(directory / f".{name}")
        self._lock.try_acquire()
        self._lock.path.rename(self._path)

    def release(self) -> None:
        """Give the lease back; in a forked child, only its inherited share of it."""
        if self.pid == os.getpid():
            with suppress(FileNotFoundError):
                self._path.unlink()
        self._lock.release()


def held_leases(directory: Path) -> int:
    """How many leases are held; files that dead processes left are removed."""
    held = 0
    for path in directory.glob("*.lease"):
        lock = FileLock(path)
        try:
            if path.exists() and lock.try_acquire():
                with suppress(FileNotFoundError):
                    path.unlink()
            else:
                held += 1
        except FileNotFoundError:
            continue
        finally:
            lock.release()
    return held
