"""Pages of vLLM's vector CPU attention: keys transposed, values row by row.

```
page of (block, head)       K: dim 0 | t0 t1 t2 ... |      V: t0 | dim 0 1 2 ... |
                               dim 1 | t0 t1 t2 ... |         t1 | dim 0 1 2 ... |
```

32 tokens that fill a cache line of each key row are rotated into a tile, two tokens to a 32-bit
word, then transposed in registers and stored line by line (``cpu_lines.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from inferscale_kernels.cpu_elements import WIDEN, narrow_to_bfloat16, widen_bfloat16

LINE_TOKENS = 32
"""Tokens whose keys fill a cache line of 64 bytes in bfloat16."""

LINE_BYTES = 64

PREFETCH = 8
"""Tokens ahead whose keys and values are asked for: segments lie anywhere in the arena, which no
hardware foresees."""

Kernel = Callable[..., None]


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

    def is_aligned(self, base_address: int) -> bool:
        """Whether lines of 32 tokens' keys and values' rows start where cache lines do."""
        strides = (self.block_stride, self.head_stride, self.k_dim_stride, self.v_token_stride)
        offsets = (self.k_base, self.v_base, *strides)
        return base_address % LINE_BYTES == 0 and all(2 * v % LINE_BYTES == 0 for v in offsets)

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernel takes of it."""
        return (
            self.block_size, self.block_stride, self.head_stride, self.k_base, self.k_dim_stride,
            self.v_base, self.v_token_stride,
        )  # fmt: skip

    def kernel(
        self, head_dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, aligned: bool
    ) -> Kernel:
        """The compiled writer; see ``packed_kernel``."""
        return packed_kernel(head_dim, rotary_dim, is_neox, dtype, aligned)


@lru_cache(maxsize=64)
def packed_kernel(
    head_dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, aligned: bool
) -> Kernel:
    D, R = head_dim, rotary_dim  # noqa: N806 - compile-time constants of the kernel
    half = R // 2
    # Dim i of a pair sits at first * i, its partner at first * i + second.
    first, second = (1, half) if is_neox else (2, 1)
    plain = dtype == torch.bfloat16
    transposed = D % 16 == 0
    lines = 2 * D // LINE_BYTES if 2 * D % LINE_BYTES == 0 else 0
    size = dtype.itemsize
    row_lines = -(-size * D // LINE_BYTES)

    # Imported late: when an engine starts, vLLM's Triton dispatch walks the attributes of loaded
    # modules and fails on one of Numba's.
    import numba

    from inferscale_kernels.cpu_lines import copy_line, fence, prefetch, transpose_lines

    widen = numba.njit(inline="always")(WIDEN[dtype])
    widen_scale = numba.njit(inline="always")(widen_bfloat16)
    narrow = numba.njit(inline="always")(narrow_to_bfloat16)
    copy = copy_line(aligned)
    transpose = transpose_lines(aligned)
    u16, u32, i64 = np.uint16, np.uint32, np.int64
    sixteen, high, one = u32(16), u32(0xFFFF0000), np.float32(1)

    @numba.njit(nogil=True)
    def rotate_scatter(
        arena: Any, scales: Any, src: Any, dst: Any, pos: Any, flat: Any, table: Any,
        block_size: int, block_stride: int, head_stride: int, k_base: int, k_dim: int,
        v_base: int, v_token: int,
    ) -> None:  # fmt: skip
        num_tokens = src.shape[0]
        num_heads = arena.shape[2]
        tile = np.empty((LINE_TOKENS // 2, D), np.uint32)
        row = np.empty(D, np.uint16)
        flat_at, tile_at, row_at = flat.ctypes.data, tile.ctypes.data, row.ctypes.data
        arena_at = arena.ctypes.data
        i = 0
        while i < num_tokens:
            block = dst[i] // block_size
            t = dst[i] - block * block_size
            # Tokens that follow each other in the block, up to the end of a line.
            run = min(LINE_TOKENS - t % LINE_TOKENS, num_tokens - i, block_size - t)
            for j in range(1, run):
                if dst[i + j] != dst[i] + j:
                    run = j
                    break
            for h in range(num_heads):
                page = block * block_stride + h * head_stride
                for pair in range((run + 1) // 2):
                    # The last token of an odd run is its own partner.
                    i0 = i + 2 * pair
                    i1 = min(i0 + 1, i + run - 1)
                    s0, s1 = src[i0], src[i1]
                    k0, k1 = arena[s0, 0, h], arena[s1, 0, h]
                    scale0 = scale1 = one
                    if not plain:
                        scale0 = widen_scale(scales[s0, 0, h], one)
                        scale1 = widen_scale(scales[s1, 0, h], one)
                    cs0, cs1 = table[pos[i0]], table[pos[i1]]
                    out = tile[pair]
                    for ahead in range(i0 + PREFETCH, min(i0 + PREFETCH + 2, num_tokens)):
                        next_at = arena_at + size * (i64(src[ahead]) * 2 * num_heads + h) * D
                        for line in range(row_lines):
                            prefetch(next_at + LINE_BYTES * line)
                            prefetch(next_at + size * num_heads * D + LINE_BYTES * line)
                    for d in range(half):
                        a0, b0 = widen(k0[first * d], scale0), widen(k0[first * d + second], scale0)
                        a1, b1 = widen(k1[first * d], scale1), widen(k1[first * d + second], scale1)
                        u0 = narrow(a0 * cs0[d] - b0 * cs0[half + d])
                        v0 = narrow(b0 * cs0[d] + a0 * cs0[half + d])
                        u1 = narrow(a1 * cs1[d] - b1 * cs1[half + d])
                        v1 = narrow(b1 * cs1[d] + a1 * cs1[half + d])
                        out[first * d] = u32(u32(u0 >> sixteen) | u32(u1 & high))
                        out[first * d + second] = u32(u32(v0 >> sixteen) | u32(v1 & high))
                    for d in range(R, D):
                        u0, u1 = narrow(widen(k0[d], scale0)), narrow(widen(k1[d], scale1))
                        out[d] = u32(u32(u0 >> sixteen) | u32(u1 & high))
                at = page + k_base + t
                if transposed and run == LINE_TOKENS:
                    for d in range(0, D, 16):
                        transpose(tile_at + 4 * d, 4 * D, flat_at + 2 * (at + d * k_dim), 2 * k_dim)
                else:
                    for d in range(D):
                        for j in range(run):
                            both = tile[j >> 1, d]
                            flat[at + d * k_dim + j] = u16(both >> sixteen) if j & 1 else u16(both)
                for j in range(run):
                    s = src[i + j]
                    o = page + v_base + (t + j) * v_token
                    if plain:
                        row_at = arena_at + 2 * (((i64(s) * 2 + 1) * num_heads + h) * D)
                        if not lines:
                            for d in range(D):
                                flat[o + d] = arena[s, 1, h, d]
                    else:
                        scale = widen_scale(scales[s, 1, h], one)
                        values = arena[s, 1, h]
                        for d in range(D):
                            row[d] = u16(narrow(widen(values[d], scale)) >> sixteen)
                        if not lines:
                            for d in range(D):
                                flat[o + d] = row[d]
                    for line in range(lines):
                        copy(row_at + LINE_BYTES * line, flat_at + 2 * o + LINE_BYTES * line)
            i += run
        fence()

    return rotate_scatter
