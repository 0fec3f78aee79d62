import pytest
import torch

from inferscale_core.kv.codec_check import LARGEST_BIAS, check_codec
from inferscale_core.kv.rotary import UnsupportedModelError


def _model(name: str, largest: float) -> torch.nn.Module:
    model = torch.nn.Module()
    attention = torch.nn.Module()
    attention.add_module(name, torch.nn.Linear(8, 8))
    getattr(attention, name).bias.data = torch.linspace(-largest, largest / 2, 8)
    model.add_module("self_attn", attention)
    return model


@pytest.mark.parametrize("name", ["qkv_proj", "k_proj", "query_key_value"])
def test_fp8_is_refused_where_keys_have_large_biases(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"adds up to 354 .*int8 or auto"):
        check_codec(_model(name, 354.0), "fp8_e4m3")
    check_codec(_model(name, LARGEST_BIAS / 2), "fp8_e4m3")


def test_what_is_not_refused() -> None:
    for codec in ("auto", "int8"):
        check_codec(_model("k_proj", 354.0), codec)
    check_codec(_model("up_proj", 354.0), "fp8_e4m3")
