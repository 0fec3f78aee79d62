"""Elements of the arena as float32 and back, as the CPU writer's kernels compile them."""

from typing import Any

import numpy as np
import torch

_16 = np.uint32(16)


# Compiled by Numba: an element of the arena as float32, by its dtype. ``scale`` is float32.


def widen_bfloat16(x: Any, scale: Any) -> Any:
    return np.uint32(np.uint32(x) << _16).view(np.float32)


def widen_int8(x: Any, scale: Any) -> Any:
    return np.float32(x) * scale


def widen_float8_e4m3(x: Any, scale: Any) -> Any:
    # Sign, exponent and mantissa moved to where float32 has them; the exponents' bias differs by
    # 120, which a multiplication makes up for, subnormals included.
    bits = (np.uint32(x) & np.uint32(0x80)) << np.uint32(24) | (
        np.uint32(x) & np.uint32(0x7F)
    ) << np.uint32(20)
    return np.uint32(bits).view(np.float32) * np.float32(2.0**120) * scale


WIDEN = {
    torch.bfloat16: widen_bfloat16,
    torch.int8: widen_int8,
    torch.float8_e4m3fn: widen_float8_e4m3,
}


def narrow_to_bfloat16(x: Any) -> Any:
    """Bits of float32 ``x`` whose upper half is ``x`` in bfloat16, rounded to nearest even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> _16) & np.uint32(1))
    return np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd))
