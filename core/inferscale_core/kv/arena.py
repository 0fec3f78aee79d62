"""The arena: segments' KV, preallocated by bytes and allocated by the token.

The scheduler side owns the slots (:class:`SlotAllocator`), the same numbering on every worker;
each worker holds its heads' KV for them (:class:`Arena`).

```
arena[layer, slot, 0 = key before rotation | 1 = value, kv head, dim]
```
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferscale_core.kv.rotary import UnsupportedModelError


@dataclass(frozen=True)
class KVGeometry:
    """Shape of one worker's KV, read from vLLM's ``KVCacheConfig``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

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
    """One worker's KV of all slots."""

    def __init__(self, geometry: KVGeometry, num_slots: int, device: torch.device):
        self.geometry = geometry
        shape = (geometry.num_layers, num_slots, 2, geometry.num_kv_heads, geometry.head_dim)
        # Not written: memory is taken only as segments arrive.
        if device.type == "cpu":
            buffer = mmap.mmap(-1, num_slots * geometry.bytes_per_token)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # A segment's tokens lie far apart from layer to layer: fewer, larger pages.
                buffer.madvise(mmap.MADV_HUGEPAGE)
            self.kv = torch.frombuffer(buffer, dtype=geometry.dtype).view(shape)
        else:
            self.kv = torch.empty(shape, dtype=geometry.dtype, device=device)

    def store(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``[num_tokens, num_kv_heads, head_dim]`` unrotated keys and values of a layer."""
        self.kv[layer, slots, 0] = keys.to(self.kv.dtype)
        self.kv[layer, slots, 1] = values.to(self.kv.dtype)

    def load(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated keys and values of a layer, each ``[num_tokens, num_kv_heads, head_dim]``."""
        both = self.kv[layer].index_select(0, slots)
        return both[:, 0], both[:, 1].contiguous()


def as_index(values: np.ndarray | Sequence[int]) -> torch.Tensor:
    """Host indices as an int64 tensor."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64))
