"""What the two sides of the connector tell each other: plain arrays, nothing shared in memory."""

from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class Injection:
    """KV to write for one request before the forward pass; all arrays are ``[num_tokens]``."""

    request_id: str
    arena_slots: np.ndarray
    paged_slots: np.ndarray
    positions: np.ndarray


@dataclass
class Capture:
    """A span to read after the forward pass; all arrays are ``[num_tokens]``."""

    capture_id: int
    arena_slots: np.ndarray
    paged_slots: np.ndarray
    positions: np.ndarray


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler side to worker side, once a step.

    ``unloaded_blocks`` were promised to vLLM as loaded before a fault: the worker reports them,
    so that vLLM computes their tokens as text.
    """

    injections: list[Injection] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    unloaded_blocks: list[int] = field(default_factory=list)


@dataclass
class StepResult(KVConnectorWorkerMetadata):
    """Worker side to scheduler side, once a step.

    ``captured`` are capture ids stored on this worker, ``failed`` those that were not, with the
    reason; ``write_ms`` is each injected request's share of the time spent writing, and
    ``faults`` counts exceptions that were caught, by place.
    """

    captured: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    write_ms: dict[str, float] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepResult":
        """Of two workers: stored only if stored on both, as slow as the slower one."""
        assert isinstance(other, StepResult)
        failed = {**self.failed, **other.failed}
        write_ms = dict(self.write_ms)
        for request_id, ms in other.write_ms.items():
            write_ms[request_id] = max(ms, write_ms.get(request_id, 0.0))
        faults = dict(self.faults)
        for place, count in other.faults.items():
            faults[place] = faults.get(place, 0) + count
        captured = (self.captured | other.captured) - failed.keys()
        return StepResult(captured, failed, write_ms, faults)

    def is_empty(self) -> bool:
        return not (self.captured or self.failed or self.write_ms or self.faults)
