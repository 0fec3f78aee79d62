"""One fact store, one core: what to do about another core that holds the store."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from inferscale_core.client.errors import StartupError, StoreLocked
from inferscale_core.client.locks import FileLock, held_leases, is_free
from inferscale_core.client.rundir import CoreDir

_END_TIMEOUT = 30.0
_TICK = 0.1


def _store_of(core: CoreDir) -> str | None:
    try:
        return json.loads(core.spec.read_text()).get("store")
    except (OSError, ValueError, AttributeError):
        return None


def claim_store(store: str, claimant: CoreDir) -> None:
    """Make sure that no other private core of this user holds a fact store.

    A core of another configuration that nobody uses any more, and that only waits for its idle
    time to pass, is ended now.

    Raises:
        StoreLocked: a core with users holds it.
        StartupError: an idle one does not end.
    """
    for path in claimant.path.parent.glob("*"):
        core = CoreDir(path)
        if path == claimant.path or _store_of(core) != store or is_free(core.supervisor_lock):
            continue
        with FileLock(core.lock) as lock:
            lock.acquire(_END_TIMEOUT, "the directory of the core that has the fact store")
            status, users = core.read_status(), held_leases(core.leases)
            if status is None or is_free(core.supervisor_lock):
                continue
            if users or not status.supervisor_pid:
                raise StoreLocked(
                    f"the fact store {store} is in use by another core, for {status.model}, "
                    f"with {users} {'user' if users == 1 else 'users'}: connect with the same "
                    "configuration to share that core, close its clients, or pass another store="
                )
            with suppress(ProcessLookupError):
                os.kill(status.supervisor_pid, signal.SIGTERM)
        _wait_for_end(core, Path(store))


def check_unlocked(store: str) -> None:
    """Raise StoreLocked when a core that was started by hand holds a fact store.

    It would be told by the new core itself, but only once the model is loaded.
    """
    lock = Path(store + ".lock")
    holder = ""
    try:
        if is_free(lock):
            return
        holder = lock.read_text().strip()
    except OSError:  # another user's, which the core will say
        return
    raise StoreLocked(
        f"the fact store {store} is in use by another core, process {holder or 'unknown'}: "
        "connect to it with base_url=, end it, or pass another store="
    )


def _wait_for_end(core: CoreDir, store: Path) -> None:
    end = time.monotonic() + _END_TIMEOUT
    while not is_free(core.supervisor_lock):
        if time.monotonic() > end:
            raise StartupError(
                f"the idle core that holds the fact store {store} does not end", log=core.log
            )
        time.sleep(_TICK)
