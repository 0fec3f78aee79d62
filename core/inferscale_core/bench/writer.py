"""The CPU writer against a copy of the same bytes: ``inferscale bench writer``.

No engine: an arena, paged caches of the layout that vLLM has on this CPU, and facts' segments at
random places of the arena. Each write alternates with two copies of as many bytes as it reads and
writes: by one thread, and split over as many threads as the writer has. All work on memory that the
turns before have pushed out of the caches, as a forward pass does.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from inferscale_core.bench.statistics import Spread, paired_ratios, spread
from inferscale_core.kv.arena import Arena, KVGeometry
from inferscale_kernels.codecs import CODECS
from inferscale_kernels.cpu import PackedScatter
from inferscale_kernels.cpu_packed import PackedPage
from inferscale_kernels.cpu_tiled import TiledPage

BLOCK_SIZE = 128
SEGMENT_TOKENS = 30
ARENA_TOKENS, CACHE_TOKENS = 6000, 7680
FIRST_POSITION = 20
"""Tokens of the header before the facts: the first line of a page is not a whole one."""

COPY_BYTES = 96 << 20
"""Memory that the copies go round in: more than a last-level cache."""

GEOMETRIES = {
    "SmolLM2-135M": KVGeometry(30, 3, 64, BLOCK_SIZE, torch.bfloat16),
    "Qwen2.5-1.5B": KVGeometry(28, 2, 128, BLOCK_SIZE, torch.bfloat16),
}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """One geometry and codec. Times in ms; ratios are of turns that followed each other."""

    model: str
    kv_store_dtype: str
    arena_bytes: int
    page_bytes: int
    write_ms: Spread
    over_memcpy: Spread
    over_memcpy_threads: Spread


class _Copy:
    """A copy that reads and writes as many bytes as a write does, by ``threads`` threads."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        parts = max(2, -(-COPY_BYTES // num_bytes))
        self._source = np.ones((parts, num_bytes), dtype=np.uint8)
        self._target = np.ones((parts, num_bytes), dtype=np.uint8)
        edges = np.linspace(0, num_bytes, threads + 1, dtype=np.int64)
        self._bounds = [slice(a, b) for a, b in pairwise(edges)]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __call__(self, turn: int) -> None:
        target, source = (a[turn % len(a)] for a in (self._target, self._source))
        if self._pool is None:
            np.copyto(target, source)
            return
        list(self._pool.map(lambda part: np.copyto(target[part], source[part]), self._bounds))


def measure(num_tokens: int, repeats: int, progress: Progress) -> list[Row]:
    """Every geometry with every codec."""
    cases = [(model, codec) for model in GEOMETRIES for codec in CODECS]
    rows = []
    for number, (model, codec) in enumerate(cases, 1):
        rows.append(_measure(model, codec, num_tokens, repeats))
        progress(f"{model}, {codec}", number, len(cases))
    return rows


def _measure(model: str, codec: str, num_tokens: int, repeats: int) -> Row:
    geometry = GEOMETRIES[model].stored_as(codec)
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    arena = Arena(geometry, ARENA_TOKENS, torch.device("cpu"))
    _fill(arena)
    page = _page(heads, dim)
    num_blocks = CACHE_TOKENS // BLOCK_SIZE
    caches = torch.ones(geometry.num_layers, num_blocks * page.block_stride, dtype=torch.bfloat16)
    table = torch.rand(CACHE_TOKENS, dim)
    layers = geometry.num_layers
    cpus = sorted(os.sched_getaffinity(0))
    writer = PackedScatter(
        arena.data, arena.scales, list(caches), page, [table] * layers, [True] * layers, cpus
    )
    arena_bytes = num_tokens * geometry.bytes_per_token
    page_bytes = num_tokens * GEOMETRIES[model].bytes_per_token
    copy_bytes = (arena_bytes + page_bytes) // 2
    copies = [_Copy(copy_bytes, 1), _Copy(copy_bytes, len(cpus))]
    draw = np.random.default_rng(0)
    times: list[list[float]] = [[], [], []]
    for turn in range(repeats + 2):
        where = _places(draw, num_tokens, num_blocks)
        turns: Sequence[Callable[[], Any]] = (
            partial(writer.write, *where),
            *(partial(copy, turn) for copy in copies),
        )
        for samples, run in zip(times, turns, strict=True):
            began = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - began))
    # The first turns meet memory that was never touched, and wake the threads.
    write, one, several = (samples[2:] for samples in times)
    return Row(
        model, codec, arena_bytes, page_bytes, spread(write),
        paired_ratios(write, one), paired_ratios(write, several),
    )  # fmt: skip


def layout_of_this_machine() -> str:
    """``tiled`` where vLLM's CPU attention uses AMX, else ``packed``."""
    return "tiled" if torch.cpu._is_amx_tile_supported() else "packed"


def _page(heads: int, dim: int) -> PackedPage | TiledPage:
    block_stride, head_stride = 2 * heads * BLOCK_SIZE * dim, 2 * BLOCK_SIZE * dim
    k_base, v_base = 0, BLOCK_SIZE * dim
    if layout_of_this_machine() == "tiled":
        return TiledPage(BLOCK_SIZE, block_stride, head_stride, k_base, v_base)
    return PackedPage(BLOCK_SIZE, block_stride, head_stride, k_base, BLOCK_SIZE, v_base, dim)


def _fill(arena: Arena) -> None:
    """Random elements: uninitialised memory may hold what is no number."""
    shape = (arena.data.shape[1], arena.data.shape[3], arena.data.shape[4])
    slots = torch.arange(shape[0])
    for layer in range(len(arena.data)):
        arena.store(layer, slots, torch.rand(shape), torch.rand(shape))


def _places(draw: Any, num_tokens: int, num_blocks: int) -> tuple[np.ndarray, ...]:
    """Arena slots, paged slots and positions of a prompt of facts."""
    count = -(-num_tokens // SEGMENT_TOKENS)
    starts = draw.choice(ARENA_TOKENS // SEGMENT_TOKENS, count, replace=False) * SEGMENT_TOKENS
    src = (starts[:, None] + np.arange(SEGMENT_TOKENS)).ravel()[:num_tokens].astype(np.int32)
    positions = np.arange(FIRST_POSITION, FIRST_POSITION + num_tokens)
    blocks = draw.permutation(num_blocks)
    dst = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return src, dst.astype(np.int64), positions.astype(np.int64)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The largest ratio over the models for each codec."""
    return {
        f"writer_over_memcpy_{codec}": max(
            row.over_memcpy["median"] for row in rows if row.kv_store_dtype == codec
        )
        for codec in CODECS
    }
