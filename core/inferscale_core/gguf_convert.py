"""Turns a GGUF file into a plain Transformers directory that vLLM loads.

``python -m inferscale_core.gguf_convert FILE.gguf DIRECTORY``; needs torch, transformers, gguf,
accelerate and sentencepiece. Nothing is fetched.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# The file is local; the libraries below read these when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def metadata(path: Path) -> dict[str, Any]:
    """The scalar fields of a GGUF header by name (lists, such as the vocabulary, left out)."""
    values: dict[str, Any] = {}
    for name, field in GGUFReader(path).fields.items():
        value = field.contents()
        if not isinstance(value, list | tuple):
            values[name] = value
    return values


def convert(path: Path, target: Path) -> None:
    """Write ``config.json``, bfloat16 weights, tokenizer and chat template into ``target``."""
    meta = metadata(path)
    tokenizer = _tokenizer(path, meta)
    # Newer releases of Transformers keep the packed blocks, which cannot be saved.
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=dense
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.to(torch.bfloat16)
    bos = meta.get("tokenizer.ggml.bos_token_id", tokenizer.bos_token_id)
    eos = meta.get("tokenizer.ggml.eos_token_id", tokenizer.eos_token_id)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = bos, eos
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _plain(target)


def _tokenizer(path: Path, meta: dict[str, Any]) -> Any:
    """The file's tokenizer, with what Transformers' conversion loses put back."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if not tokenizer.chat_template and meta.get("tokenizer.chat_template"):
        tokenizer.chat_template = meta["tokenizer.chat_template"]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    backend = tokenizer.backend_tokenizer
    if meta.get("tokenizer.ggml.pre") == "smollm":
        # SmolLM splits digits before anything else: "2023" is four tokens.
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    bos = tokenizer.bos_token
    if meta.get("tokenizer.ggml.add_bos_token") and bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))],
        )
    context = meta.get(f"{meta.get('general.architecture')}.context_length")
    if context:
        tokenizer.model_max_length = int(context)
    return tokenizer


def _plain(target: Path) -> None:
    """Make the directory readable by Transformers 4 and 5 alike, and by every user."""
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # The generic class takes tokenizer.json as it is; specific ones rebuild parts of it.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("is_local", "local_files_only", "backend"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in target.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
