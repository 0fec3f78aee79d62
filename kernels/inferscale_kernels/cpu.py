"""Rotate-and-scatter on the CPU: one fused pass from the arena into a packed paged cache.

For the layout of vLLM's vector CPU attention: in the page of a block and head, keys lie
transposed (``[head_dim, block_size]``, tokens contiguous) and values row by row. Compiled with
Numba per head size, so that every inner loop has a constant trip count.

```
page of (block, head)       K: dim 0 | t0 t1 t2 ... |      V: t0 | dim 0 1 2 ... |
                               dim 1 | t0 t1 t2 ... |         t1 | dim 0 1 2 ... |
```
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

_TILE = 32
"""Tokens rotated together before their keys are stored: one cache line of bfloat16 keys."""


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
def _kernel(head_dim: int, rotary_dim: int, is_neox: bool) -> Kernel:
    D, R, T = head_dim, rotary_dim, _TILE  # noqa: N806 - compile-time constants of the kernel
    half, words = R // 2, D // 4
    # Dim i of a pair sits at first * i, its partner at first * i + second.
    first, second = (1, half) if is_neox else (2, 1)

    # Imported late: when an engine starts, vLLM's Triton dispatch walks the attributes of loaded
    # modules and fails on one of Numba's.
    import numba

    @numba.njit(nogil=True)
    def rotate_scatter(
        arena: Any, arena64: Any, src: Any, dst: Any, pos: Any, flat: Any, flat64: Any, table: Any,
        block_size: int, block_stride: int, head_stride: int, k_base: int, k_dim: int,
        v_base: int, v_token: int,
    ) -> None:  # fmt: skip
        num_tokens = src.shape[0]
        x = np.empty(D, np.float32)
        y = np.empty(D, np.float32)
        x_bits = x.view(np.uint32)
        y_bits = y.view(np.uint32)
        tile = np.empty((T, D), np.uint16)
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
            for h in range(arena.shape[2]):
                page = block * block_stride + h * head_stride
                for j in range(run):
                    s = src[i + j]
                    p = pos[i + j]
                    for d in range(D):
                        x_bits[d] = np.uint32(arena[s, 0, h, d]) << np.uint32(16)
                    for d in range(half):
                        c = table[p, d]
                        z = table[p, half + d]
                        a = x[first * d]
                        b = x[first * d + second]
                        y[first * d] = a * c - b * z
                        y[first * d + second] = b * c + a * z
                    for d in range(R, D):
                        y[d] = x[d]
                    for d in range(D):
                        u = y_bits[d]
                        # Round to nearest even, as torch does.
                        tile[j, d] = np.uint16(
                            (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))
                            >> np.uint32(16)
                        )
                    o = (page + v_base + (t + j) * v_token) >> 2
                    for d in range(words):
                        flat64[o + d] = arena64[s, 1, h, d]
                o = page + k_base + t
                if run == T:
                    for g in range(T // 4):
                        j = 4 * g
                        for d in range(D):
                            packed[g, d] = (
                                np.uint64(tile[j, d])
                                | (np.uint64(tile[j + 1, d]) << np.uint64(16))
                                | (np.uint64(tile[j + 2, d]) << np.uint64(32))
                                | (np.uint64(tile[j + 3, d]) << np.uint64(48))
                            )
                    o = o >> 2
                    row = k_dim >> 2
                    for d in range(D):
                        for g in range(T // 4):
                            flat64[o + d * row + g] = packed[g, d]
                else:
                    for d in range(D):
                        flat[o + d * k_dim] = tile[0, d]
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
        num_threads: threads that share the layers of a call.

    """

    def __init__(
        self,
        arena: torch.Tensor,
        caches: list[torch.Tensor],
        page: PackedPage,
        tables: list[torch.Tensor | None],
        is_neox: list[bool],
        num_threads: int = 1,
    ):
        head_dim = arena.shape[-1]
        bits = arena.view(torch.int16).numpy().view(np.uint16)
        self._arena, self._arena64 = bits, bits.view(np.uint64)
        self._flat = [c.view(torch.int16).numpy().view(np.uint16) for c in caches]
        self._flat64 = [f[: len(f) // 4 * 4].view(np.uint64) for f in self._flat]
        identity = np.zeros((1, 0), np.float32)
        self._tables = [identity if t is None else t.numpy() for t in tables]
        self._kernels = [
            _kernel(head_dim, table.shape[1], neox)
            for table, neox in zip(self._tables, is_neox, strict=True)
        ]
        self._page = (
            page.block_size, page.block_stride, page.head_stride, page.k_base,
            page.k_dim_stride, page.v_base, page.v_token_stride,
        )  # fmt: skip
        self._num_parts = max(1, min(num_threads, len(caches)))
        self._pool = ThreadPoolExecutor(self._num_parts - 1) if self._num_parts > 1 else None
        self.write(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def write(self, src: np.ndarray, dst: np.ndarray, positions: np.ndarray) -> None:
        """Rotate the keys of arena slots ``src`` to ``positions`` and store K and V.

        Args:
            src: int32 ``[num_tokens]`` arena slots.
            dst: int64 ``[num_tokens]`` slots of the paged cache (block * block_size + offset).
            positions: int64 ``[num_tokens]`` serving positions.

        """
        num_layers = len(self._flat)
        bounds = [num_layers * i // self._num_parts for i in range(self._num_parts + 1)]
        parts = list(pairwise(bounds))
        others: list[Future[None]] = []
        if self._pool is not None:
            others = [
                self._pool.submit(self._write_layers, lo, hi, src, dst, positions)
                for lo, hi in parts[1:]
            ]
        self._write_layers(*parts[0], src, dst, positions)
        for future in others:
            future.result()

    def _write_layers(
        self, lo: int, hi: int, src: np.ndarray, dst: np.ndarray, positions: np.ndarray
    ) -> None:
        for layer in range(lo, hi):
            table = self._tables[layer]
            # NoPE layers read no table row, but the kernel still indexes by position.
            where = positions if table.shape[1] else np.zeros_like(positions)
            self._kernels[layer](
                self._arena[layer], self._arena64[layer], src, dst, where,
                self._flat[layer], self._flat64[layer], table, *self._page,
            )  # fmt: skip
