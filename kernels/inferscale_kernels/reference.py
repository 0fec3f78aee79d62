"""PyTorch reference of the kernels: the oracle of every test and the fallback for any dtype.

Rotary convention (Su et al., RoFormer, arXiv:2104.09864), as vLLM lays its tables out: row ``p``
of ``cos_sin`` is ``[cos(p * w_0..w_{r/2-1}) | sin(p * w_0..w_{r/2-1})]``. NeoX style pairs dim
``i`` with ``i + r/2``, interleaved (GPT-J) style pairs ``2i`` with ``2i + 1``. Dims from
``rotary_dim`` on pass through.
"""

import torch


def _pairs(x: torch.Tensor, is_neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if is_neox:
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


def _join(first: torch.Tensor, second: torch.Tensor, is_neox: bool) -> torch.Tensor:
    if is_neox:
        return torch.cat((first, second), dim=-1)
    return torch.stack((first, second), dim=-1).flatten(-2)


def rotate(keys: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate keys to their positions, in float32.

    Args:
        keys: ``[num_tokens, num_kv_heads, head_dim]``, any float dtype.
        cos_sin: ``[num_tokens, rotary_dim]``, the table's rows at the tokens' positions.
        is_neox: pairing of the rotary dims.

    Returns:
        ``[num_tokens, num_kv_heads, head_dim]`` float32.

    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    x = keys.float()
    first, second = _pairs(x[..., :rotary_dim], is_neox)
    rotated = _join(first * cos - second * sin, second * cos + first * sin, is_neox)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def unrotate(keys: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Inverse of :func:`rotate` under the table's own arithmetic, in float32.

    A low-precision table has cos^2 + sin^2 != 1, and YaRN's carries its magnitude scale: the
    inverse divides by it. Shapes as in :func:`rotate`.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    norm = cos * cos + sin * sin
    x = keys.float()
    first, second = _pairs(x[..., :rotary_dim], is_neox)
    plain = _join((first * cos + second * sin) / norm, (second * cos - first * sin) / norm, is_neox)
    return torch.cat((plain, x[..., rotary_dim:]), dim=-1)
