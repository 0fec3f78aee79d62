"""Tiny random-weight checkpoints of the architectures that the connector must serve."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 512
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
    # Wide weights, so that the next token really depends on what the cache holds.
    initializer_range=0.15,
    tie_word_embeddings=False,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
_YARN_ROPE = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=512
)


def _config(kind: str) -> Any:
    gqa = dict(_COMMON, num_key_value_heads=1, head_dim=32)
    if kind == "llama":
        return transformers.LlamaConfig(**gqa)
    if kind == "llama3-scaled":
        return transformers.LlamaConfig(**gqa, rope_parameters=_LLAMA3_ROPE)
    if kind == "yarn":
        return transformers.LlamaConfig(**gqa, rope_parameters=_YARN_ROPE)
    if kind == "qwen2":
        return transformers.Qwen2Config(**dict(gqa, num_key_value_heads=2))
    if kind == "qwen3":
        return transformers.Qwen3Config(**gqa)
    if kind == "gemma3":
        return transformers.Gemma3TextConfig(
            **dict(gqa, pad_token_id=0), sliding_window=64,
            layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=32,
        )  # fmt: skip
    if kind == "phi":
        return transformers.PhiConfig(**_COMMON, partial_rotary_factor=0.5)
    if kind == "gpt-neox":
        return transformers.GPTNeoXConfig(**_COMMON, rotary_pct=0.25)
    if kind == "gptj-interleaved":
        return transformers.GPTJConfig(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=2048, rotary_dim=16,
            bos_token_id=1, eos_token_id=2, initializer_range=0.15, tie_word_embeddings=False,
        )  # fmt: skip
    if kind == "gpt2-no-rotary":
        return transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=2048,
            bos_token_id=1, eos_token_id=2, initializer_range=0.15,
        )  # fmt: skip
    if kind == "mamba":
        return transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=16
        )
    raise ValueError(f"unknown tiny model {kind!r}")


ROTARY_KINDS = (
    "llama", "llama3-scaled", "yarn", "qwen2", "qwen3", "gemma3", "phi", "gpt-neox",
    "gptj-interleaved",
)  # fmt: skip


def make_checkpoint(kind: str, directory: Path) -> Path:
    """Write a float32 checkpoint of ``kind`` (no tokenizer) and return its directory."""
    torch.manual_seed(0)
    config = _config(kind)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms start trivial; make them matter (Qwen2's QKV bias, QK-norm).
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" in name or "wte" in name:
                parameter.mul_(4)
    path = directory / kind
    model.save_pretrained(path)
    return path
