"""Layouts of the paged cache, learned from a writer.

Most writers here stand for attention backends that need a GPU: they write the canonical
``[block, head, slot, K|V]`` view of a cache whose memory lies in some order. The CPU backend's own
op is used too, as is every kind of packing that this machine can run.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from inferscale_core.kv.layout import LayoutError, flat_storage, learn_layout
from inferscale_core.kv.rotary import RotaryTable
from inferscale_core.kv.transfer import paged_layers
from inferscale_kernels.cpu import PackedScatter
from inferscale_kernels.cpu_packed import PackedPage
from inferscale_kernels.cpu_tiled import TiledPage

BLOCKS, HEADS, SLOTS, DIM = 5, 3, 16, 32

ORDERS = {
    "heads first": (0, 1, 2, 3),
    "slots first": (0, 2, 1, 3),
}


def _cache(order: tuple[int, ...], layers: int = 1) -> torch.Tensor:
    """``[block, head, slot, 2 * dim]``; of several layers that share every block, the second."""
    sizes = (BLOCKS, HEADS, SLOTS, 2 * DIM)
    memory = torch.zeros([BLOCKS, layers, *(sizes[i] for i in order[1:])])
    view = memory[:, layers // 2]
    return view.permute([order.index(i) for i in range(4)])


def _layer(write: object) -> SimpleNamespace:
    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=write))


def _write(
    layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, at: torch.Tensor
) -> None:
    cache[at // SLOTS, :, at % SLOTS] = torch.cat((keys, values), dim=-1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", [1, 4])
def test_every_order_of_memory_is_learned(order: str, layers: int) -> None:
    cache = _cache(ORDERS[order], layers)
    layout = learn_layout(_layer(_write), cache, SLOTS, HEADS, DIM)
    page = layout.strided_page()
    assert page is not None
    assert (page.head_stride, page.slot_stride) == (cache.stride(1), cache.stride(2))
    assert page.block_stride == cache.stride(0)
    assert page.v_base - page.k_base == DIM
    assert layout.packed_page() is None
    keys, values = torch.randn(7, HEADS, DIM), torch.randn(7, HEADS, DIM)
    slots = torch.tensor([3, 79, 16, 15, 64, 0, 31])
    _write(None, keys, values, cache, slots)
    flat = flat_storage(cache)
    assert torch.equal(flat[layout.element_index(slots, of_keys=True)], keys)
    assert torch.equal(flat[layout.element_index(slots, of_keys=False)], values)


@pytest.mark.parametrize("order", ORDERS)
def test_views_for_the_kernels_are_the_engines_memory(order: str) -> None:
    cache = _cache(ORDERS[order], layers=3)
    layout = learn_layout(_layer(_write), cache, SLOTS, HEADS, DIM)
    page = layout.strided_page()
    assert page is not None
    table = RotaryTable(torch.randn(100, DIM), is_neox=False)
    rotated, plain = paged_layers(page, layout, [cache, cache], [table, None])
    assert (rotated.cos_sin is table.cos_sin, rotated.is_neox) == (True, False)
    assert plain.cos_sin is None
    keys, values = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    _write(None, keys, values, cache, torch.tensor([5, 3 * SLOTS + 7]))
    for view, written in ((rotated.keys, keys), (rotated.values, values)):
        assert torch.equal(torch.stack((view[0, 5], view[3, 7])), written)


def test_planes_of_keys_and_values_that_hold_all_blocks_are_refused() -> None:
    cache = torch.zeros(2 * HEADS * SLOTS * DIM, BLOCKS).t()
    with pytest.raises(LayoutError, match="blocks that follow each other"):
        learn_layout(_layer(_write), cache, SLOTS, HEADS, DIM)


def test_a_writer_that_loses_elements_is_refused() -> None:
    def lossy(
        layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, at: object
    ) -> None:
        _write(layer, keys[:-1], values[:-1], cache, at[:-1])  # type: ignore[index]

    with pytest.raises(LayoutError, match="of 1536 elements"):
        learn_layout(_layer(lossy), _cache((0, 1, 2, 3)), SLOTS, HEADS, DIM)


def test_rounding_on_the_way_in_is_noticed() -> None:
    def rounding(
        layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor,
        at: torch.Tensor,
    ) -> None:  # fmt: skip
        _write(layer, keys.round(), values.round(), cache, at)

    with pytest.raises(LayoutError, match="does not read back"):
        learn_layout(_layer(rounding), _cache((0, 1, 2, 3)), SLOTS, HEADS, DIM)


def _cpu_write(isa: str) -> Callable[..., None]:
    """What vLLM's CPU attention backend does with one of its instruction sets."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def write(
        layer: object,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        at: torch.Tensor,
    ) -> None:
        blocks, heads, slots, _ = cache.shape
        k, v = cache.view(blocks, heads, 2 * slots, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, k, v, at, isa)

    return write


@pytest.mark.parametrize(("isa", "kind"), [("vec", PackedPage), ("amx", TiledPage)])
@pytest.mark.parametrize(("heads", "dim", "slots"), [(1, 32, 32), (3, 64, 128), (2, 128, 64)])
def test_pages_of_the_cpu_backend_have_a_writer(
    isa: str, kind: type, heads: int, dim: int, slots: int
) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    cache = torch.zeros(4, heads, slots, 2 * dim, dtype=torch.bfloat16)
    write = _cpu_write(isa)
    layout = learn_layout(_layer(write), cache, slots, heads, dim)
    page = layout.packed_page()
    assert isinstance(page, kind)
    assert layout.strided_page() is None
    data = torch.randn(1, 3 * slots, 2, heads, dim).bfloat16()
    expected = cache.clone()
    at = torch.arange(5, 2 * slots + 9)
    write(None, data[0, at, 0], data[0, at, 1], expected, at)
    writer = PackedScatter(data, None, [flat_storage(cache)], page, [None], [True])
    writer.write(at.int().numpy(), at.numpy(), at.numpy())
    assert torch.equal(cache, expected)
