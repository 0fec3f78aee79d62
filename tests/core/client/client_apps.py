"""App processes that connect to a core, and waiting for what happens next."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

APP = Path(__file__).with_name("app_process.py")


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true within some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


class App:
    """A process of its own that uses the client; takes commands, answers in JSON lines."""

    def __init__(self, model: str, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(APP), model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the app ended with {self.process.wait()}"
        return json.loads(line)

    def do(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        """End it as kill -9 does: nothing of it runs any more, no cleanup, no atexit."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
