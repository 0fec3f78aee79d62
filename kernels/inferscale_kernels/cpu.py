"""Rotate-and-scatter on the CPU: one fused pass from the arena into vLLM's paged cache.

vLLM's CPU attention packs its cache in one of two ways, of which each has its kernel: transposed
keys (``cpu_packed.py``), or tiles for AMX (``cpu_tiled.py``). Kernels are compiled with Numba per
head size and codec, so that every inner loop has a constant trip count.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from inferscale_kernels.cpu_elements import WIDEN
from inferscale_kernels.cpu_packed import PackedPage
from inferscale_kernels.cpu_tiled import TiledPage


class PackedScatter:
    """Writes segments of an arena into every layer's packed bfloat16 paged cache.

    Args:
        data: ``[num_layers, num_slots, 2, num_kv_heads, head_dim]``, keys unrotated: bfloat16, or
            the elements of a codec.
        scales: bfloat16 ``[num_layers, num_slots, 2, num_kv_heads]``; None for bfloat16 data.
        caches: per layer the flat storage of its paged cache, ``[num_elements]`` bfloat16.
        page: the layout of a page, the same in all layers.
        tables: per layer float32 ``[max_position, rotary_dim]``, or None for layers without
            rotary embeddings (their keys are copied as they are).
        is_neox: per layer the pairing of rotary dims.
        cpus: CPUs to run on, one thread each; the threads share the layers of a call.

    Raises:
        ValueError: elements of a dtype that no kernel reads.

    """

    def __init__(
        self,
        data: torch.Tensor,
        scales: torch.Tensor | None,
        caches: list[torch.Tensor],
        page: PackedPage | TiledPage,
        tables: list[torch.Tensor | None],
        is_neox: list[bool],
        cpus: Iterable[int] = (0,),
    ):
        if data.dtype not in WIDEN:
            raise ValueError(f"an arena of {data.dtype}; the CPU writer reads {list(WIDEN)}")
        self._data = _bits(data)
        none = np.zeros((len(data), 1, 1, 1), np.uint16)
        self._scales = none if scales is None else _bits(scales)
        self._flat = [_bits(cache) for cache in caches]
        identity = np.zeros((1, 0), np.float32)
        self._tables = [identity if t is None else t.numpy() for t in tables]
        aligned = all(page.is_aligned(cache.data_ptr()) for cache in caches)
        self._kernels = [
            page.kernel(data.shape[-1], table.shape[1], neox, data.dtype, aligned)
            for table, neox in zip(self._tables, is_neox, strict=True)
        ]
        self._page = page.arguments
        allowed = set(cpus)
        self._num_threads = max(1, min(len(allowed), len(caches)))
        self._pool: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            # The calling thread may be bound to one CPU; its helpers must not inherit that.
            self._pool = ThreadPoolExecutor(
                self._num_threads - 1, initializer=os.sched_setaffinity, initargs=(0, allowed)
            )
        self.write(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def write(self, src: np.ndarray, dst: np.ndarray, positions: np.ndarray) -> None:
        """Rotate the keys of arena slots ``src`` to ``positions`` and store K and V.

        Args:
            src: int32 ``[num_tokens]`` arena slots.
            dst: int64 ``[num_tokens]`` slots of the paged cache (block * block_size + offset).
            positions: int64 ``[num_tokens]`` serving positions.

        """
        # Each thread takes the next layer: one that shares its CPU takes fewer.
        layers = iter(range(len(self._flat)))
        others = [
            self._pool.submit(self._write_layers, layers, src, dst, positions)
            for _ in range(self._num_threads - 1)
            if self._pool is not None
        ]
        self._write_layers(layers, src, dst, positions)
        for future in others:
            # One that has not begun has nothing left to do.
            if not future.cancel():
                future.result()

    def _write_layers(
        self, layers: Iterator[int], src: np.ndarray, dst: np.ndarray, positions: np.ndarray
    ) -> None:
        for layer in layers:
            table = self._tables[layer]
            # NoPE layers read no table row, but the kernel still indexes by position.
            where = positions if table.shape[1] else np.zeros_like(positions)
            self._kernels[layer](
                self._data[layer], self._scales[layer], src, dst, where,
                self._flat[layer], table, *self._page,
            )  # fmt: skip


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements as NumPy knows them: bfloat16 as uint16, float8 as uint8, int8 as it is."""
    if tensor.dtype == torch.int8:
        return tensor.numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.uint8).numpy()
