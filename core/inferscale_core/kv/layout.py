"""The layout of vLLM's paged cache, learned through the engine's own writer.

The paged cache of a layer is logically ``[block, token, head, K|V, dim]``, but a backend packs a
page as its kernels like it. Index patterns written by the engine's own ``do_kv_cache_update``
into scratch blocks show where each element goes.
"""

from dataclasses import dataclass
from typing import Any

import torch

from inferscale_kernels.cpu_packed import PackedPage
from inferscale_kernels.cpu_tiled import TILE, TiledPage

_DIGIT = 128
"""Index digits are written in this base: 0..127 for keys and 128..255 for values, all exact in
every cache dtype (bfloat16 holds integers up to 256)."""


class LayoutError(RuntimeError):
    """The paged cache of this backend could not be understood."""


@dataclass(frozen=True)
class StridedPage:
    """Element offsets of a page in which head dims are contiguous, relative to its block.

    K of (token t, head h, dim d) is at ``k_base + t * slot_stride + h * head_stride + d``, V at
    the same place from ``v_base`` on.
    """

    block_size: int
    block_stride: int
    head_stride: int
    slot_stride: int
    k_base: int
    v_base: int


@dataclass(frozen=True)
class PagedLayout:
    """Where the elements of a block lie in the flat storage of a layer's cache.

    ``k_offset`` and ``v_offset`` are int64 ``[block_size, num_kv_heads, head_dim]``, relative to
    ``block * block_stride``.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    block_stride: int
    k_offset: torch.Tensor
    v_offset: torch.Tensor

    def element_index(self, slots: torch.Tensor, of_keys: bool) -> torch.Tensor:
        """Flat element indices ``[num_tokens, num_kv_heads, head_dim]`` of paged ``slots``."""
        offset = (self.k_offset if of_keys else self.v_offset).to(slots.device)
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        return (block * self.block_stride)[:, None, None] + offset[slots % self.block_size]

    def strided_page(self) -> StridedPage | None:
        """The page as the GPU kernels want it, or None when elements are packed otherwise."""
        k, v = self.k_offset, self.v_offset
        page = StridedPage(
            block_size=self.block_size,
            block_stride=self.block_stride,
            head_stride=int(k[0, -1, 0] - k[0, 0, 0]) // max(1, self.num_kv_heads - 1),
            slot_stride=int(k[-1, 0, 0] - k[0, 0, 0]) // max(1, self.block_size - 1),
            k_base=int(k[0, 0, 0]),
            v_base=int(v[0, 0, 0]),
        )
        t = torch.arange(self.block_size)[:, None, None] * page.slot_stride
        h = torch.arange(self.num_kv_heads)[None, :, None] * page.head_stride
        inner = t + h + torch.arange(self.head_dim)
        same = torch.equal(k, page.k_base + inner) and torch.equal(v, page.v_base + inner)
        return page if same else None

    def packed_page(self) -> PackedPage | TiledPage | None:
        """The page as the fused CPU writer wants it, or None when the keys lie otherwise."""
        k, v = self.k_offset, self.v_offset
        heads, dims, tokens = self.num_kv_heads, self.head_dim, self.block_size
        head_stride = int(k[0, 1, 0] - k[0, 0, 0]) if heads > 1 else 0
        page = PackedPage(
            block_size=tokens,
            block_stride=self.block_stride,
            head_stride=head_stride,
            k_base=int(k[0, 0, 0]),
            k_dim_stride=int(k[0, 0, 1] - k[0, 0, 0]),
            v_base=int(v[0, 0, 0]),
            v_token_stride=int(v[1, 0, 0] - v[0, 0, 0]),
        )
        t = torch.arange(tokens)[:, None, None]
        h = torch.arange(heads)[None, :, None] * head_stride
        d = torch.arange(dims)[None, None, :]
        same_k = torch.equal(k, page.k_base + h + d * page.k_dim_stride + t)
        same_v = torch.equal(v, page.v_base + h + t * page.v_token_stride + d)
        if same_k and same_v:
            return page
        if dims % 32 or tokens % TILE:
            return None
        tiled = TiledPage(tokens, self.block_stride, head_stride, page.k_base, page.v_base)
        h = torch.arange(heads)[None, :, None]
        same_k = torch.equal(k, tiled.k_offset(t, h, d, dims))
        return tiled if same_k and torch.equal(v, tiled.v_offset(t, h, d)) else None


def flat_storage(cache: torch.Tensor) -> torch.Tensor:
    """The elements that a layer's cache view spans, as one dimension, without a copy."""
    span = 1 + sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True))
    return cache.as_strided((span,), (1,), cache.storage_offset())


def engine_write(
    layer: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write ``[num_tokens, num_kv_heads, head_dim]`` keys and values with the engine's own op."""
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def learn_layout(
    layer: Any, cache: torch.Tensor, block_size: int, num_kv_heads: int, head_dim: int
) -> PagedLayout:
    """Learn where ``layer``'s backend puts keys and values.

    Args:
        layer: the engine's attention layer.
        cache: its paged cache, blocks first.
        block_size: tokens of a block.
        num_kv_heads: KV heads of this worker.
        head_dim: elements of a head.

    Raises:
        LayoutError: the blocks are not the first dimension, or elements are missing or shared.

    """
    if cache.stride(0) < max(cache.stride()):
        raise LayoutError(
            f"paged cache of shape {tuple(cache.shape)} and strides {cache.stride()}: expected "
            "blocks that follow each other; this attention backend is not supported yet"
        )
    scratch = torch.empty_strided(
        (2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device
    )
    flat = flat_storage(scratch)
    page_elements = len(flat) - scratch.stride(0)
    shape = (block_size, num_kv_heads, head_dim)
    count = block_size * num_kv_heads * head_dim
    index = torch.arange(count).view(shape)
    slots = torch.arange(block_size, device=cache.device)
    found = torch.zeros(page_elements, dtype=torch.int64)
    is_value = torch.zeros(page_elements, dtype=torch.bool)
    written = torch.zeros(page_elements, dtype=torch.bool)
    weight = 1
    while weight == 1 or weight < count:
        digit = (index // weight) % _DIGIT
        flat.fill_(-1.0)
        keys = digit.to(cache.device, cache.dtype).contiguous()
        values = (digit + _DIGIT).to(cache.device, cache.dtype).contiguous()
        engine_write(layer, scratch, keys, values, slots)
        seen = flat[:page_elements].float().cpu()
        written = seen >= 0
        is_value = seen >= _DIGIT
        found += torch.where(written, (seen.long() % _DIGIT) * weight, 0)
        weight *= _DIGIT
    at = torch.nonzero(written).flatten()
    k_at, v_at = at[~is_value[at]], at[is_value[at]]
    offsets = []
    for where in (k_at, v_at):
        ids = found[where]
        if len(ids) != count or len(torch.unique(ids)) != count:
            raise LayoutError(
                f"learning the paged cache found {len(ids)} of {count} elements of a block; "
                "this attention backend is not supported yet"
            )
        offset = torch.empty(count, dtype=torch.int64)
        offset[ids] = where
        offsets.append(offset.view(shape))
    layout = PagedLayout(
        block_size, num_kv_heads, head_dim, cache.stride(0), offsets[0], offsets[1]
    )
    _verify(layer, scratch, layout)
    return layout


def _verify(layer: Any, scratch: torch.Tensor, layout: PagedLayout) -> None:
    """Write random values into the second block and read them back through the layout."""
    shape = (layout.block_size, layout.num_kv_heads, layout.head_dim)
    keys, values = (torch.randn(shape).to(scratch) for _ in range(2))
    slots = torch.arange(layout.block_size, device=scratch.device) + layout.block_size
    engine_write(layer, scratch, keys, values, slots)
    second_block = flat_storage(scratch)[scratch.stride(0) :]
    k_seen = second_block[layout.k_offset.to(scratch.device)]
    v_seen = second_block[layout.v_offset.to(scratch.device)]
    if not (torch.equal(k_seen, keys) and torch.equal(v_seen, values)):
        raise LayoutError(
            "the learned layout of the paged cache does not read back what was written"
        )
