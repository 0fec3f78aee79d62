"""How the arena stores KV: as it is, or a byte an element with a scale per token and head.

Quantising along the head dimension with a scale for each token and head keeps every token
independent of the others, so that segments of any length can be stored and moved. Keys can be
divided by a factor per channel first: before rotation a few channels of a key are far larger than
the others in every token (KIVI, arXiv:2402.02750).

The PyTorch code here is the oracle of the kernels that do the same on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Codec:
    """A way to store elements. ``largest`` is what the largest of a token's head is scaled to.

    ``name`` is the value of ``kv_store_dtype``; ``dtype`` is None where elements stay as they
    are, and then there are no scales.
    """

    name: str
    dtype: torch.dtype | None = None
    largest: float = 0.0

    def encode(
        self, x: torch.Tensor, channels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise, to nearest even.

        Args:
            x: ``[..., num_kv_heads, head_dim]``, any float dtype, finite.
            channels: float32 ``[num_kv_heads, head_dim]`` factors to divide by, or None.

        Returns:
            Elements ``[..., num_kv_heads, head_dim]`` of ``dtype`` and bfloat16 scales
            ``[..., num_kv_heads]``; a head of zeros has scale 1.

        """
        assert self.dtype is not None
        x = x.float() if channels is None else x.float() / channels
        largest = x.abs().amax(-1)
        # Divided by a tensor: by a number, CUDA multiplies with its reciprocal.
        scales = (largest / torch.full_like(largest, self.largest)).to(torch.bfloat16)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        # The scale was rounded: the largest element may come out just above the range.
        y = (x / scales.float()[..., None]).clamp(-self.largest, self.largest)
        return (y.round() if self.dtype == torch.int8 else y).to(self.dtype), scales

    def decode(
        self, data: torch.Tensor, scales: torch.Tensor, channels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Inverse of :meth:`encode` but for rounding; float32."""
        x = data.float() * scales.float()[..., None]
        return x if channels is None else x * channels

    def bytes_per_head(self, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one token's key or value in one head of a cache of ``dtype``."""
        if self.dtype is None:
            return head_dim * dtype.itemsize
        return head_dim * self.dtype.itemsize + torch.bfloat16.itemsize


CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("auto"),
        Codec("fp8_e4m3", torch.float8_e4m3fn, 448.0),
        Codec("int8", torch.int8, 127.0),
    )
}
"""By the names that ``kv_store_dtype`` takes."""
