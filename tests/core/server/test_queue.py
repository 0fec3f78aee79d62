"""The encode queue and what the engine says it lost.

The engine is a stand-in whose reports are scripted, for orders of events that a real one gives
only now and then; the store, the index and the queue are the real ones.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferscale_core.client.models import MemoryIn
from inferscale_core.config import CoreConfig
from inferscale_core.encoding.plan import EncodingRequest
from inferscale_core.facts.errors import StoreError
from inferscale_core.facts.index import EmbeddingIndex
from inferscale_core.facts.records import segment_key
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore
from inferscale_core.server import queue as module
from inferscale_core.server.engine import CaptureReport, Segment
from inferscale_core.server.queue import EncodeQueue
from inferscale_core.server.traffic import Traffic

EWA = Scope(user="ewa")


class Template:
    def header_ids(self) -> list[int]:
        return [1, 2, 3]

    def line_ids(self, line: str) -> tuple[int, ...]:
        return tuple(line.encode())


class Engine:
    """Captures everything; ``evicts`` gives the segments that a capture's report names."""

    def __init__(self) -> None:
        self.queue: EncodeQueue | None = None
        self.captures: list[list[str]] = []
        self.evicts: Callable[[int, list[str]], list[str]] = lambda number, keys: []

    async def capture(
        self, ns: str, epoch: int, request: EncodingRequest, timeout: float
    ) -> CaptureReport:
        self.captures.append(request.lines)
        lost: list[Segment] = [(ns, k) for k in self.evicts(len(self.captures), request.lines)]
        assert self.queue is not None
        if lost:
            self.queue.evicted(lost)
        return CaptureReport({span.key for span in request.spans}, {})

    async def drop(self, *args: Any, **options: Any) -> None: ...


class Bench:
    """A queue at work."""

    def __init__(self, path: Path) -> None:
        self.store = FactStore(path / "facts.db")
        self.index = EmbeddingIndex(4)
        self.engine = Engine()
        self.queue = EncodeQueue(
            CoreConfig(), self.store, self.index, Template(), self.engine, Traffic(),  # type: ignore[arg-type]
            self.run, 2048,
        )  # fmt: skip
        self.engine.queue = self.queue

    async def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(call, *args, **options)

    async def add(self, text: str) -> None:
        vector = np.full((1, 4), 0.5, np.float32)
        (memory,) = (await self.run(self.store.add, EWA, [MemoryIn(text=text)], vector)).memories
        self.index.upsert([memory.id], [EWA], vector, "memories")
        self.queue.notify()

    def states(self) -> dict[str, tuple[str, str | None]]:
        return {m.text: (m.kv_state, m.kv_reason) for m in self.store.list(EWA)[0]}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not await self.run(condition):
                await asyncio.sleep(0.02)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(module, "STORE_RETRY", 0.05)
    bench = Bench(tmp_path)
    bench.queue.start()
    yield bench
    await bench.queue.close()
    bench.store.close()


async def test_a_fact_that_evicted_its_own_old_kv_is_ready(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.store.mark_pending

    def slowly(*args: Any) -> int:
        time.sleep(0.3)
        return real(*args)

    monkeypatch.setattr(bench.store, "mark_pending", slowly)
    first = segment_key("- a\n")
    # The third capture encodes a again, among b.
    bench.engine.evicts = lambda number, keys: keys if number == 3 else []
    await bench.add("a")
    await bench.until(lambda: bench.states()["a"][0] == "ready")
    await bench.add("b")
    await bench.until(lambda: len(bench.engine.captures) == 3)
    assert bench.engine.captures[2] == [first]
    await asyncio.sleep(0.6)
    assert bench.states() == {"a": ("ready", None), "b": ("ready", None)}


async def test_an_eviction_is_written_down_once_the_store_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = bench.store.mark_pending, [1, 1, 1]

    def failing(*args: Any) -> int:
        if failures:
            failures.pop()
            raise StoreError("database or disk is full")
        return real(*args)

    monkeypatch.setattr(bench.store, "mark_pending", failing)
    await bench.add("a")
    await bench.until(lambda: bench.states()["a"][0] == "ready")
    bench.queue.evicted([(EWA.key, segment_key("- a\n"))])
    await bench.until(lambda: bench.states()["a"] == ("pending", "evicted"))
    assert not failures
    await bench.queue.wake("default", [bench.store.list(EWA)[0][0].id])
    await bench.until(lambda: bench.states()["a"][0] == "ready")
