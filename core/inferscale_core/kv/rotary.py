"""The engine's own rotary tables, per attention layer."""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from inferscale_kernels.reference import rotate

SUPPORTED = frozenset({
    "RotaryEmbedding",
    "Llama3RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "NTKScalingRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "MRotaryEmbedding",
})  # fmt: skip
"""vLLM rotary classes whose key at position p is a rotation by row p of ``cos_sin_cache``."""

_UNUSED_FLAGS = {"nope": True, "use_rope": False, "_use_rope": False}
"""Attributes by which vLLM's models say that a layer does not rotate although a module exists."""


class UnsupportedModelError(RuntimeError):
    """The model's KV cannot be moved between positions, or not be read at all."""


@dataclass(frozen=True)
class RotaryTable:
    """``cos_sin`` is float32 ``[max_position, rotary_dim]``, the engine's own values."""

    cos_sin: torch.Tensor
    is_neox: bool

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]


def layer_tables(model: Any, layer_names: list[str]) -> list[RotaryTable | None]:
    """Rotary table of each attention layer, None where the layer does not rotate.

    Args:
        model: the model as the worker loaded it (a ``torch.nn.Module``).
        layer_names: attention layers by vLLM's names, such as ``model.layers.0.self_attn.attn``.

    Raises:
        UnsupportedModelError: a layer uses a rotary class outside ``SUPPORTED``, or the model
            rotates keys in a way that could not be found out.

    """
    modules = dict(model.named_modules())
    rotaries = [_rotary_of(modules, name) for name in layer_names]
    if not any(r is not None for r in rotaries):
        return [_model_level_table(modules)] * len(layer_names)
    made: dict[int, RotaryTable] = {}
    tables: list[RotaryTable | None] = []
    for name, rotary in zip(layer_names, rotaries, strict=True):
        if rotary is None:
            tables.append(None)
            continue
        kind = type(rotary).__name__
        if kind not in SUPPORTED:
            raise UnsupportedModelError(
                f"layer {name} uses {kind}; keys can be moved for {', '.join(sorted(SUPPORTED))}. "
                "Serve this model without the InferScale connector."
            )
        if id(rotary) not in made:
            cos_sin = rotary.cos_sin_cache.detach().float().cpu().contiguous()
            made[id(rotary)] = RotaryTable(cos_sin, bool(rotary.is_neox_style))
        tables.append(made[id(rotary)])
    return tables


def _rotary_of(modules: dict[str, Any], layer_name: str) -> Any | None:
    parent = modules.get(layer_name.rpartition(".")[0])
    if parent is None:
        raise UnsupportedModelError(
            f"the module that holds attention layer {layer_name} was not found in the model, so "
            "its rotary embedding is unknown. Serve this model without the InferScale connector."
        )
    if any(getattr(parent, flag, None) is value for flag, value in _UNUSED_FLAGS.items()):
        return None
    return getattr(parent, "rotary_emb", None)


def _model_level_table(modules: dict[str, Any]) -> RotaryTable | None:
    """The one table of a model that rotates outside of its attention layers, or None.

    vLLM runs architectures of which it has no model of its own (Phi, GPT-NeoX) with the model of
    Transformers: that computes cos and sin once for all layers and applies them with its module's
    ``apply_rotary_pos_emb``. Which pairing that is, is found by trying it.
    """
    found = [
        m
        for m in modules.values()
        if hasattr(m, "inv_freq") or hasattr(m, "cos_sin_cache") or "Rotary" in type(m).__name__
    ]
    if not found:
        return None
    refused = UnsupportedModelError(
        f"the model rotates keys outside of its attention layers ({type(found[0]).__name__}) in "
        "a way that could not be found out. Serve this model without the InferScale connector."
    )
    appliers = {
        apply
        for m in modules.values()
        if (apply := getattr(sys.modules[type(m).__module__], "apply_rotary_pos_emb", None))
    }
    if len(found) != 1 or len(appliers) != 1 or not hasattr(found[0], "config"):
        raise refused
    rotary, (apply,) = found[0], appliers
    dtype = next(p.dtype for m in modules.values() for p in m.parameters(recurse=False))
    positions = torch.arange(int(rotary.config.max_position_embeddings))[None]
    device = rotary.inv_freq.device
    with torch.inference_mode():
        cos, sin = rotary(torch.zeros(1, device=device, dtype=dtype), positions.to(device))
        half = cos.shape[-1] // 2
        few = positions.shape[1] // 2
        keys = torch.randn(1, 1, few, 2 * half, device=device, dtype=dtype)
        turned = apply(keys, keys, cos[:, :few], sin[:, :few])[1][0].transpose(0, 1)
    # Both halves of a pair share one angle: the table's dims stand first in one pairing, every
    # other one in the other.
    for is_neox in (True, False):
        pick = slice(0, half) if is_neox else slice(0, None, 2)
        table = torch.cat((cos[0, :, pick], sin[0, :, pick]), dim=-1).float().cpu().contiguous()
        ours = rotate(keys[0].transpose(0, 1).cpu(), table[:few], is_neox)
        if torch.allclose(ours, turned.float().cpu(), rtol=0.02, atol=0.02):
            return RotaryTable(table, is_neox)
    raise refused
