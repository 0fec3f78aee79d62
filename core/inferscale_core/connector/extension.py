"""Worker extension: gives the worker side of the connector what only the worker knows."""

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker by ``--worker-extension-cls``; reached by ``collective_rpc``."""

    model_runner: Any

    def inferscale_bind(self) -> dict[str, Any]:
        """Hand the loaded model to the connector; returns the arena's geometry.

        Raises:
            UnsupportedModelError, LayoutError: see ``WorkerSide.bind_model``.

        """
        return self._inferscale_worker().bind_model(self.model_runner.model)

    def inferscale_memcpy_ms(self, num_bytes: int) -> float:
        """Milliseconds of a plain memcpy of ``num_bytes`` in this worker."""
        return self._inferscale_worker().memcpy_ms(num_bytes)

    def _inferscale_worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from inferscale_core.connector.connector import InferScaleConnector

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, InferScaleConnector):
            raise RuntimeError(
                "vLLM runs without the InferScale connector: pass --kv-transfer-config with "
                "kv_connector InferScaleConnector"
            )
        return connector.worker_side
