"""Worker side: moves KV between the arena and the paged cache, as the scheduler side decided."""

import logging
import time
from typing import Any

import numpy as np
import torch

from inferscale_core.connector.metadata import StepMetadata, StepResult
from inferscale_core.kv.arena import Arena, KVGeometry
from inferscale_core.kv.codec_check import check_codec
from inferscale_core.kv.rotary import layer_tables
from inferscale_core.kv.transfer import PagedTransfer

logger = logging.getLogger(__name__)


_COLD_BYTES = 96 << 20
"""More than the last-level cache of the machines this runs on."""


class WorkerSide:
    """One per worker process.

    vLLM calls ``register_kv_caches`` once; :meth:`bind_model` then gives the model for its rotary
    tables. Per step: ``load`` before the forward pass, ``save`` after it, ``take_result`` last.
    """

    def __init__(self, geometry: KVGeometry, num_slots: int, layers: dict[str, Any]):
        self._geometry = geometry
        self._num_slots = num_slots
        self._layers = layers
        self._caches: dict[str, torch.Tensor] = {}
        self._transfer: PagedTransfer | None = None
        self._result = StepResult()
        self._bad_blocks: set[int] = set()

    @property
    def arena(self) -> Arena | None:
        return self._arena if self._transfer is not None else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Layers that share another layer's cache are left out: it is written once."""
        self._caches = {
            name: cache
            for name, cache in kv_caches.items()
            if getattr(self._layers[name].impl, "kv_sharing_target_layer_name", None) is None
        }

    def bind_model(self, model: Any) -> dict[str, Any]:
        """Find the rotary tables, learn the cache's layout and allocate the arena.

        Raises:
            UnsupportedModelError: the model's keys cannot be moved between positions, or lose
                too much in the arena's codec.
            LayoutError: the attention backend's cache was not understood.

        """
        if self._transfer is None:
            check_codec(model, self._geometry.codec.name)
            names = list(self._caches)
            caches = list(self._caches.values())
            tables = layer_tables(model, names)
            self._arena = Arena(self._geometry, self._num_slots, caches[0].device)
            self._transfer = PagedTransfer(
                [self._layers[n] for n in names], caches, tables, self._arena
            )
        return {
            "num_layers": self._geometry.num_layers,
            "bytes_per_token": self._geometry.bytes_per_token,
            "num_slots": self._num_slots,
        }

    def load(self, step: StepMetadata) -> None:
        """Write the step's injections; a failure is reported, so that vLLM computes the text."""
        self._bad_blocks.update(step.unloaded_blocks)
        if not step.injections:
            return
        began = time.perf_counter()
        try:
            self._require_transfer().inject(
                np.concatenate([i.arena_slots for i in step.injections]),
                np.concatenate([i.paged_slots for i in step.injections]),
                np.concatenate([i.positions for i in step.injections]),
            )
        except Exception:
            logger.exception("injection failed; the prompts are computed as text")
            self.count_fault("load")
            self.fail_loads(step)
            return
        elapsed = 1e3 * (time.perf_counter() - began)
        total = sum(len(i.positions) for i in step.injections)
        for injection in step.injections:
            share = elapsed * len(injection.positions) / total
            self._result.write_ms[injection.request_id] = share

    def fail_loads(self, step: StepMetadata) -> None:
        """Report the blocks of all injections of a step as not loaded."""
        for injection in step.injections:
            blocks = np.unique(injection.paged_slots // self._geometry.block_size)
            self._bad_blocks.update(int(b) for b in blocks)

    def save(self, step: StepMetadata) -> None:
        """Read the step's captures into the arena and note which were stored."""
        for capture in step.captures:
            try:
                self._require_transfer().capture(
                    capture.paged_slots, capture.arena_slots, capture.positions
                )
                self._result.captured.add(capture.capture_id)
            except Exception as error:
                logger.exception("capture failed")
                self.count_fault("save")
                self._result.failed[capture.capture_id] = f"{type(error).__name__}: {error}"

    def _require_transfer(self) -> PagedTransfer:
        if self._transfer is None:
            raise RuntimeError(
                "the worker has no model yet: start vLLM with --worker-extension-cls "
                "inferscale_core.connector.extension.WorkerExtension and call inferscale_bind"
            )
        return self._transfer

    def count_fault(self, place: str) -> None:
        self._result.faults[place] = self._result.faults.get(place, 0) + 1

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_result(self) -> StepResult | None:
        result, self._result = self._result, StepResult()
        return None if result.is_empty() else result

    def memcpy_ms(self, num_bytes: int, repeats: int = 9) -> float:
        """Median time of a plain copy of ``num_bytes``, milliseconds.

        The yardstick for the writer: the same process, memory that was written before, and a
        source that the last copies have pushed out of the caches, as a forward pass does.
        """
        parts = max(2, -(-_COLD_BYTES // num_bytes))
        source = np.ones((parts, num_bytes), dtype=np.uint8)
        target = np.ones((parts, num_bytes), dtype=np.uint8)
        times = []
        for i in range(repeats):
            began = time.perf_counter()
            np.copyto(target[i % parts], source[i % parts])
            times.append(time.perf_counter() - began)
        return 1e3 * float(np.median(times))
