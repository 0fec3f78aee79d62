"""vLLM with our connector in this process, driven by token ids: for measurements of quality.

Nothing here times anything: a served core (``live.py``) is what a user waits for.
"""

import os
import sys
from collections.abc import Sequence
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


class InProcessEngine:
    """One ``vllm.LLM``, eager, prefix caching on, whole-vocabulary log probabilities.

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
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise BenchError(f"vLLM did not start with {model}: {error}") from error
        self.llm.collective_rpc("inferscale_bind")
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
            "max_logprobs": -1,
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

    def answer(self, ids: list[int], max_tokens: int) -> tuple[list[int], str]:
        """The greedy answer without injection: its ids, with EOS if it came, and its text."""
        (output,) = self.llm.generate(
            [tokens_prompt(ids)], [sampling(max_tokens=max_tokens, detokenize=True)], use_tqdm=False
        )
        return list(output.outputs[0].token_ids), str(output.outputs[0].text)

    def distributions(
        self,
        ids: list[int],
        answer: Sequence[int],
        params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> tuple[NDArray[np.float32], list[dict[str, Any]]]:
        """Next-token distributions at each position of a given ``answer`` to a prompt.

        One request a position, with the answer so far behind the prompt: exact, and the same
        whether the prompt is injected or not. Returns log probabilities
        ``[len(answer), vocab_size]`` and the connector's report of each request.
        """
        extra = {"kv_transfer_params": params} if params else None
        prompts = [tokens_prompt(ids + list(answer[:i]), salt) for i in range(len(answer))]
        # The first alone: it injects the prompt, the others then share its blocks.
        options = sampling(max_tokens=1, logprobs=-1, flat_logprobs=True, extra_args=extra)
        outputs = self.llm.generate(prompts[:1], [options], use_tqdm=False)
        if prompts[1:]:
            outputs += self.llm.generate(
                prompts[1:], [options] * (len(prompts) - 1), use_tqdm=False
            )
        rows = [_whole_vocabulary(output.outputs[0].logprobs) for output in outputs]
        return np.stack(rows), [report_of(output) for output in outputs]

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

    # Without detokenisation: the text of a whole vocabulary takes longer than the forward pass.
    return SamplingParams(temperature=0, **{"detokenize": False, **values})


def _whole_vocabulary(flat: Any) -> NDArray[np.float32]:
    """``[vocab_size]`` from one position of vLLM's FlatLogprobs."""
    ids = np.asarray(flat.token_ids)
    logprobs = np.full(ids.max() + 1, -np.inf, dtype=np.float32)
    logprobs[ids] = np.asarray(flat.logprobs, dtype=np.float32)
    return logprobs
