"""Captured and injected KV gives the text run's numbers, in float32, for every architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import Engine, engine
from inferscale_core.connector.protocol import capture_params, inject_params
from prompts import Prompt
from tiny_models import ROTARY_KINDS, make_checkpoint

SCOPES = [("alice", 0)]


@pytest.mark.parametrize("kind", [*ROTARY_KINDS, "gpt2-no-rotary"])
def test_injected_equals_prefilled(kind: str, tmp_path: Path) -> None:
    prompt = Prompt()
    with engine(make_checkpoint(kind, tmp_path), skip_tokenizer_init=True) as e:
        text = e.ask(prompt.ids())
        report = e.capture(prompt.ids(), capture_params("alice", 0, prompt.spans()))
        assert report["failed"] == {}
        injected = e.ask(prompt.ids(), inject_params("alice", SCOPES))
        assert injected.report["injected_tokens"] == prompt.memory_tokens()
        assert text.token_ids == injected.token_ids
        assert text.distance(injected) < 1e-3

        # The comparison can fail: the answer depends on what was injected.
        assert text.distance(e.ask(prompt.header + prompt.question)) > 1e-2

        if kind == "gpt2-no-rotary":
            return  # its positions are learned and part of the keys, which are copied as they are
        order = list(reversed(range(len(prompt.lines))))
        own = _first_layer_keys(e, prompt, order, None)
        moved_keys = _first_layer_keys(e, prompt, order, inject_params("alice", SCOPES))
        assert (own - moved_keys).abs().max() < 1e-5 * own.abs().max()


def _first_layer_keys(
    e: Engine, prompt: Prompt, order: list[int], message: tuple[dict[str, Any], str] | None
) -> torch.Tensor:
    """Rotated keys of the memory's tokens, written by the engine itself or injected.

    Keys captured at p and injected at q must be the engine's own keys at q. In the first layer
    they depend on nothing but the token and its position.
    """
    e.llm.reset_prefix_cache()
    e.rpc("probe_watch")
    answer = e.ask(prompt.ids(order), message, max_tokens=1)
    if message is not None:
        assert answer.report["injected_tokens"] == prompt.memory_tokens()
    return torch.tensor(e.rpc("probe_keys", prompt.memory_tokens())[0])
