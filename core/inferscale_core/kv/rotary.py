"""The engine's own rotary tables, per attention layer."""

from dataclasses import dataclass
from typing import Any

import torch

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
        UnsupportedModelError: a layer uses a rotary class outside ``SUPPORTED``.

    """
    modules = dict(model.named_modules())
    made: dict[int, RotaryTable] = {}
    tables: list[RotaryTable | None] = []
    for name in layer_names:
        rotary = _rotary_of(modules, name)
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
