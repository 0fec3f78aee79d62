"""The connector with faults on demand: the file named by the environment says where it fails."""

import os
from pathlib import Path
from typing import Any

from inferscale_core.connector.connector import InferScaleConnector

FAULT_FILE_ENV = "INFERSCALE_TEST_FAULT_FILE"

SCHEDULER_PLACES = {
    "on_new_request": "on_new_request",
    "match": "num_new_matched_tokens",
    "alloc": "update_state_after_alloc",
    "build": "build_step",
    "result": "take_result",
    "finish": "finish",
}
WORKER_PLACES = ("inject", "capture", "packed")
PLACES = (*SCHEDULER_PLACES, *WORKER_PLACES)


def _failing(place: str) -> bool:
    return Path(os.environ[FAULT_FILE_ENV]).read_text() == place


def _wrap(owner: Any, method: str, place: str) -> None:
    original = getattr(owner, method)

    def wrapped(*args: Any, **kw: Any) -> Any:
        if _failing(place):
            raise RuntimeError(f"injected fault: {place}")
        return original(*args, **kw)

    setattr(owner, method, wrapped)


class FaultyConnector(InferScaleConnector):
    """Wraps the methods of the two sides, and of the transfer once it exists."""

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(*args, **kw)
        if self._scheduler is not None:
            for place, method in SCHEDULER_PLACES.items():
                _wrap(self._scheduler, method, place)
        if self._worker is not None:
            bind = self._worker.bind_model

            def bind_model(model: Any) -> Any:
                bound = bind(model)
                transfer = self.worker_side._transfer
                _wrap(transfer, "inject", "inject")
                _wrap(transfer, "capture", "capture")
                if transfer is not None and transfer._writer is not None:
                    _wrap(transfer._writer, "write", "packed")
                return bound

            self._worker.bind_model = bind_model  # type: ignore[method-assign]
