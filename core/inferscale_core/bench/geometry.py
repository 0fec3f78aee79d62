"""Time to first token of a model's shape with random weights: ``inferscale bench geometry``.

No checkpoint is needed: weights are vLLM's dummy ones, prompts are random token ids. What the
answers say means nothing; what they cost is what a model of that shape costs.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.inprocess import InProcessEngine, report_of, sampling, tokens_prompt
from inferscale_core.bench.statistics import paired_ratios, spread
from inferscale_core.config import CoreConfig
from inferscale_core.connector.protocol import Span, inject_params
from inferscale_core.facts.scope import Scope

LLAMA: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024,
    },
}  # fmt: skip
"""Shapes of Llama-3 models, and one for trying the command out."""

HEADER_TOKENS, FACT_TOKENS, QUESTION_TOKENS = 24, 30, 26
FACTS_PER_CAPTURE = 10
MOST_MEMORY_TOKENS = 7_500
LEAST_INJECTED = 0.9
SCOPE = Scope(tenant="inferscale-bench", user="geometry").key

Progress = Callable[[str, int, int], None]


@contextmanager
def model_directory(shape: str) -> Iterator[Path]:
    """A directory with nothing but a ``config.json`` of the shape."""
    with tempfile.TemporaryDirectory(prefix="inferscale-geometry-") as directory:
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "torch_dtype": "bfloat16", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0, "hidden_act": "silu", "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 1, **LLAMA[shape],
        }  # fmt: skip
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(config))
        yield path


class RandomPrompts:
    """A header, facts and questions of random token ids, each fact its own."""

    def __init__(self, vocab_size: int, num_facts: int) -> None:
        self._draw = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self.header = self._ids(HEADER_TOKENS)
        self.facts = [self._ids(FACT_TOKENS) for _ in range(num_facts)]

    def _ids(self, count: int) -> list[int]:
        return [int(i) for i in self._draw.integers(2, self._vocab_size, count)]

    def captures(self) -> list[tuple[list[int], list[Span]]]:
        """Requests that store all facts, several in each."""
        requests = []
        for start in range(0, len(self.facts), FACTS_PER_CAPTURE):
            ids = list(self.header)
            spans = [Span("header", "header", 0, len(ids))]
            for number, fact in enumerate(self.facts[start : start + FACTS_PER_CAPTURE], start):
                spans.append(Span(f"fact-{number}", "line", len(ids), len(ids) + len(fact)))
                ids += fact
            requests.append((ids, spans))
        return requests

    def question(self, k: int) -> list[int]:
        """A prompt with ``k`` facts in an order of its own."""
        chosen = self._draw.permutation(len(self.facts))[:k]
        memory = [token for i in chosen for token in self.facts[int(i)]]
        return self.header + memory + self._ids(QUESTION_TOKENS)


def measure(
    engine: InProcessEngine, shape: str, ks: Sequence[int], repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """One row for each k: TTFT of text, injected and without memory, alternating.

    Raises BenchError when prompts were not injected.
    """
    prompts = RandomPrompts(LLAMA[shape]["vocab_size"], max(ks))
    engine.capture(SCOPE, prompts.captures())
    rows = []
    for number, k in enumerate(ks, 1):
        samples: dict[str, list[float]] = {"text": [], "injected": [], "floor": []}
        for turn in range(repeats + 1):
            ids = prompts.question(k)
            floor, _ = _first_token(engine, prompts.question(0), inject=False)
            text, _ = _first_token(engine, ids, inject=False)
            injected, report = _first_token(engine, ids, inject=True)
            share = report.get("injected_tokens", 0) / max(1, k * FACT_TOKENS)
            if share < LEAST_INJECTED:
                raise BenchError(f"only {share:.0%} of {k} facts were injected: {report}")
            if turn:  # The first turn of a size compiles, or captures a graph.
                samples["floor"].append(floor)
                samples["text"].append(text)
                samples["injected"].append(injected)
        rows.append({
            "k": k,
            "tokens": k * FACT_TOKENS,
            **{f"{name}_ms": spread(values) for name, values in samples.items()},
            "ratio": paired_ratios(samples["text"], samples["injected"]),
            "over_floor": paired_ratios(samples["injected"], samples["floor"]),
        })  # fmt: skip
        progress("asking questions", number, len(ks))
    return rows


def _first_token(
    engine: InProcessEngine, ids: list[int], inject: bool
) -> tuple[float, dict[str, Any]]:
    """Milliseconds to the first token and the connector's report."""
    params, salt = inject_params(SCOPE, [(SCOPE, 0)]) if inject else (None, None)
    extra = {"kv_transfer_params": params} if params else None
    options = sampling(max_tokens=1, extra_args=extra)
    began = time.perf_counter()
    (output,) = engine.llm.generate([tokens_prompt(ids, salt)], [options], use_tqdm=False)
    return 1e3 * (time.perf_counter() - began), report_of(output)


def run(
    shape: str, ks: Sequence[int], repeats: int, eager: bool, config: CoreConfig, progress: Progress
) -> dict[str, Any]:
    """Start an engine of the shape and measure; ``rows`` and a ``summary`` of the largest k."""
    with model_directory(shape) as path:
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        if not eager:
            options |= {
                "enforce_eager": False,
                "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
            }
        engine = InProcessEngine(str(path), config, **options)
        rows = measure(engine, shape, ks, repeats, progress)
    last = max(rows, key=lambda row: row["k"])
    summary = {
        f"ttft_ratio_k{last['k']}": last["ratio"]["median"],
        f"injected_over_floor_k{last['k']}": last["over_floor"]["median"],
    }
    return {"rows": rows, "summary": summary}
