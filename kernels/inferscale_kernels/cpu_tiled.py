"""Pages of vLLM's AMX CPU attention: keys and values as tiles of 32-bit words.

```
page of (block, head)    a line of 64 bytes is 16 words
K: 16 tokens of a pair of dims      tokens 0-15 | dims 0,1 | dims 2,3 | ... |  tokens 16-31 | ...
V: 16 dims of a pair of tokens      dims 0-15 | tokens 0,1 | tokens 2,3 | ... |  dims 16-31 | ...
```

A word of K is two dims of one token, so 16 rotated tokens are transposed word by word in
registers; one of V is one dim of two tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from inferscale_kernels.cpu_elements import WIDEN, narrow_to_bfloat16, widen_bfloat16
from inferscale_kernels.cpu_packed import LINE_BYTES, PREFETCH, Kernel

TILE = 16
"""Tokens of a tile of keys, and dims of a tile of values."""


@dataclass(frozen=True)
class TiledPage:
    """Element offsets of an AMX page, relative to its block; B is ``block_size``.

    K of (token t, head h, dim d) is at ``k_base + h * head_stride + t // 16 * 16 * head_dim +
    d // 2 * 32 + t % 16 * 2 + d % 2``, V at ``v_base + h * head_stride + d // 16 * 16 * B +
    t // 2 * 32 + d % 16 * 2 + t % 2``. ``head_dim`` is a multiple of 32.
    """

    block_size: int
    block_stride: int
    head_stride: int
    k_base: int
    v_base: int

    def is_aligned(self, base_address: int) -> bool:
        """Whether lines of the page are cache lines."""
        offsets = (self.block_stride, self.head_stride, self.k_base, self.v_base)
        return base_address % LINE_BYTES == 0 and all(2 * v % LINE_BYTES == 0 for v in offsets)

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernel takes of it."""
        return self.block_size, self.block_stride, self.head_stride, self.k_base, self.v_base

    def kernel(
        self, head_dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, aligned: bool
    ) -> Kernel:
        """The compiled writer; see ``tiled_kernel``."""
        return tiled_kernel(head_dim, rotary_dim, is_neox, dtype, aligned)

    def k_offset(self, token: Any, head: Any, dim: Any, head_dim: int) -> Any:
        """Where an element of a key is, from its block; integers or arrays of them."""
        tile = self.k_base + head * self.head_stride + token // TILE * TILE * head_dim
        return tile + dim // 2 * 32 + token % TILE * 2 + dim % 2

    def v_offset(self, token: Any, head: Any, dim: Any) -> Any:
        """The same for an element of a value."""
        tile = self.v_base + head * self.head_stride + dim // TILE * TILE * self.block_size
        return tile + token // 2 * 32 + dim % TILE * 2 + token % 2


@lru_cache(maxsize=64)
def tiled_kernel(
    head_dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, aligned: bool
) -> Kernel:
    """Compile for a head size, a rotation and an arena's dtype."""
    D, R = head_dim, rotary_dim  # noqa: N806 - compile-time constants of the kernel
    half = R // 2
    # Dim i of a pair sits at first * i, its partner at first * i + second.
    first, second = (1, half) if is_neox else (2, 1)
    plain = dtype == torch.bfloat16
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
        block_size: int, block_stride: int, head_stride: int, k_base: int, v_base: int,
    ) -> None:  # fmt: skip
        num_tokens = src.shape[0]
        num_heads = arena.shape[2]
        tile = np.empty((TILE, D), np.uint16)
        words = np.empty(D, np.uint32)
        flat_at, tile_at, words_at = flat.ctypes.data, tile.ctypes.data, words.ctypes.data
        arena_at = arena.ctypes.data
        i = 0
        while i < num_tokens:
            block = dst[i] // block_size
            t = dst[i] - block * block_size
            # Tokens that follow each other in the block, up to the end of a tile.
            run = min(TILE - t % TILE, num_tokens - i, block_size - t)
            for j in range(1, run):
                if dst[i + j] != dst[i] + j:
                    run = j
                    break
            for h in range(num_heads):
                page = block * block_stride + h * head_stride
                for j in range(run):
                    s = src[i + j]
                    keys, out, angles = arena[s, 0, h], tile[j], table[pos[i + j]]
                    scale = one
                    if not plain:
                        scale = widen_scale(scales[s, 0, h], one)
                    if i + j + PREFETCH < num_tokens:
                        ahead = i64(src[i + j + PREFETCH])
                        next_at = arena_at + size * (ahead * 2 * num_heads + h) * D
                        for line in range(row_lines):
                            prefetch(next_at + LINE_BYTES * line)
                            prefetch(next_at + size * num_heads * D + LINE_BYTES * line)
                    for d in range(half):
                        a = widen(keys[first * d], scale)
                        b = widen(keys[first * d + second], scale)
                        x = narrow(a * angles[d] - b * angles[half + d])
                        y = narrow(b * angles[d] + a * angles[half + d])
                        out[first * d] = u16(x >> sixteen)
                        out[first * d + second] = u16(y >> sixteen)
                    for d in range(R, D):
                        out[d] = u16(narrow(widen(keys[d], scale)) >> sixteen)
                at = page + k_base + t // TILE * TILE * D
                if run == TILE:
                    for pair in range(0, D // 2, TILE):
                        to = flat_at + 2 * (at + 32 * pair)
                        transpose(tile_at + 4 * pair, 2 * D, to, LINE_BYTES)
                else:
                    for j in range(run):
                        o = at + 2 * (t % TILE + j)
                        for pair in range(D // 2):
                            flat[o + 32 * pair] = tile[j, 2 * pair]
                            flat[o + 32 * pair + 1] = tile[j, 2 * pair + 1]
                j = 0
                while j < run:
                    # A token without its partner is its own.
                    whole = (t + j) % 2 == 0 and j + 1 < run
                    s0 = src[i + j]
                    s1 = src[i + j + 1] if whole else s0
                    v0, v1 = arena[s0, 1, h], arena[s1, 1, h]
                    if plain:
                        for d in range(D):
                            words[d] = u32(v0[d]) | u32(u32(v1[d]) << sixteen)
                    else:
                        scale0 = widen_scale(scales[s0, 1, h], one)
                        scale1 = widen_scale(scales[s1, 1, h], one)
                        for d in range(D):
                            low = narrow(widen(v0[d], scale0)) >> sixteen
                            words[d] = u32(low) | u32(narrow(widen(v1[d], scale1)) & high)
                    o = page + v_base + (t + j) // 2 * 32
                    if whole:
                        for tile_d in range(D // TILE):
                            to = flat_at + 2 * (o + tile_d * TILE * block_size)
                            copy(words_at + LINE_BYTES * tile_d, to)
                        j += 2
                    else:
                        for d in range(D):
                            place = o + d // TILE * TILE * block_size + d % TILE * 2
                            flat[place + (t + j) % 2] = u16(words[d])
                        j += 1
            i += run
        fence()

    return rotate_scatter
