"""Scheduler side: decides what is injected and captured, and owns the arena's slots.

Runs inside vLLM's scheduler, in the engine core process. vLLM calls, per step and in this order:
``on_new_request`` as requests arrive; ``get_num_new_matched_tokens`` and
``update_state_after_alloc`` for each request it admits; ``build_connector_meta`` once;
``update_connector_output`` with the workers' result; ``request_finished`` once per request.
"""

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inferscale_core.connector.metadata import Capture, Injection, StepMetadata, StepResult
from inferscale_core.connector.protocol import PARAMS_KEY, Span, salt_for
from inferscale_core.connector.segments import Segment, SegmentTable, token_bytes
from inferscale_core.connector.tracked import Tracked
from inferscale_core.kv.arena import SlotAllocator

_MAX_GAPS = 8
"""Headers and literals captured on first sight from one request."""
_MAX_REPORTED_EVICTIONS = 10_000


@dataclass
class _InFlight:
    """A capture that the workers have not acknowledged yet."""

    segment: Segment
    epoch: int
    owner: Tracked


class SchedulerSide:
    """See the module's docstring; every method may be called in any order without harm."""

    def __init__(self, num_slots: int, block_size: int, min_gain_tokens: int):
        self.table = SegmentTable(SlotAllocator(num_slots))
        self._block_size = block_size
        self._min_gain = min_gain_tokens
        self._epochs: dict[str, int] = {}
        self._tracked: dict[str, Tracked] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._next_capture = 0
        # Of the step that is being scheduled: blocks by request that vLLM was promised to find
        # loaded, and captures begun.
        self._promised: dict[str, list[int]] = {}
        self._step_captures: list[int] = []
        self._evicted: deque[tuple[str, str]] = deque(maxlen=_MAX_REPORTED_EVICTIONS)
        self.reasons: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    # Arrival.

    def on_new_request(self, request: Any) -> None:
        message = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        if message is None:
            return
        tracked = Tracked(message)
        self._tracked[request.request_id] = tracked
        if message["op"] in ("inject", "capture"):
            tracked.reason = self._refusal(request, tracked)
            if tracked.reason is None:
                tracked.prompt = token_bytes(request.prompt_token_ids)
                tracked.num_prompt_tokens = len(request.prompt_token_ids)
                if tracked.op == "capture":
                    tracked.spans = self._checked_spans(tracked)
        elif message["op"] == "drop":
            self._drop(request, message)

    def _refusal(self, request: Any, tracked: Tracked) -> str | None:
        """Why this request must not read or write segments, or None. Rule: no salt, no KV."""
        message = tracked.message
        if tracked.op == "inject":
            reader, scopes = message["reader"], [(ns, int(e)) for ns, e in message["scopes"]]
        else:
            reader, scopes = message["ns"], [(message["ns"], int(message["epoch"]))]
        if not reader or reader not in dict(scopes):
            return "no_scope"
        if request.cache_salt != salt_for(tracked.op, reader, scopes):
            return "bad_salt"
        for namespace, epoch in scopes:
            known = self._epochs.setdefault(namespace, epoch)
            if epoch < known:
                return "stale_epoch"
            if epoch > known and tracked.op == "inject":
                # What the change took away is resident until its drop message arrives.
                return "drop_pending"
        if request.prompt_token_ids is None or getattr(request, "mm_features", None):
            return "not_text"
        if getattr(request, "lora_request", None) is not None:
            return "lora"
        return None

    def _checked_spans(self, tracked: Tracked) -> list[Span]:
        spans = []
        for raw in tracked.message["spans"]:
            span = Span(**{**raw, "behind": tuple(raw["behind"])})
            if not 0 <= span.start < span.end <= tracked.num_prompt_tokens:
                tracked.failed[span.key] = "span outside of the prompt"
            elif span.kind == "header" and (
                header := self.table.get(tracked.message["ns"], span.key)
            ):
                self.table.touch([header])
                tracked.captured.append(span.key)
            else:
                spans.append(span)
        return sorted(spans, key=lambda s: s.end)

    def _drop(self, request: Any, message: dict[str, Any]) -> None:
        if request.cache_salt != salt_for("drop", "", []):
            self.reasons["bad_salt"] += 1
            return
        epochs = [(ns, int(epoch)) for ns, epoch in message["epochs"]]
        for namespace, epoch in epochs:
            self._epochs[namespace] = max(epoch, self._epochs.get(namespace, 0))
        self.table.drop(
            [(ns, key) for ns, key in message["keys"]],
            message["namespaces"],
            [ns for ns, _ in epochs],
            [(ns, key) for ns, key in message["stale"]],
            [token_bytes(ids) for ids in message["texts"]],
        )

    # Admission.

    def num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens beyond ``num_computed_tokens`` that can be injected; leaves one to compute."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.op != "inject":
            return 0
        tracked.load = None
        if tracked.reason in (None, "stale_epoch") and self._epochs_moved(tracked):
            tracked.reason = "stale_epoch"
        if tracked.reason is not None:
            return 0
        began = time.perf_counter()
        if tracked.cover is None or tracked.cover_version != self.table.version:
            limit = tracked.num_prompt_tokens
            names = [ns for ns, _ in tracked.message["scopes"]]
            tracked.cover = self.table.match(names, tracked.prompt, limit)
            tracked.cover_version = self.table.version
        cover = tracked.cover.without_tail(int(tracked.message.get("tail") or 0))
        matched = min(cover.num_tokens, request.num_tokens - 1)
        gain = matched - num_computed_tokens
        tracked.report.update(
            matched_tokens=matched,
            cached_tokens=num_computed_tokens,
            match_ms=1e3 * (time.perf_counter() - began),
        )
        if gain < self._min_gain:
            return 0
        tracked.load = (num_computed_tokens, matched)
        return gain

    def _epochs_moved(self, tracked: Tracked) -> bool:
        return any(int(e) < self._epochs.get(ns, 0) for ns, e in tracked.message["scopes"])

    def promise(self, request_id: str, block_ids: list[int]) -> None:
        """vLLM counts tokens in these blocks as computed: the step must load or report them."""
        self._promised[request_id] = block_ids

    def update_state_after_alloc(
        self, request: Any, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request is admitted and holds ``block_ids`` (all of them, in order)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(block_ids)
        tracked.admitted = True
        if num_external_tokens == 0:
            tracked.load = None
        if tracked.op == "inject" and tracked.reason is None and not tracked.spans:
            self._plan_gaps(tracked)

    def _plan_gaps(self, tracked: Tracked) -> None:
        """Headers and literals not known yet become segments of the reader on first sight."""
        assert tracked.cover is not None
        reader = tracked.message["reader"]
        for gap in tracked.cover.gaps[:_MAX_GAPS]:
            tokens = tracked.prompt[4 * gap.start : 4 * gap.end]
            key = f"{gap.kind}:{hashlib.sha256(tokens).hexdigest()[:32]}"
            if self.table.get(reader, key) is None:
                tracked.spans.append(Span(key, gap.kind, gap.start, gap.end, tuple(gap.behind)))

    # The step.

    def build_step(self, scheduler_output: Any) -> StepMetadata:
        """Injections and captures of the step that was just scheduled."""
        step = StepMetadata()
        pinned: list[Segment] = []
        cached = scheduler_output.scheduled_cached_reqs
        progress = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        for request_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            progress[request_id] = computed
            tracked = self._tracked.get(request_id)
            if tracked is not None and new_blocks is not None and not tracked.admitted:
                tracked.block_ids.extend(new_blocks[0])
        for request_id in progress:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.admitted = False
            if tracked.load is not None:
                pinned.extend(self._add_injection(step, request_id, tracked))
        # Captures come last: what they evict has been read by then.
        for request_id, computed in progress.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.spans:
                done = computed + scheduler_output.num_scheduled_tokens.get(request_id, 0)
                self._add_captures(step, tracked, done, pinned)
        for injection in step.injections:
            self._promised.pop(injection.request_id, None)
        step.unloaded_blocks = self._take_promised()
        self._step_captures.clear()
        return step

    def _take_promised(self) -> list[int]:
        blocks = sorted({b for block_ids in self._promised.values() for b in block_ids})
        self._promised.clear()
        return blocks

    def abandon_step(self) -> StepMetadata:
        """After a fault while a step was built: nothing of it is loaded or captured."""
        step = StepMetadata(unloaded_blocks=self._take_promised())
        for capture_id in self._step_captures:
            flight = self._in_flight.pop(capture_id, None)
            if flight is not None:
                flight.owner.failed[flight.segment.key] = "fault"
                self.table.release(flight.segment.slots)
        for tracked in self._tracked.values():
            tracked.load = None
        self._step_captures.clear()
        return step

    def _add_injection(
        self, step: StepMetadata, request_id: str, tracked: Tracked
    ) -> Iterable[Segment]:
        assert tracked.load is not None
        assert tracked.cover is not None
        start, end = tracked.load
        tracked.load = None
        positions = np.arange(start, end, dtype=np.int64)
        step.injections.append(
            Injection(
                request_id,
                tracked.cover.arena_slots(start, end),
                self._paged_slots(tracked, positions),
                positions,
            )
        )
        tracked.report["injected_tokens"] = end - start
        # The header last: without it nothing of the cover can be used.
        self.table.touch(reversed(tracked.cover.segments))
        return tracked.cover.segments

    def _paged_slots(self, tracked: Tracked, positions: np.ndarray) -> np.ndarray:
        blocks = np.asarray(tracked.block_ids, dtype=np.int64)
        return blocks[positions // self._block_size] * self._block_size + (
            positions % self._block_size
        )

    def _add_captures(
        self, step: StepMetadata, tracked: Tracked, num_done: int, pinned: list[Segment]
    ) -> None:
        message = tracked.message
        if tracked.op == "capture":
            namespace, epoch = message["ns"], int(message["epoch"])
        else:
            namespace, epoch = message["reader"], dict(message["scopes"])[message["reader"]]
        while tracked.spans and tracked.spans[0].end <= num_done:
            span = tracked.spans.pop(0)
            if epoch < self._epochs.get(namespace, 0):
                tracked.failed[span.key] = "stale_epoch"
                continue
            slots, evicted = self.table.reserve(span.end - span.start, pinned)
            self._evicted.extend((s.namespace, s.key) for s in evicted if s.kind == "line")
            if slots is None:
                tracked.failed[span.key] = (
                    f"arena full: {span.end - span.start} tokens do not fit "
                    f"({self.table.num_slots} in all); raise arena_bytes"
                )
                self.reasons["arena_full"] += 1
                continue
            tokens = tracked.prompt[4 * span.start : 4 * span.end]
            segment = Segment(namespace, span.key, span.kind, tokens, slots, frozenset(span.behind))
            positions = np.arange(span.start, span.end, dtype=np.int64)
            capture_id, self._next_capture = self._next_capture, self._next_capture + 1
            self._in_flight[capture_id] = _InFlight(segment, epoch, tracked)
            self._step_captures.append(capture_id)
            step.captures.append(
                Capture(capture_id, slots, self._paged_slots(tracked, positions), positions)
            )

    # Results.

    def take_result(self, result: StepResult) -> None:
        """Captures become resident only once every worker has stored them."""
        self.faults.update(result.faults)
        for request_id, ms in result.write_ms.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.report["write_ms"] = ms
        for capture_id, reason in result.failed.items():
            flight = self._in_flight.pop(capture_id, None)
            if flight is not None:
                flight.owner.failed[flight.segment.key] = reason
                self.table.release(flight.segment.slots)
        for capture_id in result.captured:
            flight = self._in_flight.pop(capture_id, None)
            if flight is None:
                continue
            segment = flight.segment
            if flight.epoch < self._epochs.get(segment.namespace, 0):
                flight.owner.failed[segment.key] = "stale_epoch"
                self.table.release(segment.slots)
            else:
                flight.owner.captured.append(segment.key)
                self.table.insert(segment)

    def finish(self, request: Any, bytes_per_token: int) -> dict[str, Any] | None:
        """The report of a finished request, or None when it carried no message."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        report: dict[str, Any] | None = None
        if tracked.op == "capture":
            report = tracked.capture_report()
        elif tracked.op == "inject":
            report = tracked.injection_report(bytes_per_token)
            if report["reason"] is not None:
                self.reasons[report["reason"]] += 1
        if not self._from_core(request, tracked):
            # A message that some client made up learns nothing about others' segments.
            return report
        if tracked.op == "stats":
            report = self.stats()
        evicted = [list(pair) for pair in self._evicted]
        self._evicted.clear()
        return (report or {}) | {"evicted": evicted}

    @staticmethod
    def _from_core(request: Any, tracked: Tracked) -> bool:
        """Whether the request carries the salt that only the core can make."""
        if tracked.op in ("inject", "capture"):
            return tracked.reason not in ("bad_salt", "no_scope")
        return request.cache_salt == salt_for(tracked.op, "", [])

    def stats(self) -> dict[str, Any]:
        return {
            "arena_tokens": self.table.num_slots,
            "arena_tokens_used": self.table.num_slots_used,
            "segments": len(self.table),
            "evictions": self.table.num_evictions,
            "reasons": dict(self.reasons),
            "faults": dict(self.faults),
        }

    def forget(self, request_id: str) -> None:
        """Stop tracking a request after a fault; it goes on as plain text."""
        self._tracked.pop(request_id, None)
