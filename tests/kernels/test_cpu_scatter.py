"""The fused CPU writer against the PyTorch reference, bit for bit up to one rounding."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_kernels.cpu import PackedPage, PackedScatter
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


@settings(max_examples=60, deadline=None)
@given(
    # Few shapes: each compiles a kernel.
    shape=st.sampled_from([(64, 64, True), (64, 16, True), (32, 32, False), (32, 0, True)]),
    heads=st.integers(1, 4),
    block_size=st.sampled_from([32, 64, 128]),
    num_tokens=st.integers(0, 300),
    start=st.integers(0, 200),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_equals_the_reference(shape, heads, block_size, num_tokens, start, seed, threads) -> None:
    dim, rotary_dim, is_neox = shape
    torch.manual_seed(seed)
    arena = torch.randn(NUM_LAYERS, NUM_SLOTS, 2, heads, dim).bfloat16()
    num_blocks = (start + num_tokens) // block_size + 2
    page = _page(block_size, heads, dim)
    caches = [torch.zeros(num_blocks * page.block_stride).bfloat16() for _ in range(NUM_LAYERS)]
    before = [c.clone() for c in caches]
    table = torch.randn(600, rotary_dim) if rotary_dim else None
    writer = PackedScatter(
        arena, caches, page, [table] * NUM_LAYERS, [is_neox] * NUM_LAYERS, range(threads)
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
        k_at = torch.from_numpy(base + d * page.k_dim_stride + t)
        v_at = torch.from_numpy(base + page.v_base + t * page.v_token_stride + d)
        # The compiler may fuse multiply and add: one unit in the last place of bfloat16.
        torch.testing.assert_close(
            caches[layer][k_at].float(), expected_keys, rtol=2**-7, atol=2**-7
        )
        assert torch.equal(caches[layer][v_at], values)
        touched[k_at.flatten()] = True
        touched[v_at.flatten()] = True
        assert torch.equal(caches[layer][~touched], before[layer][~touched])


def test_page_of_another_layout_is_not_packed() -> None:
    assert _page(32, 2, 64).packs_four_tokens
    assert not PackedPage(32, 4096, 2050, 0, 32, 2048, 64).packs_four_tokens
