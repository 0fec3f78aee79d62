"""Processes of a bounded time, ended with all that they started."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence


def run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str]
) -> tuple[int | None, list[str]]:
    """Exit status, None where the time was up, and the lines printed.

    Raises:
        OSError: the command cannot be started.

    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own: what the command starts ends with it.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.0, seconds))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().splitlines()
