"""Real vLLM engines for the tests, the engine core in a process of its own as in production."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
_TESTS = str(Path(__file__).parent)
if _TESTS not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    # The engine's processes import the tests' worker extension and connectors.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_TESTS, os.environ.get("PYTHONPATH", "")])
    )

from inferscale_core.connector.protocol import PARAMS_KEY, ensure_secret  # noqa: E402

CONNECTOR = {
    "kv_connector": "InferScaleConnector",
    "kv_connector_module_path": "inferscale_core.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass
class Answer:
    """Token ids, the logprobs of each step (token id -> logprob) and the connector's report."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    report: dict[str, Any]
    text: str

    def distance(self, other: "Answer") -> float:
        """Largest logprob difference over the steps that share a history, on ``self``'s tokens."""
        worst = 0.0
        for token, mine, theirs in zip(self.token_ids, self.logprobs, other.logprobs, strict=False):
            if token not in theirs:
                return float("inf")
            worst = max(worst, abs(mine[token] - theirs[token]))
        return worst


class Engine:
    """A vLLM engine with our connector."""

    def __init__(self, llm: Any, dtype: str):
        self.llm = llm
        self.dtype = dtype

    def ask_many(
        self, prompts: list[list[int]], messages: list[tuple[dict[str, Any], str] | None], **kw: Any
    ) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        inputs, sampling = [], []
        for ids, message in zip(prompts, messages, strict=True):
            params, salt = message if message else (None, None)
            inputs.append(
                TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
                if salt
                else TokensPrompt(prompt_token_ids=ids)
            )
            options = {"temperature": 0, "logprobs": 20, "ignore_eos": True, "max_tokens": 16} | kw
            extra = {"kv_transfer_params": params} if params else None
            sampling.append(SamplingParams(**options, extra_args=extra))
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        answers = []
        for output in outputs:
            first = output.outputs[0]
            steps = [{t: lp.logprob for t, lp in step.items()} for step in first.logprobs]
            report = (output.kv_transfer_params or {}).get(PARAMS_KEY) or {}
            answers.append(Answer(list(first.token_ids), steps, report, first.text))
        return answers

    def ask(
        self, prompt: list[int], message: tuple[dict[str, Any], str] | None = None, **kw: Any
    ) -> Answer:
        return self.ask_many([prompt], [message], **kw)[0]

    def capture(self, prompt: list[int], message: tuple[dict[str, Any], str]) -> dict[str, Any]:
        return self.ask(prompt, message, max_tokens=2, min_tokens=2).report

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the worker extension on every worker."""
        return self.llm.collective_rpc(method, args=args)


@contextmanager
def engine(
    model: Path | str, *, extra: dict[str, Any] | None = None, **kw: Any
) -> Iterator[Engine]:
    """Start an engine on ``model`` and take it down with everything it started."""
    ensure_secret()
    from vllm import LLM

    connector = dict(CONNECTOR, **kw.pop("connector", {}))
    connector["kv_connector_extra_config"] = {"arena_bytes": 64 << 20} | (extra or {})
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.3,
        "disable_hybrid_kv_cache_manager": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": "probe.ProbeExtension",
        "kv_transfer_config": connector,
    } | kw
    llm = LLM(str(model), **options)
    try:
        llm.collective_rpc("inferscale_bind")
        yield Engine(llm, options["dtype"])
    finally:
        llm.llm_engine.engine_core.shutdown()
