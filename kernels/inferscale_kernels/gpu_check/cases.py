"""Cases of the kernels' correctness sweep: configurations, and tensors made for them.

The same cases run on the host in the tests and on the device in ``gpu_check``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from inferscale_kernels import reference
from inferscale_kernels.codecs import CODECS
from inferscale_kernels.pages import PagedLayer

ORDERS = ("NHD", "HND", "NHD planes", "HND planes", "NHD K||V", "HND K||V")
"""Physical orders of a paged cache: blocks first with K before V, K and V in separate planes, or
a value behind each key."""

ROTATIONS = ("neox", "interleaved", "partial", "partial interleaved", "none")
_MAX_POSITION = 700


@dataclass(frozen=True)
class Case:
    """One configuration. ``rotations`` gives the layers; ``padding`` elements follow each block.

    ``shift`` moves the cache by elements off its alignment.
    """

    head_dim: int = 64
    num_heads: int = 2
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    codec: str = "auto"
    order: str = "NHD"
    block_size: int = 16
    padding: int = 0
    shift: int = 0
    rotations: tuple[str, ...] = ("neox", "neox", "none")
    segments: tuple[int, ...] = (5, 1, 17)
    skipped: int = 2
    channels: bool = False
    key_scale: float = 1.0
    cache_scales: tuple[float, float] = (1.0, 1.0)
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        changed = [
            f"{name}={str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if value != getattr(default, name)
        ]
        return " ".join(changed) or "default"


def sweep() -> Iterator[Case]:
    """Every dtype, head size, rotary variant, cache order, block size and codec at least once.

    Few programs are compiled for many cases: layouts vary on one head size, head sizes on one
    layout.
    """
    base = Case()
    for order in ORDERS:
        for block_size in (1, 7, 16, 128):
            yield replace(base, order=order, block_size=block_size)
        yield replace(base, order=order, padding=64, rotations=("none", "interleaved", "partial"))
    for rotation in ROTATIONS:
        yield replace(base, rotations=(rotation,) * 9, num_heads=1, segments=(40,))
    yield replace(base, rotations=("neox", "partial", "interleaved", "neox", "none", "neox"))
    for head_dim in (32, 80, 96, 128, 256):
        for num_heads in (1, 3, 8):
            yield replace(base, head_dim=head_dim, num_heads=num_heads, rotations=ROTATIONS)
    yield replace(base, num_heads=40, order="HND")
    yield replace(base, shift=1)
    yield replace(base, shift=1, padding=1, head_dim=128, rotations=ROTATIONS)
    yield replace(base, shift=2, codec="int8", head_dim=256, rotations=ROTATIONS)
    yield replace(base, shift=1, padding=3, codec="fp8_e4m3", head_dim=80, rotations=ROTATIONS)
    for dtype in (torch.float16, torch.float32):
        for rotation in ROTATIONS:
            yield replace(base, dtype=dtype, rotations=(rotation, "neox"), key_scale=0.75)
    fp8 = torch.float8_e4m3fn
    for codec in CODECS:
        for cache_dtype in (None, fp8):
            for order in ("NHD", "HND K||V"):
                coded = replace(base, codec=codec, cache_dtype=cache_dtype, order=order)
                coded = replace(coded, rotations=ROTATIONS, cache_scales=(0.037, 1.7))
                yield coded
                yield replace(coded, channels=True, key_scale=1.2, num_heads=5, block_size=32)
                yield replace(coded, head_dim=80, channels=True)
                yield replace(coded, head_dim=128, num_heads=8, segments=(33, 2))


@dataclass
class Problem:
    """Tensors of a case. ``storages`` are the layers' whole memory, gaps between blocks included.

    ``src`` int32, ``dst`` and ``positions`` int64 are ``[num_tokens]`` on the host.
    """

    arena: torch.Tensor
    layers: list[PagedLayer]
    storages: list[torch.Tensor]
    src: np.ndarray
    dst: np.ndarray
    positions: np.ndarray
    codec: str
    scales: torch.Tensor | None
    channels: torch.Tensor | None
    key_scale: float
    arguments: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = dict(codec=self.codec, scales=self.scales, key_channels=self.channels)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that a kernel may write."""
        return [self.arena, *([] if self.scales is None else [self.scales]), *self.storages]

    def expected(self, writes: bool) -> None:
        """Let the reference do it: arena to cache (``writes``), or cache to arena."""
        src, dst, positions = (
            torch.from_numpy(a).to(self.arena.device) for a in (self.src, self.dst, self.positions)
        )
        if writes:
            reference.rotate_scatter(
                self.arena, self.layers, src, dst, positions,
                key_scale=self.key_scale, **self.arguments,
            )  # fmt: skip
        else:
            reference.gather_unrotate(
                self.arena, self.layers, dst, src, positions, **self.arguments
            )


def make(case: Case, device: torch.device | str = "cpu") -> Problem:
    """Tensors of ``case``; the same numbers on every device and every time."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rng = np.random.default_rng(case.seed)
    num_tokens = sum(case.segments)
    num_slots = num_tokens + 9
    num_layers = len(case.rotations)
    # Keys have channels far larger than the rest.
    arena = normal(num_layers, num_slots, 2, case.num_heads, case.head_dim)
    arena[..., 0, :, :3] *= 20
    channels = 0.5 + normal(num_layers, case.num_heads, case.head_dim).abs()
    codec, scales = CODECS[case.codec], None
    if codec.dtype is None:
        arena = arena.to(case.dtype)
    else:
        arena, scales = codec.encode(arena)

    num_blocks = -(-(num_tokens + 3) // case.block_size) + 2
    # One tensor a rotation: layers that share a table share its angles.
    tables = {name: table.to(device) for name, table in _tables(case, normal).items()}
    layers, storages = [], []
    for rotation in case.rotations:
        storage, k, v = paged_cache(case, num_blocks, device)
        storage.copy_(normal(len(storage)).to(storage.dtype))
        storages.append(storage)
        layers.append(
            PagedLayer(
                k, v, tables.get(rotation), "interleaved" not in rotation, *case.cache_scales
            )
        )

    src = rng.permutation(num_slots)[:num_tokens].astype(np.int32)
    # A prompt's slots: blocks in any order, tokens in order within them.
    blocks = rng.permutation(num_blocks)
    logical = np.arange(num_tokens) + min(3, case.block_size)
    dst = blocks[logical // case.block_size] * case.block_size + logical % case.block_size
    positions = np.concatenate(
        [(rng.integers(0, _MAX_POSITION) + np.arange(n)) % _MAX_POSITION for n in case.segments]
    )
    dst[rng.permutation(num_tokens)[: case.skipped]] = -1
    return Problem(
        arena.to(device), layers, storages, src, dst.astype(np.int64), positions.astype(np.int64),
        case.codec, None if scales is None else scales.to(device),
        channels.to(device) if case.channels else None, case.key_scale,
    )  # fmt: skip


def _tables(case: Case, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """A table for each rotation: one in bfloat16 with a magnitude scale, as YaRN's."""
    tables = {}
    for rotation in dict.fromkeys(case.rotations):
        if rotation == "none":
            continue
        rotary_dim = case.head_dim if "partial" not in rotation else max(4, case.head_dim // 4)
        angles = normal(_MAX_POSITION, rotary_dim // 2) * 9
        table = torch.cat((angles.cos(), angles.sin()), -1)
        tables[rotation] = (1.27 * table).bfloat16() if "interleaved" in rotation else table
    return tables


def paged_cache(
    case: Case, num_blocks: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Storage and its key and value views ``[num_blocks, block_size, num_heads, head_dim]``."""
    bs, heads, dim = case.block_size, case.num_heads, case.head_dim
    dtype = case.cache_dtype or case.dtype
    joined, planes = "K||V" in case.order, "planes" in case.order
    pair = 2 if joined else 1
    # Of a key within its block, in elements.
    slot, head = (heads * pair * dim, pair * dim) if "NHD" in case.order else (
        pair * dim, bs * pair * dim
    )  # fmt: skip
    block = bs * heads * dim * (1 if planes else 2) + case.padding
    to_value = dim if joined else bs * heads * dim
    size = num_blocks * block * (2 if planes else 1)
    storage = torch.zeros(case.shift + size, dtype=dtype, device=device)
    shape, strides = (num_blocks, bs, heads, dim), (block, slot, head, 1)
    if planes:
        to_value = num_blocks * block
    k = storage.as_strided(shape, strides, case.shift)
    return storage, k, storage.as_strided(shape, strides, case.shift + to_value)


def difference(got: torch.Tensor, expected: torch.Tensor) -> tuple[int, int]:
    """How many elements differ, and by how many representable numbers at most."""
    a, b = (_ordered(t.cpu()) for t in (got, expected))
    apart = (a - b).abs()
    return int((apart != 0).sum()), int(apart.max()) if apart.numel() else 0


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 codes that are in the order of the numbers, one apart for neighbours."""
    if not x.dtype.is_floating_point:
        return x.long()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    code = x.contiguous().view(bits).long()
    lowest = -(2 ** (8 * x.itemsize - 1))
    return torch.where(code < 0, lowest - code, code)
