"""The class that vLLM loads: one thin shell around the two sides.

Nothing that happens in here may end the engine: an exception in a connector method would. Every
method catches, counts and falls back to text, or to no capture.
"""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)

from inferscale_core.config import CoreConfig
from inferscale_core.connector.metadata import StepMetadata, StepResult
from inferscale_core.connector.parent_death import die_with_parent
from inferscale_core.connector.protocol import PARAMS_KEY
from inferscale_core.connector.scheduler import SchedulerSide
from inferscale_core.connector.worker import WorkerSide
from inferscale_core.kv.arena import KVGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


class InferScaleConnector(KVConnectorBase_V1):
    """Injects stored KV of facts; see ``scheduler.py`` and ``worker.py`` for the two halves.

    Raises at construction, when the engine starts, and only then: UnsupportedModelError for
    models whose KV cannot be injected, ValueError for an arena that holds no token.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        die_with_parent()
        config = CoreConfig.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        geometry = KVGeometry.from_cache_config(kv_cache_config).stored_as(config.kv_store_dtype)
        num_slots = geometry.num_slots(config.arena_bytes)
        self._bytes_per_token = geometry.bytes_per_token
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(num_slots, geometry.block_size, config.min_gain_tokens)
        else:
            layers = vllm_config.compilation_config.static_forward_context
            self._worker = WorkerSide(geometry, num_slots, layers)
        logger.info(
            "arena of %d tokens, %d bytes each (%s, process %d)",
            num_slots, geometry.bytes_per_token, role.name.lower(), os.getpid(),
        )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """A capture that is lost to a preemption is made again; nothing must be delivered."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def _fault(self, place: str, request: Any = None) -> None:
        """Count an exception that was caught; the request goes on as plain text."""
        logger.exception("connector fault in %s", place)
        if self._scheduler is not None:
            self._scheduler.faults[place] += 1
            if request is not None:
                self._scheduler.forget(request.request_id)

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        try:
            self.scheduler_side.on_new_request(request)
        except Exception:
            self._fault("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        try:
            return self.scheduler_side.num_new_matched_tokens(request, num_computed_tokens), False
        except Exception:
            self._fault("get_num_new_matched_tokens", request)
            return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()[0]
        if num_external_tokens:
            self.scheduler_side.promise(request.request_id, block_ids)
        try:
            self.scheduler_side.update_state_after_alloc(request, block_ids, num_external_tokens)
        except Exception:
            self._fault("update_state_after_alloc", request)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        try:
            return self.scheduler_side.build_step(scheduler_output)
        except Exception:
            self._fault("build_connector_meta")
            return self.scheduler_side.abandon_step()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        try:
            result = connector_output.kv_connector_worker_meta
            if isinstance(result, StepResult):
                self.scheduler_side.take_result(result)
        except Exception:
            self._fault("update_connector_output")

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        try:
            report = self.scheduler_side.finish(request, self._bytes_per_token)
            return False, None if report is None else {PARAMS_KEY: report}
        except Exception:
            self._fault("request_finished", request)
            return False, None

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        if step is not None:
            self.worker_side.load(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        step = self._step()
        if step is not None:
            self.worker_side.save(step)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_bad_blocks()

    def build_connector_worker_meta(self) -> StepResult | None:
        return self.worker_side.take_result()

    def _step(self) -> StepMetadata | None:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepMetadata) else None
