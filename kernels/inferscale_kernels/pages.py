"""The paged cache of a layer, as the kernels and their reference take it.

```
keys[block, slot, head, dim]    values[block, slot, head, dim]
```

Both are views of the engine's tensor in any physical order (NHD, HND, K and V in separate planes,
interleaved ``[..., K||V]``, blocks further apart than they are long): only the elements of a head
must lie next to each other, and K and V must have the same strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

LAYER = np.dtype([
    ("keys", np.uint64),
    ("values", np.uint64),
    ("table", np.uint64),
    ("block_stride", np.int64),
    ("head_stride", np.int64),
    ("slot_stride", np.int64),
    ("rotary_dim", np.int32),
    ("is_neox", np.int32),
    ("k_scale", np.float32),
    ("v_scale", np.float32),
])  # fmt: skip
"""The struct ``Layer`` of ``cuda_source/pages.h``: pointers in bytes, strides in elements."""

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


class UnsupportedKernelError(ValueError):
    """The kernels do not serve these tensors; the message says which and what they serve."""


@dataclass(frozen=True)
class PagedLayer:
    """One layer's paged cache and rotary table.

    Args:
        keys: ``[num_blocks, block_size, num_kv_heads, head_dim]`` view of the engine's cache, in
            bfloat16, float16, float32 or float8_e4m3fn (view an engine's ``uint8`` cache as that).
        values: the same for values, with the strides of ``keys``.
        cos_sin: ``[max_position, rotary_dim]``, the engine's table (see ``reference``), or None
            where the layer does not rotate.
        is_neox: pairing of the rotary dims.
        k_scale: of a float8 cache: stored = key / k_scale. Ignored otherwise.
        v_scale: the same for values.

    """

    keys: torch.Tensor
    values: torch.Tensor
    cos_sin: torch.Tensor | None = None
    is_neox: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def rotary_dim(self) -> int:
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]


def check_layers(layers: Sequence[PagedLayer]) -> None:
    """Check that the kernels can serve ``layers``.

    Raises:
        UnsupportedKernelError: shapes, dtypes or devices differ between layers, keys and values
            have different strides, elements of a head are apart, a dtype or scale is not served.

    """
    if not layers:
        raise UnsupportedKernelError("no layers: a paged cache has at least one")
    first = layers[0].keys
    for index, layer in enumerate(layers):
        k, v, table = layer.keys, layer.values, layer.cos_sin
        where = f"layer {index}: "
        if k.dtype not in CACHE_DTYPES:
            raise UnsupportedKernelError(
                f"{where}a paged cache of {k.dtype}; expected one of "
                f"{', '.join(map(str, CACHE_DTYPES))} (view a uint8 cache as its float8 type)"
            )
        if k.dim() != 4 or k.shape != first.shape or v.shape != first.shape:
            raise UnsupportedKernelError(
                f"{where}keys {tuple(k.shape)} and values {tuple(v.shape)}, expected "
                f"[num_blocks, block_size, num_kv_heads, head_dim] as layer 0, {tuple(first.shape)}"
            )
        if {t.dtype for t in (k, v)} != {first.dtype} or {t.device for t in (k, v)} != {
            first.device
        }:
            raise UnsupportedKernelError(f"{where}another dtype or device than layer 0's keys")
        if k.stride() != v.stride() or k.stride(3) != 1:
            raise UnsupportedKernelError(
                f"{where}strides {k.stride()} of keys and {v.stride()} of values: expected the "
                "same, and 1 along a head"
            )
        if table is not None and (
            table.dim() != 2 or table.shape[1] % 2 or not 0 < table.shape[1] <= k.shape[3]
        ):
            raise UnsupportedKernelError(
                f"{where}a rotary table {tuple(table.shape)}, expected [max_position, rotary_dim] "
                f"with an even rotary_dim up to {k.shape[3]}"
            )
        # Reciprocals of the scales must be ordinary float32 numbers.
        if not all(1e-30 < scale < 1e30 for scale in (layer.k_scale, layer.v_scale)):
            raise UnsupportedKernelError(
                f"{where}scales {layer.k_scale} and {layer.v_scale}: expected positive and ordinary"
            )
    if first.shape[0] * first.shape[1] >= 2**31:
        raise UnsupportedKernelError("more than 2^31 paged slots")


def pack_layers(layers: Sequence[PagedLayer], tables: Sequence[torch.Tensor | None]) -> np.ndarray:
    """Descriptors ``[num_layers]`` of ``LAYER``; ``tables`` are float32 on the caches' device."""
    packed = np.zeros(len(layers), LAYER)
    for row, layer, table in zip(packed, layers, tables, strict=True):
        block_stride, slot_stride, head_stride, _ = layer.keys.stride()
        row["keys"], row["values"] = layer.keys.data_ptr(), layer.values.data_ptr()
        row["table"] = 0 if table is None else table.data_ptr()
        row["block_stride"], row["head_stride"] = block_stride, head_stride
        row["slot_stride"] = slot_stride
        row["rotary_dim"], row["is_neox"] = layer.rotary_dim, layer.is_neox
        row["k_scale"], row["v_scale"] = layer.k_scale, layer.v_scale
    return packed


def widest_vector(
    packed: np.ndarray, head_dim: int, arena_bytes: int, cache_bytes: int, pointers: Sequence[int]
) -> int:
    """Elements of one access: 16 bytes of the wider type, or what the layout allows.

    Args:
        packed: the layers' descriptors, as :func:`pack_layers` made them.
        head_dim: elements of a head.
        arena_bytes: bytes of an element of the arena.
        cache_bytes: bytes of an element of the paged cache.
        pointers: of the arena, and of the key channels where there are any.

    """
    strides = [int(s) for name in ("block", "head", "slot") for s in packed[f"{name}_stride"]]
    halves = [int(r) // 2 for r, t in zip(packed["rotary_dim"], packed["table"], strict=True) if t]
    pages = [int(p) for name in ("keys", "values") for p in packed[name]]
    floats = [int(p) for p in packed["table"]] + list(pointers[1:])
    width = 16 // max(arena_bytes, cache_bytes)
    while width > 1:
        fits = (
            head_dim % (2 * width) == 0
            and all(s % width == 0 for s in strides + halves)
            and all(p % (width * cache_bytes) == 0 for p in pages)
            and pointers[0] % (width * arena_bytes) == 0
            and all(p % min(16, 4 * width) == 0 for p in floats)
        )
        if fits:
            break
        width //= 2
    return width
