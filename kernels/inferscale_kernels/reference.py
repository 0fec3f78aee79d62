"""PyTorch reference of the kernels: the oracle of every test and the fallback for any dtype.

Rotary convention (Su et al., RoFormer, arXiv:2104.09864), as vLLM lays its tables out: row ``p``
of ``cos_sin`` is ``[cos(p * w_0..w_{r/2-1}) | sin(p * w_0..w_{r/2-1})]``. NeoX style pairs dim
``i`` with ``i + r/2``, interleaved (GPT-J) style pairs ``2i`` with ``2i + 1``. Dims from
``rotary_dim`` on pass through.
"""

from collections.abc import Sequence

import torch

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.pages import PagedLayer


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


def rotate_scatter(
    arena: torch.Tensor,
    layers: Sequence[PagedLayer],
    src: torch.Tensor,
    dst: torch.Tensor,
    positions: torch.Tensor,
    *,
    codec: str = "auto",
    scales: torch.Tensor | None = None,
    key_channels: torch.Tensor | None = None,
    key_scale: float = 1.0,
) -> None:
    """Write arena slots to the paged cache of every layer, keys rotated to their positions.

    Args:
        arena: ``[num_layers, num_slots, 2, num_kv_heads, head_dim]``, 0 = key before rotation.
        layers: the paged caches, written in place.
        src: int ``[num_tokens]`` arena slots.
        dst: int ``[num_tokens]`` paged slots (block * block_size + offset), negative to skip.
        positions: int ``[num_tokens]`` rows of the layers' tables.
        codec: how the arena stores elements, one of ``CODECS``.
        scales: bfloat16 ``[num_layers, num_slots, 2, num_kv_heads]``, with a codec but "auto".
        key_channels: float32 ``[num_layers, num_kv_heads, head_dim]`` or None.
        key_scale: multiplied onto keys after the rotation.

    """
    src, dst, positions = (t.long()[(src >= 0) & (dst >= 0)] for t in (src, dst, positions))
    for index, layer in enumerate(layers):
        both = arena[index, src]
        channels = None if key_channels is None else key_channels[index]
        keys, values = both[:, 0].float(), both[:, 1].float()
        if scales is not None:
            decode = CODECS[codec].decode
            keys = decode(both[:, 0], scales[index, src, 0])
            values = decode(both[:, 1], scales[index, src, 1])
        if channels is not None:
            keys = keys * channels
        if layer.cos_sin is not None:
            keys = rotate(keys, layer.cos_sin[positions], layer.is_neox)
        _put(layer.keys, dst, keys * key_scale, layer.k_scale)
        _put(layer.values, dst, values, layer.v_scale)


def gather_unrotate(
    arena: torch.Tensor,
    layers: Sequence[PagedLayer],
    src: torch.Tensor,
    dst: torch.Tensor,
    positions: torch.Tensor,
    *,
    codec: str = "auto",
    scales: torch.Tensor | None = None,
    key_channels: torch.Tensor | None = None,
) -> None:
    """Read paged slots ``src`` into arena slots ``dst``, keys un-rotated from their positions.

    The capture direction of :func:`rotate_scatter`: arguments as there, ``arena`` and ``scales``
    are written in place.
    """
    src, dst, positions = (t.long()[(src >= 0) & (dst >= 0)] for t in (src, dst, positions))
    for index, layer in enumerate(layers):
        keys = _get(layer.keys, src, layer.k_scale)
        values = _get(layer.values, src, layer.v_scale)
        channels = None if key_channels is None else key_channels[index]
        if layer.cos_sin is not None:
            keys = unrotate(keys, layer.cos_sin[positions], layer.is_neox)
        if channels is not None:
            keys = keys / channels
        for side, x in enumerate((keys, values)):
            if scales is None:
                arena[index, dst, side] = x.to(arena.dtype)
            else:
                data, scale = CODECS[codec].encode(x)
                # Of one byte each; index assignment knows integers on every device.
                arena[index].view(torch.uint8)[dst, side] = data.view(torch.uint8)
                scales[index, dst, side] = scale


def _put(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype != torch.float8_e4m3fn:
        cache[block, offset] = x.to(cache.dtype)
        return
    # Divided by a tensor: by a number, CUDA multiplies with its reciprocal.
    divisor = torch.full((1,), scale, dtype=torch.float32, device=x.device)
    elements = (x / divisor).clamp(-448, 448).to(cache.dtype)
    cache.view(torch.uint8)[block, offset] = elements.view(torch.uint8)


def _get(cache: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    x = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    x = x[slots // cache.shape[1], slots % cache.shape[1]].view(cache.dtype).float()
    return x * scale if cache.dtype == torch.float8_e4m3fn else x
