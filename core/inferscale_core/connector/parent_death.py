"""A private core's engine processes end with the process that started them."""

import ctypes
import os
import signal
import sys

PARENT_DEATH_ENV = "INFERSCALE_PARENT_DEATH"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux, ``prctl(2)``).

    Only when ``INFERSCALE_PARENT_DEATH=1``: killing the API server with -9 would otherwise leave
    the engine core and its workers running. Not in the process that set the variable itself.
    """
    if os.environ.get(PARENT_DEATH_ENV) != "1" or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
