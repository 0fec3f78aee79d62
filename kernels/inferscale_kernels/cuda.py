"""The kernels on a CUDA device, compiled and launched with CuPy."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from inferscale_kernels.launcher import Launch, PagedTransfer
from inferscale_kernels.pages import PagedLayer, UnsupportedKernelError
from inferscale_kernels.program import OPTIONS, Program
from inferscale_kernels.staging import Event


@lru_cache(maxsize=64)
def _module(program: Program, device_index: int) -> Any:
    """The compiled program. CuPy keeps it on disk as well, so only a first start compiles."""
    # Imported late: CuPy initialises CUDA libraries, and a CPU installation lacks it.
    import cupy

    with cupy.cuda.Device(device_index):
        return cupy.RawModule(code=program.text(), options=OPTIONS)


class CudaTransfer(PagedTransfer):
    """:class:`PagedTransfer` on the CUDA device of its tensors, on torch's current stream.

    Built once: compiles (or loads from CuPy's cache) and launches both kernels with a skipped
    token, so that no request pays for it. Arguments as :class:`PagedTransfer`.

    Raises:
        UnsupportedKernelError: the tensors are not on a CUDA device, its compute capability is
            below 8.0, or they are of a kind that the kernels do not serve.
        ImportError: CuPy is not installed.

    """

    def __init__(
        self,
        arena: torch.Tensor,
        layers: Sequence[PagedLayer],
        codec: str = "auto",
        scales: torch.Tensor | None = None,
        key_channels: torch.Tensor | None = None,
    ):
        if arena.device.type != "cuda":
            raise UnsupportedKernelError(f"an arena on {arena.device}, expected a CUDA device")
        properties = torch.cuda.get_device_properties(arena.device)
        if properties.major < 8:
            raise UnsupportedKernelError(
                f"{properties.name} has compute capability {properties.major}."
                f"{properties.minor}; the kernels need 8.0 (Ampere) or newer"
            )
        self._multiprocessors = properties.multi_processor_count
        super().__init__(arena, layers, codec, scales, key_channels)
        index = arena.device.index
        self._index = torch.cuda.current_device() if index is None else index
        module = _module(self.program, self._index)
        self._kernels = {
            name: module.get_function(name) for name in ("rotate_scatter", "gather_unrotate")
        }
        skipped = torch.full((1,), -1, dtype=torch.int64, device=arena.device)
        slots = skipped.to(torch.int32)
        self.write_on_device(slots, skipped, skipped)
        self.read_on_device(skipped, slots, skipped)

    def _launch(self, launch: Launch) -> None:
        import cupy

        stream = torch.cuda.current_stream(self.device)
        with (
            cupy.cuda.Device(self._index),
            cupy.cuda.ExternalStream(stream.cuda_stream, self._index),
        ):
            self._kernels[launch.kernel](launch.grid, launch.block, launch.args)

    def _num_multiprocessors(self) -> int:
        return self._multiprocessors

    def _make_event(self) -> Event:
        return _StreamEvent(self.device)


class _StreamEvent:
    """An event recorded on the stream that is current at the time."""

    def __init__(self, device: torch.device):
        self._device, self._event = device, torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return self._event.query()
