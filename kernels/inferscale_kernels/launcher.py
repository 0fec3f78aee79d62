"""From tensors to launches: what is the same on every device that runs the kernels' source.

:class:`inferscale_kernels.cuda.CudaTransfer` launches with CuPy; the tests launch the same source,
compiled for the host, with the same arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.pages import (
    PagedLayer,
    UnsupportedKernelError,
    check_layers,
    pack_layers,
    widest_vector,
)
from inferscale_kernels.program import MAX_THREADS, Program
from inferscale_kernels.staging import Event, Staging

_MAX_LAYERS_PER_THREAD = 8
_FILL = 4 * 1024
"""Threads wanted a multiprocessor: some five times as many as run at once, so that the last
blocks of a launch leave little idle."""


@dataclass(frozen=True)
class Launch:
    """One launch. ``args`` are NumPy scalars of exactly the kernel's parameter types."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[np.generic, ...]


class PagedTransfer(ABC):
    """Moves tokens between an arena and every layer's paged cache, one launch a call.

    Args:
        arena: ``[num_layers, num_slots, 2, num_kv_heads, head_dim]``, contiguous; index 0 of the
            third dimension is the key before rotation, 1 the value.
        layers: the paged caches, in the arena's layer order. Their memory, and the arena's, must
            stay where it is for the life of this object.
        codec: how the arena stores elements, one of ``CODECS``.
        scales: bfloat16 ``[num_layers, num_slots, 2, num_kv_heads]``, with a codec but "auto".
        key_channels: float32 ``[num_layers, num_kv_heads, head_dim]`` or None; keys are divided by
            them before encoding and multiplied after decoding.

    Attributes:
        num_launches: launches so far.

    Raises:
        UnsupportedKernelError: a dtype, shape, codec or head size that the kernels do not serve.

    """

    def __init__(
        self,
        arena: torch.Tensor,
        layers: Sequence[PagedLayer],
        codec: str = "auto",
        scales: torch.Tensor | None = None,
        key_channels: torch.Tensor | None = None,
    ):
        self.num_launches = 0
        check_layers(layers)
        _check_arena(arena, layers, codec, scales, key_channels)
        self.device = arena.device
        self.num_layers, self.num_slots, _, self.num_heads, head_dim = arena.shape
        self.block_size = layers[0].block_size
        self._num_paged_slots = layers[0].keys.shape[0] * self.block_size
        tables = _device_tables(layers, arena.device)
        self._max_position = min((len(t) for t in tables if t is not None), default=2**31)
        packed = pack_layers(layers, tables)
        channels = [] if key_channels is None else [key_channels.data_ptr()]
        self.program = Program(
            codec,
            arena.dtype,
            layers[0].keys.dtype,
            head_dim,
            widest_vector(
                packed,
                head_dim,
                arena.itemsize,
                layers[0].keys.itemsize,
                [arena.data_ptr(), *channels],
            ),
        )
        self._descriptors = torch.from_numpy(packed.view(np.uint8)).to(arena.device)
        # The kernels hold addresses; this object keeps what they point to alive.
        self._held = (arena, list(layers), scales, key_channels, tables)
        self._arena_args = tuple(
            np.uint64(0 if t is None else t.data_ptr()) for t in (arena, scales, key_channels)
        )
        self._staging = Staging(arena.device, self._make_event)

    def write(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        positions: np.ndarray,
        *,
        key_scale: float = 1.0,
    ) -> None:
        """Write arena slots ``src`` to paged slots ``dst``, keys rotated to ``positions``.

        Enqueued on the current stream; the host does not wait, and may reuse its arrays at once.

        Args:
            src: int32 ``[num_tokens]`` arena slots.
            dst: int64 ``[num_tokens]`` paged slots (block * block_size + offset), each at most
                once; -1 for a token to skip.
            positions: int64 ``[num_tokens]`` serving positions, within the tables also where a
                token is skipped.
            key_scale: multiplied onto keys after the rotation (an attention temperature).

        Raises:
            IndexError: an index outside of the arena, the paged cache or a table. Unchecked it
                would overwrite other requests' memory.

        """
        src, dst, positions = _as_indices(src, dst, positions)
        _check_range("src", src, self.num_slots)
        _check_range("dst", dst, self._num_paged_slots)
        _check_range("positions", positions, self._max_position, lowest=0)
        if len(src):
            self._staging.run(
                (dst, positions, src),
                lambda at: self.write_on_device(at[2], at[0], at[1], key_scale=key_scale),
            )

    def read(self, paged: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
        """Read paged slots into arena ``slots``, keys un-rotated from ``positions``.

        Enqueued as :meth:`write`, whose argument shapes, dtypes and errors are the same: ``paged``
        int64, ``slots`` int32 (each at most once, -1 to skip), ``positions`` int64.
        """
        slots, paged, positions = _as_indices(slots, paged, positions)
        _check_range("slots", slots, self.num_slots)
        _check_range("paged", paged, self._num_paged_slots)
        _check_range("positions", positions, self._max_position, lowest=0)
        if len(slots):
            self._staging.run(
                (paged, positions, slots), lambda at: self.read_on_device(at[0], at[2], at[1])
            )

    def write_on_device(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        positions: torch.Tensor,
        *,
        key_scale: float = 1.0,
    ) -> None:
        """As :meth:`write` with index tensors on the device, not checked for their range.

        Only a launch: it can be captured in a CUDA graph. A graph's padding tokens have ``dst``
        -1.
        """
        self._enqueue(self.plan_write(src, dst, positions, key_scale))

    def read_on_device(
        self, paged: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """As :meth:`read` with index tensors on the device, not checked for their range."""
        self._enqueue(self.plan_read(paged, slots, positions))

    def plan_write(
        self, src: torch.Tensor, dst: torch.Tensor, positions: torch.Tensor, key_scale: float
    ) -> Launch:
        """The launch of :meth:`write_on_device`."""
        plan = self._plan("rotate_scatter", self.program.scatter_lanes, src, dst, positions)
        return Launch(plan.kernel, plan.grid, plan.block, (*plan.args, np.float32(key_scale)))

    def plan_read(
        self, paged: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> Launch:
        """The launch of :meth:`read_on_device`."""
        return self._plan("gather_unrotate", self.program.gather_lanes, paged, slots, positions)

    def _enqueue(self, launch: Launch) -> None:
        self._launch(launch)
        self.num_launches += 1

    def _plan(
        self,
        kernel: str,
        lanes: int,
        source: torch.Tensor,
        target: torch.Tensor,
        positions: torch.Tensor,
    ) -> Launch:
        num_tokens = len(source)
        heads = min(self.num_heads, MAX_THREADS // lanes)
        tokens = max(1, min(64, MAX_THREADS // (lanes * heads)))
        per_thread = self._layers_per_thread(num_tokens * lanes * self.num_heads)
        return Launch(
            kernel,
            (
                -(-num_tokens // tokens),
                -(-self.num_layers // per_thread),
                -(-self.num_heads // heads),
            ),
            (lanes, heads, tokens),
            (
                *self._arena_args,
                *(np.uint64(t.data_ptr()) for t in (source, target, positions, self._descriptors)),
                np.int32(num_tokens),
                np.int32(self.num_layers),
                np.int64(self.num_slots),
                np.int32(self.num_heads),
                np.int32(self.block_size),
                np.int32(per_thread),
            ),
        )

    def _layers_per_thread(self, threads_per_layer: int) -> int:
        """Layers that a thread walks: as many as still fill the device.

        With few heads a token's angles weigh as much as its KV, and are worth sharing anyway.
        """
        fewest = max(1, 4 // self.num_heads)
        fill = self.num_layers * threads_per_layer // (self._num_multiprocessors() * _FILL)
        return min(max(fewest, fill), _MAX_LAYERS_PER_THREAD, self.num_layers)

    @abstractmethod
    def _launch(self, launch: Launch) -> None:
        """Enqueue on the device's current stream."""

    @abstractmethod
    def _num_multiprocessors(self) -> int: ...

    @abstractmethod
    def _make_event(self) -> Event: ...


def _check_arena(
    arena: torch.Tensor,
    layers: Sequence[PagedLayer],
    codec: str,
    scales: torch.Tensor | None,
    key_channels: torch.Tensor | None,
) -> None:
    _, _, num_heads, head_dim = layers[0].keys.shape
    shape = (len(layers), arena.shape[1] if arena.dim() > 1 else 0, 2, num_heads, head_dim)
    scaled = codec in CODECS and CODECS[codec].dtype is not None
    if (scales is not None) != scaled:
        raise UnsupportedKernelError(f"codec {codec!r} {'needs' if scaled else 'takes no'} scales")
    for name, tensor, expected, dtype in (
        ("arena", arena, shape, arena.dtype),
        ("scales", scales, shape[:4], torch.bfloat16),
        ("key_channels", key_channels, (len(layers), num_heads, head_dim), torch.float32),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != expected or tensor.dtype != dtype or not tensor.is_contiguous():
            raise UnsupportedKernelError(
                f"{name} {tuple(tensor.shape)} of {tensor.dtype}, expected contiguous {expected} "
                f"of {dtype}"
            )
        if tensor.device != layers[0].keys.device:
            raise UnsupportedKernelError(
                f"{name} on {tensor.device}, the paged cache on {layers[0].keys.device}"
            )


def _device_tables(layers: Sequence[PagedLayer], device: torch.device) -> list[torch.Tensor | None]:
    """Tables in float32 on ``device``, one copy for all layers that name the same tensor."""
    made: dict[int, torch.Tensor] = {}
    for layer in layers:
        table = layer.cos_sin
        if table is not None and id(table) not in made:
            made[id(table)] = table.detach().to(device, torch.float32).contiguous()
    return [None if layer.cos_sin is None else made[id(layer.cos_sin)] for layer in layers]


def _as_indices(
    slots: np.ndarray, paged: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not slots.shape == paged.shape == positions.shape or slots.ndim != 1:
        raise IndexError(
            f"arena slots {slots.shape}, paged slots {paged.shape} and positions "
            f"{positions.shape}: expected one of each a token"
        )
    return (
        np.ascontiguousarray(slots, np.int32),
        np.ascontiguousarray(paged, np.int64),
        np.ascontiguousarray(positions, np.int64),
    )


def _check_range(name: str, values: np.ndarray, end: int, lowest: int = -1) -> None:
    if not len(values):
        return
    least, most = values.min(), values.max()
    if least < lowest or most >= end:
        raise IndexError(f"{name} from {least} to {most}, expected {lowest} to {end - 1}")
