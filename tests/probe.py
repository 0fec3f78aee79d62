"""Worker extension of the tests: looks into the worker, in its own process."""

from typing import Any

import torch

from inferscale_core.connector.extension import WorkerExtension


class ProbeExtension(WorkerExtension):
    """Ours, and a spy on the engine's own cache writes."""

    _probe_slots: list[torch.Tensor]

    def probe_watch(self) -> None:
        """Note the slots of every write into the first layer's cache from now on."""
        transfer = self._probe_transfer()
        impl = transfer._layers[0].impl
        write = impl.do_kv_cache_update
        self._probe_slots = []

        def spy(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
            write(layer, key, value, cache, slots)
            self._probe_slots.append(slots.clone())

        impl.do_kv_cache_update = spy

    def probe_keys(self, num_tokens: int) -> list[list[float]]:
        """Keys that the first watched write stored, rotated as they lie; ends the watch."""
        transfer = self._probe_transfer()
        del transfer._layers[0].impl.do_kv_cache_update
        slots = self._probe_slots[0][:num_tokens].long()
        at = transfer.layout.element_index(slots, of_keys=True)
        return transfer._flat[0][at].flatten(1).float().tolist()

    def _probe_transfer(self) -> Any:
        return self._inferscale_worker()._transfer
