"""Reads a starting core's log: how far it is, and what went wrong."""

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from inferscale_core.client.errors import (
    AddressInUse,
    ModelNotFound,
    NotEnoughMemory,
    StartupError,
    StoreLocked,
    UnsupportedArchitecture,
)

_STAGES = [
    (re.compile(r"Resolved architecture: (\w+)"), "model configuration read ({0})"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"checkpoint shards:\s+(\d+)% Completed"), "loading the weights"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache of {0} tokens"),
    (re.compile(r"torch\.compile takes|Compiling a graph"), "compiling the model"),
    (re.compile(r"Capturing CUDA graphs?"), "capturing CUDA graphs"),
    (re.compile(r"init engine .* took"), "engine ready"),
    (re.compile(r"Starting vLLM (?:API )?server"), "opening the server"),
]


class Progress:
    """Shows the stages of a start: one line that changes on a terminal, else a line each."""

    def __init__(self, title: str, log: Path, shown: bool, out: TextIO | None = None) -> None:
        self._title = title
        self._log = log
        self._shown = shown
        self._out = out or sys.stderr
        self._tty = self._out.isatty()
        self._start = time.monotonic()
        self._offset = 0
        self._stage = "starting"
        self._said = False

    def update(self) -> None:
        """Read what the log has gained and show where the start is."""
        stage = self._stage
        for line in self._new_lines():
            for pattern, text in _STAGES:
                match = pattern.search(line)
                if match:
                    stage = text.format(*match.groups())
        changed, self._stage = stage != self._stage or not self._said, stage
        self._said = True
        if self._tty:
            self._say(f"\r\x1b[2K{self._line()}", end="")
        elif changed:
            self._say(self._line())

    def finish(self, outcome: str) -> None:
        """Close the display; nothing is said when the core was there at once."""
        if not self._said:
            return
        self._stage = outcome
        self._say(f"\r\x1b[2K{self._line()}" if self._tty else self._line())

    def _line(self) -> str:
        return f"inferscale: {self._title}: {self._stage} ({time.monotonic() - self._start:.0f} s)"

    def _say(self, text: str, end: str = "\n") -> None:
        if self._shown:
            print(text, end=end, file=self._out, flush=True)

    def _new_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as log:
                log.seek(self._offset)
                data = log.read(1 << 20)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace").splitlines()


@dataclass(frozen=True)
class _Cause:
    """A line of the log that says why the start failed, and what the user can do."""

    pattern: re.Pattern[str]
    error: type[StartupError]
    what: str
    todo: str


def _cause(pattern: str, error: type[StartupError], what: str, todo: str) -> _Cause:
    return _Cause(re.compile(pattern, re.IGNORECASE), error, what, todo)


_MORE_MEMORY = (
    "end other processes, or lower max_model_len, VLLM_CPU_KVCACHE_SPACE (GiB, CPU), "
    "gpu_memory_utilization (GPU) or the config's arena_bytes"
)

_CAUSES = [
    _cause(
        r"address already in use",
        AddressInUse,
        "the address of the core is taken by another process",
        "end that process, or serve on another --port",
    ),
    _cause(
        r"database is locked|fact store .* is in use",
        StoreLocked,
        "the fact store is in use by another core",
        "connect with the same configuration to share that core, or pass another store=",
    ),
    _cause(
        r"architectures? .*(is|are) not supported|does not recognize this architecture"
        r"|UnsupportedModelError: |InferScale (cannot|does not) support",
        UnsupportedArchitecture,
        "the model's architecture cannot be served",
        "use a decoder model with full or sliding-window attention that vLLM supports",
    ),
    _cause(
        r"Available memory on node|Free memory on device|No available memory for the cache"
        r"|out of memory|OutOfMemoryError|Cannot allocate memory|^.*\bMemoryError\b"
        r"|(larger|less) than the (available|maximum number of tokens).*KV cache"
        r"|KV cache is needed, which is larger",
        NotEnoughMemory,
        "the model, its KV cache and the arena do not fit in the free memory",
        _MORE_MEMORY,
    ),
    _cause(
        r"not a valid model identifier|Repository ?Not ?Found|LocalEntryNotFound"
        r"|OfflineMode|is not a local folder|Invalid repository ID|couldn't connect to"
        r"|Cannot find any model weights|Repo id must|Can't load the configuration"
        r"|Cannot reach http|Name or service not known|Temporary failure in name resolution",
        ModelNotFound,
        "the model was not found",
        "pass a directory with config.json and weights, a name that `inferscale models list` "
        "shows, or the id of a model on a hub that this machine reaches",
    ),
    _cause(
        r"arena_bytes=\d+ holds no token",
        StartupError,
        "the arena is too small",
        "raise the config's arena_bytes",
    ),
    _cause(
        r"torchvision::nms|libtorchcodec|torchaudio.*(undefined symbol|cannot open)",
        StartupError,
        "a torchvision, torchaudio or torchcodec build does not fit the installed torch",
        "text models need none of them: pip uninstall -y torchvision torchaudio torchcodec",
    ),
    _cause(
        r"StoreError: |EmbedderError: ",
        StartupError,
        "the facts cannot be served",
        "the line above says what to change",
    ),
    _cause(
        r"unrecognized arguments|error: argument|invalid choice|expected one argument",
        StartupError,
        "vLLM does not know an option or its value",
        "look the option up in vLLM's documentation for the installed version",
    ),
    _cause(
        r"No module named 'inferscale_core|No module named 'sqlalchemy|No module named 'sentence",
        StartupError,
        "the interpreter that runs vLLM lacks a part of InferScale",
        "install inferscale-adapters[cpu] or [cuda12] into it",
    ),
]

_NOISE = re.compile(r"^\s*$|Route:|DeprecationWarning|warnings\.warn")


def log_text(log: Path, limit: int = 1 << 20) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def diagnose(log: Path, model: str, reason: str | None) -> StartupError:
    """The typed error of a start that failed.

    Args:
        log: the core's log; only this start's lines are in it.
        reason: what the supervisor saw of the end, such as ``the server was ended by SIGKILL``.
    """
    lines = [line.strip() for line in log_text(log).splitlines() if not _NOISE.search(line)]
    tail = "\n".join(line[:300] for line in lines[-12:])
    about = f"the core for {model} did not start"
    for cause in _CAUSES:
        for line in lines:
            # vLLM prints its arguments and its help texts too; a cause stands in an error.
            if "non-default args" in line or not cause.pattern.search(line):
                continue
            text = f"{about}: {cause.what}: {_said(line)}\n{cause.todo}"
            return cause.error(text, log=log, tail=tail)
    if reason and "SIGKILL" in reason:
        return NotEnoughMemory(
            f"{about}: {reason}, most likely by the kernel for lack of memory\n{_MORE_MEMORY}",
            log=log,
            tail=tail,
        )
    raised = [line for line in map(_said, lines) if re.match(r"[\w.]+(Error|Exception): ", line)]
    said = raised[-1] if raised else reason or "no reason given"
    return StartupError(f"{about}: {said}", log=log, tail=tail)


def _said(line: str) -> str:
    """A line of the log without vLLM's prefix (process, level, time, place)."""
    return re.sub(r"^\(.*?\) \w+ [\d-]+ [\d:]+ \[[^\]]*\] ", "", line)[:500]
