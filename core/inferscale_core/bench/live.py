"""A running core as a user meets it: over HTTP, streaming, timed from outside."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from inferscale_core.bench.dataset import Fact
from inferscale_core.bench.errors import BenchError
from inferscale_core.client import Client, connect
from inferscale_core.client.models import MemoryReport, Scope

STALLED_AFTER = 300.0
"""Seconds without one more fact encoded after which storing gives up."""

Progress = Callable[[int, int], None]
"""``(done, total)``."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer. ``ttft`` is the time to the first token with text, in seconds."""

    text: str
    ttft: float
    seconds: float
    report: MemoryReport


class LiveCore:
    """A core and one scope in it, whose facts are the benchmark's own."""

    def __init__(self, client: Client, scope: Scope, base_url: str | None = None) -> None:
        self.client = client
        self.scope = scope
        self._base_url = base_url

    def store(self, facts: Sequence[Fact], progress: Progress) -> None:
        """Store facts and wait until each has its KV and nothing is encoded any more.

        Raises BenchError when a fact failed for good, or when nothing moves any more.
        """
        self.client.add([fact.memory() for fact in facts], scope=self.scope)
        last, moved = (-1, 0), time.monotonic()
        while True:
            status = self.client.status(scope=self.scope)
            ready = status.facts.get("ready", 0)
            progress(ready, len(facts))
            if ready >= len(facts) and not status.outgrown:
                return
            if (ready, status.outgrown) != last:
                last, moved = (ready, status.outgrown), time.monotonic()
            waiting = status.facts.get("pending", 0) + status.facts.get("stale", 0)
            if status.facts.get("failed") and not waiting:
                raise BenchError(f"facts were not encoded: {self._first_failure()}")
            if time.monotonic() - moved > STALLED_AFTER:
                raise BenchError(
                    f"no fact was encoded for {STALLED_AFTER:.0f} s ({ready} of "
                    f"{len(facts)} are ready, {status.facts}); look at the core's log"
                )
            time.sleep(0.25)

    def _first_failure(self) -> str:
        for memory in self.client.list(scope=self.scope, limit=10_000).memories:
            if memory.kv_state == "failed":
                return f"{memory.kv_reason} ({memory.text[:80]!r})"
        return "no reason given"

    def ask(self, question: str, *, plain: bool = False, **options: Any) -> Answer:
        """One streamed greedy answer; ``plain`` sends no memory field at all.

        ``options`` are those of ``Client.chat`` and OpenAI's. Raises BenchError when the answer
        has no token.
        """
        who = {} if plain else {"scope": self.scope}
        start = time.perf_counter()
        first: float | None = None
        text, report = "", MemoryReport()
        with self.client.chat(question, stream=True, temperature=0, **who, **options) as chunks:
            for chunk in chunks:
                if chunk.get("inferscale"):
                    report = MemoryReport.model_validate(chunk["inferscale"])
                for choice in chunk.get("choices", ()):
                    content = (choice.get("delta") or {}).get("content")
                    if content:
                        first = first or time.perf_counter()
                        text += content
        end = time.perf_counter()
        if first is None:
            raise BenchError(f"the model answered {question!r} with nothing")
        return Answer(text.strip(), first - start, end - start, report)

    def memcpy_ms(self, num_bytes: int) -> tuple[float, str]:
        """Median time of a plain copy of ``num_bytes``, and where it was measured.

        Measured by the worker, in the process that writes KV; a core that cannot is replaced by
        one thread of this process.
        """
        uds = str(self.client.core.socket) if self.client.core is not None else None
        transport = httpx.HTTPTransport(uds=uds) if uds else None
        base_url = "http://inferscale" if uds else (self._base_url or "").removesuffix("/v1")
        try:
            with httpx.Client(base_url=base_url, transport=transport, timeout=60) as http:
                answer = http.get("/v1/inferscale/memcpy", params={"bytes": num_bytes})
                if answer.status_code == httpx.codes.OK:
                    return float(answer.json()["ms"]), "worker"
        except (httpx.HTTPError, KeyError, ValueError):
            pass
        return _own_memcpy_ms(num_bytes), "bench process"

    def forget(self) -> None:
        """Delete the benchmark's facts."""
        self.client.delete_all(scope=self.scope)


@contextmanager
def live_core(model: str, purpose: str, base_url: str | None = None) -> Iterator[LiveCore]:
    """A core for ``model``, found or started; the facts stored in it are deleted at the end."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    client = connect(base_url=base_url) if base_url else connect(model=model)
    with client:
        core = LiveCore(client, Scope(tenant="inferscale-bench", user=purpose), base_url)
        core.forget()
        try:
            yield core
        finally:
            core.forget()


def _own_memcpy_ms(num_bytes: int, repeats: int = 9) -> float:
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.zeros(num_bytes, dtype=np.uint8)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times[1:]))
