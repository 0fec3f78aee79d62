"""Rotate-and-scatter on the CPU: one fused pass from the arena into a packed paged cache.

For the layout of vLLM's vector CPU attention: in the page of a block and head, keys lie
transposed (``[head_dim, block_size]``, tokens contiguous) and values row by row. Compiled with
Numba per head size, so that every inner loop has a constant trip count.

```
page of (block, head)       K: dim 0 | t0 t1 t2 ... |      V: t0 | dim 0 1 2 ... |
                               dim 1 | t0 t1 t2 ... |         t1 | dim 0 1 2 ... |
```
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_MAX_TILE = 128
"""Most tokens rotated together before their keys are stored: each key row is then written in
contiguous runs of 256 bytes."""


@dataclass(frozen=True)
class PackedPage:
    """Element offsets of a token-contiguous-keys page, relative to its block.

    K of (token t, head h, dim d) is at ``k_base + h * head_stride + d * k_dim_stride + t``,
    V at ``v_base + h * head_stride + t * v_token_stride + d``.
    """

    block_size: int
    block_stride: int
    head_stride: int
    k_base: int
    k_dim_stride: int
    v_base: int
    v_token_stride: int

    @property
    def packs_four_tokens(self) -> bool:
        """Whether four tokens' keys, or four dims of a value, are one aligned 64-bit store."""
        strides = (self.block_stride, self.head_stride, self.k_dim_stride, self.v_token_stride)
        return all(v % 4 == 0 for v in (self.block_size, self.k_base, self.v_base, *strides))


Kernel = Callable[..., None]


@lru_cache(maxsize=64)
def _kernel(head_dim: int, rotary_dim: int, is_neox: bool, tile: int) -> Kernel:
    D, R, T = head_dim, rotary_dim, tile  # noqa: N806 - compile-time constants of the kernel
    half, words = R // 2, D // 4
    # Dim i of a pair sits at first * i, its partner at first * i + second.
    first, second = (1, half) if is_neox else (2, 1)

    # Imported late: when an engine starts, vLLM's Triton dispatch walks the attributes of loaded
    # modules and fails on one of Numba's.
    import numba

    u16, u32 = np.uint16, np.uint32
    one, sixteen, bias = u32(1), u32(16), u32(0x7FFF)

    @numba.njit(nogil=True)
    def rotate_scatter(
        arena: Any, arena64: Any, src: Any, dst: Any, pos: Any, flat: Any, flat64: Any, table: Any,
        block_size: int, block_stride: int, head_stride: int, k_base: int, k_dim: int,
        v_base: int, v_token: int,
    ) -> None:  # fmt: skip
        num_tokens = src.shape[0]
        tiles = np.empty((arena.shape[2], T, D), np.uint16)
        packed = np.empty((T // 4, D), np.uint64)
        i = 0
        while i < num_tokens:
            block = dst[i] // block_size
            t = dst[i] - block * block_size
            # A run of T tokens that fills an aligned T slots of the block goes as one tile.
            run = 1
            if t % T == 0 and i + T <= num_tokens and t + T <= block_size:
                run = T
                for j in range(1, T):
                    if dst[i + j] != dst[i] + j:
                        run = 1
            for j in range(run):
                s = src[i + j]
                p = pos[i + j]
                for h in range(arena.shape[2]):
                    page = block * block_stride + h * head_stride
                    for d in range(half):
                        a = np.uint32(np.uint32(arena[s, 0, h, first * d]) << sixteen).view(
                            np.float32
                        )
                        b = np.uint32(
                            np.uint32(arena[s, 0, h, first * d + second]) << sixteen
                        ).view(np.float32)
                        c = table[p, d]
                        z = table[p, half + d]
                        u = np.float32(a * c - b * z).view(np.uint32)
                        v = np.float32(b * c + a * z).view(np.uint32)
                        # Round to nearest even, as torch does.
                        u_up = u32(u + u32(bias + u32(u32(u >> sixteen) & one)))
                        v_up = u32(v + u32(bias + u32(u32(v >> sixteen) & one)))
                        tiles[h, j, first * d] = u16(u_up >> sixteen)
                        tiles[h, j, first * d + second] = u16(v_up >> sixteen)
                    for d in range(R, D):
                        tiles[h, j, d] = arena[s, 0, h, d]
                    o = (page + v_base + (t + j) * v_token) >> 2
                    for d in range(words):
                        flat64[o + d] = arena64[s, 1, h, d]
            for h in range(arena.shape[2]):
                page = block * block_stride + h * head_stride
                o = page + k_base + t
                if run == T:
                    for g in range(T // 4):
                        j = 4 * g
                        for d in range(D):
                            packed[g, d] = (
                                np.uint64(tiles[h, j, d])
                                | (np.uint64(tiles[h, j + 1, d]) << np.uint64(16))
                                | (np.uint64(tiles[h, j + 2, d]) << np.uint64(32))
                                | (np.uint64(tiles[h, j + 3, d]) << np.uint64(48))
                            )
                    o = o >> 2
                    row = k_dim >> 2
                    for d in range(D):
                        for g in range(T // 4):
                            flat64[o + d * row + g] = packed[g, d]
                else:
                    for d in range(D):
                        flat[o + d * k_dim] = tiles[h, 0, d]
            i += run

    return rotate_scatter


class PackedScatter:
    """Writes segments of a bfloat16 arena into every layer's packed paged cache.

    Args:
        arena: ``[num_layers, num_slots, 2, num_kv_heads, head_dim]`` bfloat16, keys unrotated.
        caches: per layer the flat storage of its paged cache, ``[num_elements]`` bfloat16.
        page: the layout of a page, the same in all layers.
        tables: per layer float32 ``[max_position, rotary_dim]``, or None for layers without
            rotary embeddings (their keys are copied as they are).
        is_neox: per layer the pairing of rotary dims.
        cpus: CPUs to run on, one thread each; the threads share the layers of a call.

    """

    def __init__(
        self,
        arena: torch.Tensor,
        caches: list[torch.Tensor],
        page: PackedPage,
        tables: list[torch.Tensor | None],
        is_neox: list[bool],
        cpus: Iterable[int] = (0,),
    ):
        head_dim = arena.shape[-1]
        bits = arena.view(torch.int16).numpy().view(np.uint16)
        self._arena, self._arena64 = bits, bits.view(np.uint64)
        self._flat = [c.view(torch.int16).numpy().view(np.uint16) for c in caches]
        self._flat64 = [f[: len(f) // 4 * 4].view(np.uint64) for f in self._flat]
        identity = np.zeros((1, 0), np.float32)
        self._tables = [identity if t is None else t.numpy() for t in tables]
        self._kernels = [
            _kernel(head_dim, table.shape[1], neox, min(_MAX_TILE, page.block_size))
            for table, neox in zip(self._tables, is_neox, strict=True)
        ]
        self._page = (
            page.block_size, page.block_stride, page.head_stride, page.k_base,
            page.k_dim_stride, page.v_base, page.v_token_stride,
        )  # fmt: skip
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
                self._arena[layer], self._arena64[layer], src, dst, where,
                self._flat[layer], self._flat64[layer], table, *self._page,
            )  # fmt: skip
