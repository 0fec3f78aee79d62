"""Slots of the arena are never given twice and never lost."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferscale_core.kv.arena import Arena, KVGeometry, SlotAllocator


@given(st.integers(1, 60), st.lists(st.integers(-5, 20), max_size=60))
def test_allocator_is_a_partition(num_slots: int, steps: list[int]) -> None:
    allocator = SlotAllocator(num_slots)
    held: list[np.ndarray] = []
    for step in steps:
        if step < 0:
            if held:
                allocator.free(held.pop(step % len(held)))
            continue
        slots = allocator.allocate(step)
        free = num_slots - sum(len(h) for h in held)
        if slots is None:
            assert step > free
        else:
            assert len(slots) == step
            held.append(slots)
        taken = np.concatenate([*held, np.zeros(0, np.int32)])
        assert len(np.unique(taken)) == len(taken)
        assert allocator.num_free == num_slots - len(taken)


def test_arena_takes_the_models_bytes_per_token() -> None:
    geometry = KVGeometry(
        num_layers=30, num_kv_heads=3, head_dim=64, block_size=128, dtype=torch.bfloat16
    )
    assert geometry.bytes_per_token == 23_040  # SmolLM2-135M: 30 * 2 * 3 * 64 * 2
    arena = Arena(geometry, geometry.num_slots(1 << 20), torch.device("cpu"))
    assert arena.data.numel() * 2 == geometry.num_slots(1 << 20) * geometry.bytes_per_token
    assert arena.data.numel() * 2 <= 1 << 20


def test_arena_without_room_for_a_token_says_so() -> None:
    geometry = KVGeometry(30, 3, 64, 128, torch.bfloat16)
    with pytest.raises(ValueError, match="raise arena_bytes"):
        geometry.num_slots(23_039)


@pytest.mark.parametrize("codec", ["auto", "fp8_e4m3", "int8"])
def test_what_is_stored_is_loaded(codec: str) -> None:
    geometry = KVGeometry(2, 3, 64, 16, torch.bfloat16).stored_as(codec)
    arena = Arena(geometry, 50, torch.device("cpu"))
    taken = sum(t.nbytes for t in (arena.data, arena.scales) if t is not None)
    assert taken == 50 * geometry.bytes_per_token
    slots = torch.tensor([3, 40, 7])
    keys, values = (torch.randn(3, 3, 64).bfloat16() for _ in range(2))
    arena.store(1, slots, keys, values)
    got = arena.load(1, slots)
    for x, y in zip((keys, values), got, strict=True):
        step = {"auto": 0.0, "fp8_e4m3": 2**-4, "int8": 1 / 127}[codec]
        assert (x.float() - y.float()).abs().max() <= step * x.float().abs().max()


def test_a_byte_an_element_is_about_half_of_bfloat16() -> None:
    plain = KVGeometry(30, 3, 64, 128, torch.bfloat16)
    for codec in ("fp8_e4m3", "int8"):
        assert plain.stored_as(codec).bytes_per_token / plain.bytes_per_token < 0.52
