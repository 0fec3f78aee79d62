"""Tokenizers for the encoding tests: the small model's own, and tiny ones of other families."""

import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inferscale_core.config import CoreConfig


@pytest.fixture(scope="session")
def model_path() -> Path:
    named = os.environ.get("INFERSCALE_TEST_MODEL")
    if named:
        return Path(named)
    from inferscale_core.models import resolve

    return Path(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture
def config() -> CoreConfig:
    return CoreConfig()


def fast(backend: Tokenizer, chat_template: str | None = None, **special: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def unigram() -> Any:
    """A vocabulary in which the control tokens are ordinary pieces, and a leading-space scheme."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), ("\u2581tea", -3.0)]
    pieces += [(chr(c), -5.0) for c in range(33, 127)] + [("\n", -5.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def byte_level() -> Any:
    """A byte-level BPE that takes whole words from its vocabulary (Llama-3's ``ignore_merges``)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    for word in ("<|eot|>", "\u0120tea"):
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return fast(backend, bos_token="<|bos|>", eos_token="<|eot|>", additional_special_tokens=None)
