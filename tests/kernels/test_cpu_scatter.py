"""The fused CPU writer against the PyTorch reference, bit for bit up to one rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.cpu import PackedScatter
from inferscale_kernels.cpu_packed import PackedPage
from inferscale_kernels.cpu_tiled import TiledPage
from inferscale_kernels.reference import rotate

NUM_LAYERS, NUM_SLOTS = 3, 400


def _page(block_size: int, heads: int, dim: int) -> PackedPage:
    return PackedPage(
        block_size=block_size,
        block_stride=heads * block_size * 2 * dim,
        head_stride=block_size * 2 * dim,
        k_base=0,
        k_dim_stride=block_size,
        v_base=block_size * dim,
        v_token_stride=dim,
    )


def _tiled(block_size: int, heads: int, dim: int) -> TiledPage:
    page = _page(block_size, heads, dim)
    return TiledPage(block_size, page.block_stride, page.head_stride, page.k_base, page.v_base)


@settings(max_examples=160, deadline=None)
@given(
    # Few shapes: each compiles a kernel.
    shape=st.sampled_from(
        [(64, 64, True, "auto"), (64, 16, True, "int8"), (32, 32, False, "fp8_e4m3"),
         (64, 64, True, "fp8_e4m3"), (32, 0, True, "auto"), (80, 32, True, "auto"),
         (40, 20, False, "int8")]
    ),
    heads=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    num_tokens=st.integers(0, 300),
    start=st.integers(0, 200),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
    shift=st.sampled_from([0, 0, 2]),
    tiled=st.booleans(),
)  # fmt: skip
def test_equals_the_reference(
    shape: tuple[int, int, bool, str],
    heads: int,
    block_size: int,
    num_tokens: int,
    start: int,
    seed: int,
    threads: int,
    shift: int,
    tiled: bool,
) -> None:
    """``shift``: elements by which the paged cache misses a cache line."""
    dim, rotary_dim, is_neox, codec = shape
    torch.manual_seed(seed)
    data = torch.randn(NUM_LAYERS, NUM_SLOTS, 2, heads, dim).bfloat16()
    arena, scales = data.float(), None
    if codec != "auto":
        data, scales = CODECS[codec].encode(arena)
        arena = CODECS[codec].decode(data, scales)
    num_blocks = (start + num_tokens) // block_size + 2
    tiled = tiled and dim % 32 == 0
    page = (_tiled if tiled else _page)(block_size, heads, dim)
    caches = [
        torch.zeros(shift + num_blocks * page.block_stride).bfloat16()[shift:]
        for _ in range(NUM_LAYERS)
    ]
    before = [c.clone() for c in caches]
    table = torch.randn(600, rotary_dim) if rotary_dim else None
    writer = PackedScatter(
        data, scales, caches, page, [table] * NUM_LAYERS, [is_neox] * NUM_LAYERS, range(threads)
    )
    rng = np.random.default_rng(seed)
    src = rng.integers(0, NUM_SLOTS, num_tokens).astype(np.int32)
    # Blocks in any order, tokens in order within them: what a block table gives.
    blocks = rng.permutation(num_blocks)
    logical = np.arange(start, start + num_tokens)
    dst = (blocks[logical // block_size] * block_size + logical % block_size).astype(np.int64)
    positions = rng.integers(0, 600, num_tokens).astype(np.int64)
    writer.write(src, dst, positions)

    touched = torch.zeros(num_blocks * page.block_stride, dtype=torch.bool)
    for layer in range(NUM_LAYERS):
        keys, values = arena[layer, src, 0], arena[layer, src, 1]
        if table is not None:
            keys = rotate(keys, table[positions], is_neox)
        expected_keys = keys.bfloat16().float()
        t, h, d = np.meshgrid(dst % block_size, range(heads), range(dim), indexing="ij")
        base = (dst // block_size * page.block_stride)[:, None, None] + h * page.head_stride
        if isinstance(page, TiledPage):
            base = (dst // block_size * page.block_stride)[:, None, None]
            k_at = torch.from_numpy(base + page.k_offset(t, h, d, dim))
            v_at = torch.from_numpy(base + page.v_offset(t, h, d))
        else:
            k_at = torch.from_numpy(base + d * page.k_dim_stride + t)
            v_at = torch.from_numpy(base + page.v_base + t * page.v_token_stride + d)
        # The compiler may fuse multiply and add: one unit in the last place of bfloat16.
        torch.testing.assert_close(
            caches[layer][k_at].float(), expected_keys, rtol=2**-7, atol=2**-7
        )
        assert torch.equal(caches[layer][v_at], values.bfloat16())
        touched[k_at.flatten()] = True
        touched[v_at.flatten()] = True
        assert torch.equal(caches[layer][~touched], before[layer][~touched])


def test_lines_of_a_page_and_cache_lines() -> None:
    page = _page(32, 2, 64)
    assert page.is_aligned(4096)
    assert not page.is_aligned(4100)
    assert not _page(16, 2, 64).is_aligned(4096), "a key row of 16 tokens is half a line"
    assert _tiled(32, 2, 64).is_aligned(4096)
    assert not _tiled(32, 2, 64).is_aligned(4098)


def test_values_of_every_float8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(2)[:320].view(1, 10, 1, 1, 32)
    data = codes.view(torch.float8_e4m3fn).expand(1, 10, 2, 1, 32).contiguous()
    scales = torch.full((1, 10, 2, 1), 3.0).bfloat16()
    page = _page(16, 1, 32)
    cache = torch.zeros(page.block_stride).bfloat16()
    PackedScatter(data, scales, [cache], page, [None], [True]).write(
        np.arange(10, dtype=np.int32), np.arange(10), np.zeros(10, np.int64)
    )
    values = cache[page.v_base : page.v_base + 320].view(10, 32)
    assert torch.equal(values, CODECS["fp8_e4m3"].decode(data, scales)[0, :, 1, 0].bfloat16())


def test_an_arena_that_no_kernel_reads_is_refused() -> None:
    data = torch.zeros(1, 4, 2, 1, 32)
    with pytest.raises(ValueError, match="float32"):
        PackedScatter(data, None, [torch.zeros(4096).bfloat16()], _page(16, 1, 32), [None], [True])
