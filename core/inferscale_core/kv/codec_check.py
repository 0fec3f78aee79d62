"""Whether a model's keys survive a codec of the arena."""

from typing import Any

from inferscale_core.kv.rotary import UnsupportedModelError

LARGEST_BIAS = 50.0
"""Largest element of a key bias that fp8 may store. Its step is a share of the number itself: on
Qwen2.5-Coder-1.5B, whose key biases reach 354, KL to prompt text rose from 0.16 to 3.1 (5
questions). The steps of int8 are even, and it stayed at 0.16. The limit itself is chosen, not
measured."""

_KEY_BIASES = ("qkv_proj.bias", "k_proj.bias", "query_key_value.bias", "Wqkv.bias", "c_attn.bias")


def check_codec(model: Any, codec: str) -> None:
    """Refuse fp8 for a model with large key biases.

    Raises:
        UnsupportedModelError: with what to use instead.
    """
    if codec != "fp8_e4m3":
        return
    for name, bias in model.named_parameters():
        if name.endswith(_KEY_BIASES):
            largest = float(bias.detach().float().abs().max())
            if largest > LARGEST_BIAS:
                raise UnsupportedModelError(
                    f"this model adds up to {largest:.0f} to its keys ({name}), which fp8 stores "
                    "too coarsely; use kv_store_dtype int8 or auto"
                )
