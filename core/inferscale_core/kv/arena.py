"""The arena: segments' KV, preallocated by bytes and allocated by the token.

The scheduler side owns the slots (:class:`SlotAllocator`), the same numbering on every worker;
each worker holds its heads' KV for them (:class:`Arena`).

```
data[layer, slot, 0 = key before rotation | 1 = value, kv head, dim]
scales[layer, slot, 0 | 1, kv head]                       with a quantising codec only
```
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from inferscale_core.kv.rotary import UnsupportedModelError
from inferscale_kernels.codecs import CODECS, Codec


@dataclass(frozen=True)
class KVGeometry:
    """Shape of one worker's KV, read from vLLM's ``KVCacheConfig``, and how it is stored.

    ``dtype`` is the paged cache's; ``codec`` the arena's.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    codec: Codec = CODECS["auto"]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the arena: of all layers and heads of this worker."""
        head = self.codec.bytes_per_head(self.head_dim, self.dtype)
        return self.num_layers * 2 * self.num_kv_heads * head

    def stored_as(self, kv_store_dtype: str) -> "KVGeometry":
        """The same KV in an arena of another codec, by its name."""
        return replace(self, codec=CODECS[kv_store_dtype])

    def num_slots(self, arena_bytes: int) -> int:
        """Tokens that an arena of ``arena_bytes`` holds.

        Raises:
            ValueError: not even one token fits.

        """
        slots = arena_bytes // self.bytes_per_token
        if slots < 1:
            raise ValueError(
                f"arena_bytes={arena_bytes} holds no token of this model "
                f"({self.bytes_per_token} bytes a token); raise arena_bytes"
            )
        return slots

    @classmethod
    def from_cache_config(cls, kv_cache_config: Any) -> "KVGeometry":
        """Geometry shared by all attention layers.

        Raises:
            UnsupportedModelError: state-space or MLA layers, quantized caches, several cache
                groups or layers of different shapes: their state cannot be injected by tokens.

        """
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise UnsupportedModelError(
                f"the engine made {len(groups)} KV cache groups, expected 1: start it with "
                "--disable-hybrid-kv-cache-manager (state-space models cannot be served "
                "with the InferScale connector)"
            )
        spec = groups[0].kv_cache_spec
        specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
        shapes = set()
        for layer_spec in specs:
            kind = type(layer_spec).__name__
            if kind not in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
                raise UnsupportedModelError(
                    f"layers with {kind} keep no per-token keys and values that could be "
                    "injected; serve this model without the InferScale connector"
                )
            if layer_spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise UnsupportedModelError(
                    f"a KV cache of {layer_spec.dtype} cannot be injected yet; "
                    "start the engine with --kv-cache-dtype auto"
                )
            if getattr(layer_spec, "head_size_v", layer_spec.head_size) != layer_spec.head_size:
                raise UnsupportedModelError("keys and values of different head sizes")
            shapes.add((layer_spec.num_kv_heads, layer_spec.head_size, layer_spec.dtype))
        if len(shapes) != 1:
            raise UnsupportedModelError(
                f"layers of different KV shapes: {sorted(map(str, shapes))}"
            )
        num_kv_heads, head_dim, dtype = shapes.pop()
        num_layers = len(groups[0].layer_names)
        return cls(num_layers, num_kv_heads, head_dim, spec.block_size, dtype)


class SlotAllocator:
    """Free slots of the arena; any slots serve a segment, runs are preferred by sorting."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> np.ndarray | None:
        """``count`` slots, int32 ascending, or None when fewer are free."""
        if count > self._num_free:
            return None
        self._num_free -= count
        return np.sort(self._free[self._num_free : self._num_free + count])

    def free(self, slots: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)


class Arena:
    """One worker's KV of all slots.

    ``data`` is ``[num_layers, num_slots, 2, num_kv_heads, head_dim]``, ``scales`` bfloat16
    ``[num_layers, num_slots, 2, num_kv_heads]``, or None where the codec has none.
    """

    def __init__(self, geometry: KVGeometry, num_slots: int, device: torch.device):
        self.geometry = geometry
        self._codec = geometry.codec
        heads = (geometry.num_layers, num_slots, 2, geometry.num_kv_heads)
        dtype = self._codec.dtype or geometry.dtype
        self.data = _allocate((*heads, geometry.head_dim), dtype, device)
        self.scales = None
        if self._codec.dtype is not None:
            self.scales = _allocate(heads, torch.bfloat16, device)

    def store(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``[num_tokens, num_kv_heads, head_dim]`` unrotated keys and values of a layer."""
        for side, x in enumerate((keys, values)):
            if self.scales is None:
                self.data[layer, slots, side] = x.to(self.data.dtype)
            else:
                data, self.scales[layer, slots, side] = self._codec.encode(x)
                # PyTorch does not index float8 tensors; their bytes are as good.
                self._bytes[layer, slots, side] = data.view(torch.uint8)

    def load(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated keys and values of a layer, each ``[num_tokens, num_kv_heads, head_dim]``.

        In the paged cache's dtype; float32 where the codec quantises.
        """
        if self.scales is None:
            both = self.data[layer].index_select(0, slots)
        else:
            data = self._bytes[layer].index_select(0, slots).view(self.data.dtype)
            both = self._codec.decode(data, self.scales[layer].index_select(0, slots))
        return both[:, 0], both[:, 1].contiguous()

    @property
    def _bytes(self) -> torch.Tensor:
        return self.data.view(torch.uint8)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory, taken from the system only as segments arrive."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    buffer = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A segment's tokens lie far apart from layer to layer: fewer, larger pages.
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def as_index(values: np.ndarray | Sequence[int]) -> torch.Tensor:
    """Host indices as an int64 tensor."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64))
