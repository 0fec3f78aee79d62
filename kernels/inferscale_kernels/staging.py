"""Copies of index arrays to the device that neither wait nor are overwritten under way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class Event(Protocol):
    """Of ``torch.cuda.Event``, what is used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


@dataclass
class _Buffer:
    host: torch.Tensor
    device: torch.Tensor
    event: Event


class Staging:
    """Pinned buffers, each with its copy on the device.

    A buffer is used again only when the event behind the work that read it has passed; when none
    is free a new one is made, so that the host never waits. Their number settles at the number of
    steps that the host runs ahead.

    Args:
        device: where the arrays are wanted.
        make_event: a new event on the current stream of ``device``.

    """

    def __init__(self, device: torch.device, make_event: Callable[[], Event]):
        self._device, self._make_event = device, make_event
        self._buffers: list[_Buffer] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def run(
        self, arrays: Sequence[np.ndarray], work: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """Call ``work`` with device copies of ``arrays``, in the order of the current stream.

        Args:
            arrays: contiguous, ``[num_tokens]`` each; 8-byte items first, for alignment.
            work: enqueues what reads the copies, on the current stream.

        """
        num_bytes = sum(a.nbytes for a in arrays)
        buffer = self._free(num_bytes)
        views, at, host = [], 0, buffer.host.numpy()
        for array in arrays:
            host[at : at + array.nbytes] = array.view(np.uint8)
            dtype = torch.from_numpy(array[:0]).dtype
            views.append(buffer.device[at : at + array.nbytes].view(dtype))
            at += array.nbytes
        buffer.device[:num_bytes].copy_(buffer.host[:num_bytes], non_blocking=True)
        work(views)
        buffer.event.record()

    def _free(self, num_bytes: int) -> _Buffer:
        for buffer in self._buffers:
            if len(buffer.host) >= num_bytes and buffer.event.query():
                return buffer
        size = 1 << max(14, (num_bytes - 1).bit_length())
        pinned = self._device.type == "cuda"
        buffer = _Buffer(
            torch.empty(size, dtype=torch.uint8, pin_memory=pinned),
            torch.empty(size, dtype=torch.uint8, device=self._device),
            self._make_event(),
        )
        # Smaller ones that are idle would never be used again if the steps have grown.
        self._buffers = [b for b in self._buffers if len(b.host) >= size or not b.event.query()]
        self._buffers.append(buffer)
        return buffer
