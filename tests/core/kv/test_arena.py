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
    assert arena.kv.numel() * 2 == geometry.num_slots(1 << 20) * geometry.bytes_per_token
    assert arena.kv.numel() * 2 <= 1 << 20


def test_arena_without_room_for_a_token_says_so() -> None:
    geometry = KVGeometry(30, 3, 64, 128, torch.bfloat16)
    with pytest.raises(ValueError, match="raise arena_bytes"):
        geometry.num_slots(23_039)
