"""Codecs: bytes, error bounds, and what must survive exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_kernels.codecs import CODECS

STEP = {"int8": 1 / 127, "fp8_e4m3": 2**-3}
"""Largest distance between neighbouring codes, relative to the largest element (int8) or to the
element itself (fp8)."""


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(STEP)),
    magnitude=st.floats(-30, 30),
    seed=st.integers(0, 1000),
    dim=st.sampled_from([32, 80, 256]),
    with_channels=st.booleans(),
)
def test_error_is_within_half_a_step(
    name: str, magnitude: float, seed: int, dim: int, with_channels: bool
) -> None:
    torch.manual_seed(seed)
    codec = CODECS[name]
    x = torch.randn(5, 3, dim) * 2.0**magnitude
    channels = torch.rand(3, dim) + 0.5 if with_channels else None
    data, scales = codec.encode(x, channels)
    assert data.shape == x.shape
    assert scales.shape == x.shape[:-1]
    y = codec.decode(data, scales, channels)
    plain = x if channels is None else x / channels
    back = y if channels is None else y / channels
    largest = plain.abs().amax(-1, keepdim=True)
    # The scale is rounded to 8 bits; the largest element may be cut by as much.
    rounding = 2**-8
    if name == "int8":
        bound = largest * (STEP[name] / 2 * (1 + rounding) + rounding)
    else:
        bound = plain.abs() * (STEP[name] / 2 + rounding) + largest * 2**-9 / 448
    assert bool(((back - plain).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("name", sorted(STEP))
def test_zeros_stay_zeros_and_nothing_overflows(name: str) -> None:
    x = torch.zeros(3, 2, 64)
    x[1, 0] = 3e38
    x[1, 1, 5] = -1e-30
    data, scales = CODECS[name].encode(x)
    y = CODECS[name].decode(data, scales)
    assert torch.isfinite(y).all()
    assert torch.equal(y[0], torch.zeros(2, 64))
    assert torch.equal(scales[0].float(), torch.ones(2))


def test_bytes() -> None:
    assert CODECS["auto"].bytes_per_head(64, torch.bfloat16) == 128
    assert CODECS["auto"].bytes_per_head(64, torch.float32) == 256
    assert CODECS["int8"].bytes_per_head(64, torch.bfloat16) == 66
    assert CODECS["fp8_e4m3"].bytes_per_head(64, torch.bfloat16) == 66
