"""What is measured: a model's geometry, its arena and caches, and the slots of a step's tokens."""

from dataclasses import dataclass

import numpy as np
import torch

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.gpu_check.cases import Case, paged_cache
from inferscale_kernels.pages import PagedLayer

FACT_TOKENS = 30
BLOCK_SIZE = 16
_THETA = 500_000.0


@dataclass(frozen=True)
class Geometry:
    """A model as one GPU holds it, in bfloat16."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int

    def bytes_moved(self, codec: str) -> int:
        """Read and written for a token, in either direction: its KV in arena and paged cache.

        Angles and indices are not counted.
        """
        arena = CODECS[codec].bytes_per_head(self.head_dim, torch.bfloat16)
        cache = self.head_dim * torch.bfloat16.itemsize
        return 2 * self.num_layers * self.num_heads * (arena + cache)


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("1B", 16, 8, 64),
        Geometry("8B", 32, 8, 128),
        Geometry("70B TP8", 80, 1, 128),
    )
}
TOKENS = (500, 1500, 8000)


@dataclass(frozen=True)
class Step:
    """Indices of a step's tokens on the device: int32, int64, int64, ``[num_tokens]`` each."""

    src: torch.Tensor
    dst: torch.Tensor
    positions: torch.Tensor

    def on_host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.src.cpu().numpy(), self.dst.cpu().numpy(), self.positions.cpu().numpy()


class Workload:
    """An arena, paged caches, and steps no two of which share a slot.

    A step's segments lie anywhere in the arena, its blocks anywhere in the cache: what a step
    reads and writes was not touched by the steps before, so that no cache holds it.

    Args:
        geometry: of the model.
        num_tokens: of a step.
        num_steps: that fit in the arena and in the caches at once.
        codec: how the arena stores elements.
        order: of the paged cache, one of ``cases.ORDERS``.
        device: of everything.

    """

    def __init__(
        self,
        geometry: Geometry,
        num_tokens: int,
        num_steps: int,
        codec: str,
        order: str,
        device: torch.device,
    ):
        self.geometry, self.num_tokens, self.codec, self.order = geometry, num_tokens, codec, order
        self.scales: torch.Tensor | None = None
        rng = np.random.default_rng(0)
        facts, blocks = -(-num_tokens // FACT_TOKENS), -(-num_tokens // BLOCK_SIZE)
        num_slots = num_steps * facts * FACT_TOKENS
        shape = (geometry.num_layers, num_slots, 2, geometry.num_heads, geometry.head_dim)
        dtype = CODECS[codec].dtype
        if dtype is None:
            self.arena = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        else:
            # Codes of either type that are numbers, none of them NaN.
            codes = torch.randint(0, 120, shape, dtype=torch.uint8, device=device)
            self.arena = codes.view(dtype)
            self.scales = torch.full(shape[:4], 0.01, dtype=torch.bfloat16, device=device)
        case = Case(
            head_dim=geometry.head_dim, num_heads=geometry.num_heads, order=order,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        table = _table(num_tokens, geometry.head_dim).to(device)
        self.storages, self.layers = [], []
        for _ in range(geometry.num_layers):
            storage, keys, values = paged_cache(case, num_steps * blocks, device)
            self.storages.append(storage)
            self.layers.append(PagedLayer(keys, values, table))
        self.steps = []
        arena_facts = rng.permutation(num_steps * facts).reshape(num_steps, facts)
        cache_blocks = rng.permutation(num_steps * blocks).reshape(num_steps, blocks)
        for fact, block in zip(arena_facts, cache_blocks, strict=True):
            src = (fact[:, None] * FACT_TOKENS + np.arange(FACT_TOKENS)).ravel()[:num_tokens]
            dst = (block[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:num_tokens]
            arrays = (src.astype(np.int32), dst.astype(np.int64), np.arange(num_tokens))
            self.steps.append(Step(*(torch.from_numpy(a).to(device) for a in arrays)))

    @property
    def bytes_moved(self) -> int:
        """Read and written by a step, in either direction."""
        return self.num_tokens * self.geometry.bytes_moved(self.codec)


def _table(num_positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = _THETA ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(num_positions).double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).float()
