"""A logits processor that forces a request's tokens and keeps the distributions they stand in.

``prompt_logprobs`` turns external tokens off, so a given continuation of an injected prompt is
scored by decoding it. Works in the engine's own process only (``inprocess.py``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

FORCE_KEY, RECORD_KEY = "inferscale_bench_force", "inferscale_bench_record"

recorded: dict[str, dict[int, torch.Tensor]] = {}
"""Log probabilities ``[vocab_size]`` float32 by the request's record key and token's place.

By place: a chunk of a prompt is sampled from too, and its token thrown away.
"""


class ForcedContinuation(AdapterLogitsProcessor):
    """Obeys ``extra_args``: ``FORCE_KEY`` token ids to decode, ``RECORD_KEY`` where to keep."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra = params.extra_args or {}
        forced, record = extra.get(FORCE_KEY), extra.get(RECORD_KEY)
        if forced is None and record is None:
            return None

        def process(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            if record is not None:
                logprobs = torch.log_softmax(logits.float(), -1)
                recorded.setdefault(record, {})[len(output_ids)] = logprobs
            if forced is not None and len(output_ids) < len(forced):
                token = forced[len(output_ids)]
                logits.fill_(-torch.inf)
                logits[token] = 0.0
            return logits

        return process


def take(key: str) -> Any:
    """The distributions recorded under ``key``, ``[num_tokens, vocab_size]``, and forget them."""
    found = recorded.pop(key)
    return torch.stack([found[place] for place in range(len(found))]).cpu().numpy()
