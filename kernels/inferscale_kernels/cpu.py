"""Rotate-and-scatter on the CPU: one fused pass from the arena into a packed paged cache.

For the layout of vLLM's vector CPU attention: in the page of a block and head, keys lie
transposed (``[head_dim, block_size]``, tokens contiguous) and values row by row.

```
page of (block, head)       K: dim 0 | t0 t1 t2 ... |      V: t0 | dim 0 1 2 ... |
                               dim 1 | t0 t1 t2 ... |         t1 | dim 0 1 2 ... |
```

Compiled with Numba per head size and codec, so that every inner loop has a constant trip count.
32 tokens that fill a cache line of each key row are rotated into a tile, two tokens to a 32-bit
word, then transposed in registers and stored line by line (``cpu_lines.py``).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

LINE_TOKENS = 32
"""Tokens whose keys fill a cache line of 64 bytes in bfloat16."""

_LINE_BYTES = 64

PREFETCH = 8
"""Tokens ahead whose keys and values are asked for: segments lie anywhere in the arena, which no
hardware foresees."""


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
        return base_address % _LINE_BYTES == 0 and all(2 * v % _LINE_BYTES == 0 for v in offsets)


Kernel = Callable[..., None]

_16 = np.uint32(16)


# Compiled by Numba: an element of the arena as float32, by its dtype. ``scale`` is float32.


def _bfloat16(x: Any, scale: Any) -> Any:
    return np.uint32(np.uint32(x) << _16).view(np.float32)


def _int8(x: Any, scale: Any) -> Any:
    return np.float32(x) * scale


def _float8_e4m3(x: Any, scale: Any) -> Any:
    # Sign, exponent and mantissa moved to where float32 has them; the exponents' bias differs by
    # 120, which a multiplication makes up for, subnormals included.
    bits = (np.uint32(x) & np.uint32(0x80)) << np.uint32(24) | (
        np.uint32(x) & np.uint32(0x7F)
    ) << np.uint32(20)
    return np.uint32(bits).view(np.float32) * np.float32(2.0**120) * scale


_WIDEN = {torch.bfloat16: _bfloat16, torch.int8: _int8, torch.float8_e4m3fn: _float8_e4m3}


def _to_bfloat16(x: Any) -> Any:
    """Bits of float32 ``x`` whose upper half is ``x`` in bfloat16, rounded to nearest even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> _16) & np.uint32(1))
    return np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd))


@lru_cache(maxsize=64)
def _kernel(
    head_dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, aligned: bool
) -> Kernel:
    D, R = head_dim, rotary_dim  # noqa: N806 - compile-time constants of the kernel
    half = R // 2
    # Dim i of a pair sits at first * i, its partner at first * i + second.
    first, second = (1, half) if is_neox else (2, 1)
    plain = dtype == torch.bfloat16
    transposed = D % 16 == 0
    lines = 2 * D // _LINE_BYTES if 2 * D % _LINE_BYTES == 0 else 0
    size = dtype.itemsize
    row_lines = -(-size * D // _LINE_BYTES)

    # Imported late: when an engine starts, vLLM's Triton dispatch walks the attributes of loaded
    # modules and fails on one of Numba's.
    import numba

    from inferscale_kernels.cpu_lines import copy_line, fence, prefetch, transpose_lines

    widen = numba.njit(inline="always")(_WIDEN[dtype])
    widen_scale = numba.njit(inline="always")(_bfloat16)
    narrow = numba.njit(inline="always")(_to_bfloat16)
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
                            prefetch(next_at + _LINE_BYTES * line)
                            prefetch(next_at + size * num_heads * D + _LINE_BYTES * line)
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
                        copy(row_at + _LINE_BYTES * line, flat_at + 2 * o + _LINE_BYTES * line)
            i += run
        fence()

    return rotate_scatter


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
        page: PackedPage,
        tables: list[torch.Tensor | None],
        is_neox: list[bool],
        cpus: Iterable[int] = (0,),
    ):
        if data.dtype not in _WIDEN:
            raise ValueError(f"an arena of {data.dtype}; the CPU writer reads {list(_WIDEN)}")
        self._data = _bits(data)
        none = np.zeros((len(data), 1, 1, 1), np.uint16)
        self._scales = none if scales is None else _bits(scales)
        self._flat = [_bits(cache) for cache in caches]
        identity = np.zeros((1, 0), np.float32)
        self._tables = [identity if t is None else t.numpy() for t in tables]
        aligned = all(page.is_aligned(cache.data_ptr()) for cache in caches)
        self._kernels = [
            _kernel(data.shape[-1], table.shape[1], neox, data.dtype, aligned)
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
