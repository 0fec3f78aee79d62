"""The CUDA program of one configuration: its macros and its text.

The sources include each other and nothing else. They are handed to NVRTC as one text: CuPy's disk
cache is keyed by the text, and would not notice a changed header behind an include path.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.pages import CACHE_DTYPES, UnsupportedKernelError

SOURCE_DIR = Path(__file__).parent / "cuda_source"
KERNELS = ("rotate_scatter", "gather_unrotate")

OPTIONS = ("--std=c++17", "--fmad=false")
"""Contracting a multiplication and an addition would save nothing here, the kernels wait for
memory, and give other results than the reference. Where one rounding is wanted, fmaf says so."""

_ELEMENTS = {
    torch.float32: "Float32",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float8_e4m3fn: "Float8E4M3",
    torch.int8: "Int8",
}

MAX_THREADS = 128
"""Threads of a block; the sources' launch bounds."""


@dataclass(frozen=True)
class Program:
    """What the kernels are compiled for.

    Args:
        codec: how the arena stores elements, one of ``CODECS``.
        arena_dtype: of the arena's elements.
        cache_dtype: of the paged cache's elements.
        head_dim: elements of a head.
        vector: elements of one access (see ``pages.widest_vector``).

    Raises:
        UnsupportedKernelError: a dtype, codec or head size that the kernels do not serve.

    """

    codec: str
    arena_dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    vector: int

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UnsupportedKernelError(
                f"codec {self.codec!r}; expected one of {', '.join(CODECS)}"
            )
        expected = CODECS[self.codec].dtype
        allowed = (expected,) if expected else CACHE_DTYPES[:3]
        if self.arena_dtype not in allowed:
            raise UnsupportedKernelError(
                f"an arena of {self.arena_dtype} with codec {self.codec!r}; expected "
                f"{' or '.join(map(str, allowed))}"
            )
        if self.cache_dtype not in CACHE_DTYPES:
            raise UnsupportedKernelError(
                f"a paged cache of {self.cache_dtype}; expected one of "
                f"{', '.join(map(str, CACHE_DTYPES))}"
            )
        if self.head_dim % 2 or not 2 <= self.head_dim <= MAX_THREADS * 2 * self.vector:
            raise UnsupportedKernelError(
                f"heads of {self.head_dim} elements, {self.vector} an access; expected an even "
                f"number up to {MAX_THREADS * 2 * self.vector}"
            )

    @property
    def scatter_lanes(self) -> int:
        """Threads of a head in ``rotate_scatter``."""
        return self.head_dim // (2 * self.vector)

    @property
    def gather_lanes(self) -> int:
        """Threads of a head in ``gather_unrotate``: a power of two within a warp."""
        return min(32, 1 << (self.scatter_lanes - 1).bit_length())

    def macros(self) -> dict[str, str]:
        return {
            "ARENA": _ELEMENTS[self.arena_dtype],
            "CACHE": _ELEMENTS[self.cache_dtype],
            "SCALED": str(int(self.codec != "auto")),
            "HEAD_DIM": str(self.head_dim),
            "VEC": str(self.vector),
        }

    def text(self) -> str:
        """Both kernels as one source text, macros first."""
        macros = "".join(f"#define {name} {value}\n" for name, value in self.macros().items())
        return macros + _sources()


@lru_cache(maxsize=1)
def _sources() -> str:
    included: set[str] = set()

    def inline(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = (SOURCE_DIR / name).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "([\w.]+)"\n', lambda match: inline(match[1]), text)

    return "\n".join(inline(f"{kernel}.cu") for kernel in KERNELS)
