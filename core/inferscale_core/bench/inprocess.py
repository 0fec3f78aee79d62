"""vLLM with our connector in this process, driven by token ids: for measurements of quality.

Nothing here times anything: a served core (``live.py``) is what a user waits for.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_core.bench.errors import BenchError
from inferscale_core.client.launch import check_model, default_options, probe
from inferscale_core.config import CoreConfig
from inferscale_core.connector.protocol import PARAMS_KEY, Span, capture_params, ensure_secret

BATCH = 16
CONTEXT = 8192
CPU_CACHE_GIB = 2


@dataclass(frozen=True)
class Continue:
    """A prompt to continue: greedily by up to ``max_tokens``, or with the tokens ``forced``.

    ``params`` are ``kv_transfer_params``, ``salt`` the ``cache_salt``; with ``distributions`` the
    next-token distributions are kept.
    """

    ids: list[int]
    max_tokens: int = 1
    forced: tuple[int, ...] | None = None
    params: dict[str, Any] | None = None
    salt: str | None = None
    distributions: bool = False


@dataclass(frozen=True)
class Continuation:
    """What came of a :class:`Continue`.

    ``logprobs`` are ``[num_tokens, vocab_size]``, before any forcing; ``report`` is the
    connector's. ``ids`` end with EOS if it came.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: NDArray[np.float32] | None
    report: dict[str, Any]

    def distributions(self) -> NDArray[np.float32]:
        """``logprobs``; raises ValueError when they were not asked for."""
        if self.logprobs is None:
            raise ValueError("the request was made without distributions=True")
        return self.logprobs


class InProcessEngine:
    """One ``vllm.LLM``, eager, prefix caching on, that scores given continuations.

    ``model`` is a directory or a hub id; ``options`` are further ones of ``vllm.LLM``. Raises
    ModelNotFound, or BenchError with vLLM's reason when the engine does not start.
    """

    def __init__(self, model: str, config: CoreConfig, **options: Any) -> None:
        check_model(model)
        # Read when vLLM is imported, so set before.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_CACHE_GIB))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        ensure_secret()
        try:
            self.llm = self._start(model, config, options)
            self.llm.collective_rpc("inferscale_bind")
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise BenchError(f"vLLM did not start with {model}: {error}") from error
        self.max_model_len = int(self.llm.llm_engine.model_config.max_model_len)

    def _start(self, model: str, config: CoreConfig, options: dict[str, Any]) -> Any:
        from transformers import AutoConfig
        from vllm import LLM

        # The same plugins as a served core's.
        served = default_options(config, probe(sys.executable))
        plugins = ("kv_transfer_config", "worker_extension_cls", "gpu_memory_utilization")
        text_config = AutoConfig.from_pretrained(model).get_text_config()
        ours = {
            "enforce_eager": True,
            "max_model_len": min(CONTEXT, int(text_config.max_position_embeddings)),
            "max_num_seqs": BATCH,
            "logits_processors": ["inferscale_core.bench.forced:ForcedContinuation"],
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        plugged = {name: served[name] for name in plugins if name in served}
        return LLM(model=model, **(ours | plugged | options))

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def capture(self, ns: str, requests: Sequence[tuple[list[int], list[Span]]]) -> int:
        """Store the spans of each ``(prompt_token_ids, spans)`` as segments of ``ns``.

        Returns the number of prompt tokens computed. Raises BenchError when one was not stored.
        """
        prompts, options = [], []
        for ids, spans in requests:
            params, salt = capture_params(ns, 0, spans)
            prompts.append(tokens_prompt(ids, salt))
            options.append(
                sampling(
                    max_tokens=2,
                    min_tokens=2,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": params},
                )
            )
        for output in self.llm.generate(prompts, options, use_tqdm=False):
            failed = report_of(output).get("failed")
            if failed:
                raise BenchError(f"{len(failed)} facts were not encoded: {failed}")
        return sum(len(ids) for ids, _ in requests)

    def continue_all(self, requests: Sequence[Continue]) -> list[Continuation]:
        """Decode every request greedily, or the tokens that it forces; all in one batch."""
        from inferscale_core.bench.forced import FORCE_KEY, RECORD_KEY, take

        prompts, options = [], []
        for number, request in enumerate(requests):
            extra: dict[str, Any] = {}
            if request.params:
                extra["kv_transfer_params"] = request.params
            if request.forced is not None:
                extra[FORCE_KEY] = list(request.forced)
            if request.distributions:
                extra[RECORD_KEY] = str(number)
            length = request.max_tokens if request.forced is None else len(request.forced)
            prompts.append(tokens_prompt(request.ids, request.salt))
            options.append(
                sampling(
                    max_tokens=length,
                    ignore_eos=request.forced is not None,
                    detokenize=request.forced is None,
                    extra_args=extra or None,
                )
            )
        found = []
        for number, output in enumerate(self.llm.generate(prompts, options, use_tqdm=False)):
            completion = output.outputs[0]
            found.append(
                Continuation(
                    tuple(completion.token_ids),
                    str(completion.text),
                    take(str(number)) if requests[number].distributions else None,
                    report_of(output),
                )
            )
        return found

    def forget_prefixes(self) -> None:
        """Empty vLLM's prefix cache, so that one measurement cannot feed on another's blocks."""
        self.llm.reset_prefix_cache()


def report_of(output: Any) -> dict[str, Any]:
    """The connector's report of a finished request, empty without one."""
    return dict((output.kv_transfer_params or {}).get(PARAMS_KEY) or {})


def tokens_prompt(ids: list[int], salt: str | None = None) -> Any:
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=ids)
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def sampling(**values: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, **{"detokenize": False, **values})
