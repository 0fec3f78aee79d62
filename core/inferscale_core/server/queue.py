"""The encode queue: computes the KV of stored facts while nobody waits for an answer.

The queue itself is the pending rows of the fact store, so it survives restarts. This module takes
facts from it, sends encoding requests and writes down what became of them.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from inferscale_core.config import CoreConfig
from inferscale_core.encoding.plan import EncodingRequest, LineTooLongError, plan_encoding
from inferscale_core.encoding.template import PromptTemplate
from inferscale_core.encoding.windows import WindowItem, window_builder, within_budget
from inferscale_core.facts.errors import StoreError
from inferscale_core.facts.index import EmbeddingIndex
from inferscale_core.facts.records import EVICTED, Claim, Forgotten, segment_key
from inferscale_core.facts.store import FactStore
from inferscale_core.server.engine import CAPTURE_TOKENS, CaptureReport, EngineMessages, Segment
from inferscale_core.server.errors import QueueFullError
from inferscale_core.server.fact_windows import FactWindows
from inferscale_core.server.traffic import Traffic

logger = logging.getLogger(__name__)

IN_FLIGHT = {"cpu": 2}
IN_FLIGHT_ELSEWHERE = 16
"""Encoding requests in the engine at once, by device. A CPU gains nothing from a batch: one runs
while the next is prepared."""

PATIENCE = 1.0
"""Seconds that an encoding waits for questions to end before it runs beside them."""

CAPTURE_TIMEOUT = 300.0
DROP_TIMEOUT = 30.0

FIRST_RETRY = 0.5
LONGEST_RETRY = 300.0

STORE_RETRY = 5.0
"""Seconds to wait when the fact store cannot be read or written."""

IDLE_POLL = 30.0
"""Seconds between looks at the queue when nothing announces work."""

_PERMANENT = ("span outside", "not_text", "bad_salt", "no_scope")
"""How reasons of the connector begin that another try would meet again."""

_LASTING = ("arena full",)
"""How reasons begin that only time or another setting can change."""

Run = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class _Prepared:
    """A request, the claims it encodes, and by claim id ``(fact id, line)`` of what stands before
    it and how many facts that was chosen from."""

    request: EncodingRequest
    claims: list[Claim]
    behind: dict[str, list[tuple[str, str]]]
    peers: dict[str, int]


class EncodeQueue:
    """Encodes pending facts, in order of arrival, one namespace per request.

    Everything but ``start`` and ``close`` is called on the event loop. ``run`` calls a blocking
    function in a thread of the service's pool.
    """

    def __init__(
        self,
        config: CoreConfig,
        store: FactStore,
        index: EmbeddingIndex,
        template: PromptTemplate,
        engine: EngineMessages,
        traffic: Traffic,
        run: Run,
        max_model_len: int,
        in_flight: int = IN_FLIGHT["cpu"],
    ) -> None:
        self._config = config
        self._store = store
        self._index = index
        self._template = template
        self._engine = engine
        self._traffic = traffic
        self._run = run
        self._max_prompt = max_model_len - CAPTURE_TOKENS
        self._windows = window_builder(config.window)
        self._work = asyncio.Event()
        self._changed = asyncio.Condition()
        self._changes = 0
        self._slots = asyncio.Semaphore(in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._main = asyncio.create_task(self._loop(), name="inferscale-encode-queue")
        self.notify()

    async def close(self) -> None:
        """Stop; what was not finished is pending when the store is opened again."""
        tasks = [t for t in (self._main, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def notify(self) -> None:
        """There may be something to encode."""
        self._work.set()

    async def check_room(self, count: int) -> None:
        """Raises QueueFullError when ``count`` more facts would not fit in the queue."""
        waiting = await self._run(self._store.queue_depth)
        if waiting + count > self._config.max_queue:
            raise QueueFullError(
                f"{waiting} facts wait to be encoded and the queue takes "
                f"{self._config.max_queue}; send fewer, or later (max_queue)",
                retry_after=5,
            )

    async def wait(self, tenant: str, ids: Sequence[str], timeout: float) -> None:
        """Return once no fact of ``ids`` waits for its KV, or after ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    seen = self._changes
                    if not await self._run(self._waiting, tenant, ids):
                        return
                    async with self._changed:
                        # Awaited before `seen` changes again, so the closure is safe.
                        await self._changed.wait_for(lambda: self._changes != seen)  # noqa: B023

    def _waiting(self, tenant: str, ids: Sequence[str]) -> bool:
        return any(
            m.kv_state in ("pending", "stale") and m.kv_reason != EVICTED
            for m in self._store.get_many(ids, tenant)
        )

    def evicted(self, segments: list[Segment]) -> None:
        """The arena gave segments up: their facts wait for a question to retrieve them."""
        self._lost(segments, EVICTED)

    def missing(self, segments: list[Segment]) -> None:
        """Segments taken for resident are not: encode them again."""
        self._lost(segments, "not resident")

    def _lost(self, segments: list[Segment], reason: str) -> None:
        task = self._spawn(self._mark_pending(segments, reason))
        self._losses.add(task)
        task.add_done_callback(self._losses.discard)

    async def wake(self, tenant: str, ids: Sequence[str]) -> None:
        """A question retrieved these facts: encode those that were evicted."""
        if await self._run(self._store.wake_evicted, tenant, ids):
            self.notify()

    async def forget(self, forgotten: Forgotten, empty: Sequence[str] = ()) -> None:
        """Make the engine forget what a change took away, then encode what depended on it.

        ``empty`` are namespaces that have no fact any more: the headers and literals seen in
        their prompts go too. Waits for the engine; when it does not answer in time, the drop is
        sent again in the background. Until it arrives, the new epochs alone keep questions from
        the segments.
        """
        if not forgotten and not empty:
            return
        try:
            await self._drop(forgotten, empty)
        except Exception as error:
            logger.warning("segments not dropped yet: %s", error)
            self._spawn(self._drop_later(forgotten, empty))
        self.notify()

    async def _drop(self, forgotten: Forgotten, empty: Sequence[str]) -> None:
        stale = set(forgotten.stale_keys)
        await self._engine.drop(
            [key for key in forgotten.keys if key not in stale],
            sorted(forgotten.epochs.items()),
            namespaces=empty,
            stale=forgotten.stale_keys,
            texts=await self._run(lambda: [self._template.line_ids(i) for i in forgotten.lines]),
            timeout=DROP_TIMEOUT,
        )

    async def _drop_later(self, forgotten: Forgotten, empty: Sequence[str]) -> None:
        delay = FIRST_RETRY
        while True:
            await asyncio.sleep(delay)
            delay = min(LONGEST_RETRY, 2 * delay)
            with contextlib.suppress(Exception):
                return await self._drop(forgotten, empty)

    async def _mark_pending(self, segments: list[Segment], reason: str) -> None:
        """Until it is written down: what the engine reports once is not reported again."""
        while True:
            try:
                count = await self._run(self._store.mark_pending, segments, reason)
                break
            except StoreError as error:
                logger.warning("lost KV is not written down yet: %s", error)
                await asyncio.sleep(STORE_RETRY)
        if count:
            await self._announce()
            self.notify()

    async def _announce(self) -> None:
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the encode queue failed", exc_info=error)

    async def _loop(self) -> None:
        while True:
            await self._slots.acquire()
            taken = False
            try:
                await self._traffic.quiet(PATIENCE)
                self._work.clear()
                claims = await self._claim()
                if claims:
                    self._spawn(self._encode(claims))
                    taken = True
                    continue
            except Exception:
                logger.exception("the encode queue could not take facts; trying again")
                await asyncio.sleep(STORE_RETRY)
            finally:
                if not taken:
                    self._slots.release()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), IDLE_POLL)

    async def _claim(self) -> list[Claim]:
        group = self._config.facts_per_request
        claims = await self._run(self._store.claim_pending, group if group == 1 else 4 * group)
        if len(claims) <= group:
            return claims
        try:
            kept = await self._run(self._nearest_together, claims, group)
        except BaseException:
            self._store.release(claims)
            raise
        left = [claim for claim in claims if claim not in kept]
        self._store.release(left)
        return kept

    def _nearest_together(self, claims: list[Claim], count: int) -> list[Claim]:
        """The oldest claim and those nearest to it, least similar first, the oldest last."""
        oldest = claims[0]
        tenant = oldest.memory.scope.tenant
        vector = self._store.get_vectors(tenant, [oldest.id]).get(oldest.id)
        by_id = {claim.id: claim for claim in claims[1:]}
        near: list[Claim] = []
        if vector is not None:
            (hits,) = self._index.search(
                oldest.memory.scope,
                vector,
                count - 1,
                collection=oldest.memory.collection,
                allowed_ids=list(by_id),
            )
            near = [by_id[fact_id] for fact_id, _ in hits]
        return [*reversed(near), oldest]

    async def _encode(self, claims: list[Claim]) -> None:
        try:
            await self._encode_claims(claims)
        except asyncio.CancelledError:
            self._store.release(claims)
            raise
        except Exception as error:
            logger.warning("encoding failed: %s", error)
            try:
                for claim in claims:
                    await self._fail(claim, f"{type(error).__name__}: {error}")
            except Exception:
                logger.exception("the failure could not be written down; trying again")
                await asyncio.sleep(STORE_RETRY)
            finally:
                self._store.release(claims)
        finally:
            self._slots.release()
            self.notify()
            await self._announce()

    async def _encode_claims(self, claims: list[Claim]) -> None:
        ns = claims[0].ns
        # Read before the windows: a change made from now on refuses the capture by its epoch.
        epoch = (await self._run(self._store.epochs, [ns]))[ns]
        prepared = await self._run(self._prepare, claims)
        if isinstance(prepared, LineTooLongError):
            claim = next(c for c in claims if c.line_key == prepared.key)
            await self._run(self._store.mark_failed, claim, str(prepared), None)
            self._store.release(claims)
            return
        left = [c for c in claims if c not in prepared.claims]
        self._store.release(left)
        report = await self._engine.capture(ns, epoch, prepared.request, CAPTURE_TIMEOUT)
        await self._record(prepared, report)

    def _prepare(self, claims: list[Claim]) -> _Prepared | LineTooLongError:
        """Lay out the request of claims that share the window of the last one."""
        template, config = self._template, self._config
        # Counted before they are looked at: who comes in between makes the window outgrown.
        peers = {c.id: self._store.peers(c.memory.scope, c.memory.collection) for c in claims}
        source = FactWindows(self._store, self._index, claims)
        items = within_budget(
            self._windows.window(claims[-1], source),
            lambda line: len(template.line_ids(line)),
            config.window.max_tokens,
        )
        try:
            request = plan_encoding(
                template.header_ids(),
                [(_key_of(item), template.line_ids(item.line)) for item in items],
                [(claim.line_key, template.line_ids(claim.memory.line)) for claim in claims],
                self._max_prompt,
                config.anchor,
            )
        except LineTooLongError as error:
            return error
        spans = {span.key: span for span in request.spans}
        known = {_key_of(i): (i.fact_id, i.line) for i in items if i.fact_id is not None}
        known |= {claim.line_key: (claim.id, claim.memory.line) for claim in claims}
        encoded = [claim for claim in claims if claim.line_key in request.lines]
        behind = {c.id: [known[key] for key in spans[c.line_key].behind] for c in encoded}
        return _Prepared(request, encoded, behind, peers)

    async def _record(self, prepared: _Prepared, report: CaptureReport) -> None:
        done = [c for c in prepared.claims if c.line_key in report.captured]
        if self._losses:
            # A capture may have evicted the fact's own old KV: that was before.
            await asyncio.wait(self._losses, timeout=CAPTURE_TIMEOUT)
        if done:
            refused = await self._run(self._store.mark_ready, done, prepared.behind, prepared.peers)
            await self._mark_outgrown(done)
            if refused:
                epochs = await self._run(self._store.epochs, {claim.ns for claim in refused})
                segments = [claim.segment for claim in refused]
                await self.forget(Forgotten(segments, epochs, stale_keys=segments))
        for claim in prepared.claims:
            if claim.line_key not in report.captured:
                reason = report.failed.get(claim.line_key, "the engine gave no report")
                await self._fail(claim, reason)

    async def _mark_outgrown(self, claims: Sequence[Claim]) -> None:
        """Facts that were encoded among few stand among others, now that these have come."""
        growth = self._config.window.growth
        if not growth or not self._windows.outgrown:
            return
        for scope, collection in {(c.memory.scope, c.memory.collection) for c in claims}:
            await self._run(self._store.mark_outgrown, scope, collection, growth)

    async def _fail(self, claim: Claim, reason: str) -> None:
        """Write down a failure; one that may pass is tried again, later each time."""
        delay: float | None = None
        if not reason.startswith(_PERMANENT):
            delay = LONGEST_RETRY
            if not reason.startswith(_LASTING):
                delay = min(delay, FIRST_RETRY * 2 ** min(claim.attempts, 30))
            delay *= random.uniform(0.75, 1.25)
        retry_at = None if delay is None else datetime.now(UTC) + timedelta(seconds=delay)
        await self._run(self._store.mark_failed, claim, reason, retry_at)
        if delay is not None:
            asyncio.get_running_loop().call_later(delay + 0.01, self.notify)


def _key_of(item: WindowItem) -> str | None:
    return None if item.fact_id is None else segment_key(item.line)
