"""Chunked prefill, mixed batches, forced preemption, a full arena, tensor parallelism."""

import subprocess
import sys
from pathlib import Path

import pytest

from engines import engine
from inferscale_core.connector.protocol import capture_params, inject_params, stats_params
from prompts import Prompt
from tiny_models import make_checkpoint


def _preemptions(llm) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def test_mixed_batch_under_preemption(tiny_llama: Path) -> None:
    """A cache of a few blocks, chunks of 64 tokens, injected and plain requests together."""
    prompt = Prompt(20)
    others = [Prompt(seed) for seed in (21, 22, 23)]
    with engine(
        tiny_llama, skip_tokenizer_init=True, block_size=32, num_gpu_blocks_override=24,
        max_num_batched_tokens=64, disable_log_stats=False, max_model_len=512,
    ) as e:  # fmt: skip
        long = dict(max_tokens=120)
        alone = [e.ask(p.ids(), **long) for p in (prompt, *others)]
        report = e.capture(prompt.ids(), capture_params("a", 0, prompt.spans()))
        assert report["failed"] == {}
        e.llm.reset_prefix_cache()
        message = inject_params("a", [("a", 0)])
        before = _preemptions(e.llm)
        mixed = e.ask_many(
            [prompt.ids(), others[0].ids(), prompt.ids(), others[1].ids(), others[2].ids()],
            [message, None, message, None, None],
            **long,
        )
        assert _preemptions(e.llm) > before
        expected = [alone[0], alone[1], alone[0], alone[2], alone[3]]
        for answer, want in zip(mixed, expected, strict=True):
            assert answer.token_ids[:16] == want.token_ids[:16]
            assert want.distance(answer) < 1e-3
        assert mixed[0].report["injected_tokens"] > 0
        stats = e.ask([5], stats_params(), max_tokens=1).report
        assert stats["faults"] == {}


def test_full_arena_evicts_and_says_so(tiny_llama: Path) -> None:
    prompt, second = Prompt(30), Prompt(31)
    # 2 layers * 2 * 1 head * 32 dims * 4 bytes = 512 bytes a token.
    tokens = prompt.memory_tokens() + 20
    with engine(tiny_llama, skip_tokenizer_init=True, extra={"arena_bytes": 512 * tokens}) as e:
        assert not e.capture(prompt.ids(), capture_params("a", 0, prompt.spans()))["failed"]
        report = e.capture(second.ids(), capture_params("b", 0, second.spans()))
        assert ["a", "line0"] in report["evicted"]
        text = e.ask(prompt.ids())
        answer = e.ask(prompt.ids(), inject_params("a", [("a", 0)]))
        assert answer.report["injected_tokens"] < prompt.memory_tokens()
        assert answer.token_ids == text.token_ids

    with engine(tiny_llama, skip_tokenizer_init=True, extra={"arena_bytes": 512 * 8}) as e:
        report = e.capture(prompt.ids(), capture_params("a", 0, prompt.spans()))
        assert any("arena full" in reason for reason in report["failed"].values())
        text = e.ask(prompt.ids())
        answer = e.ask(prompt.ids(), inject_params("a", [("a", 0)]))
        assert answer.token_ids == text.token_ids
        assert answer.report["injected_tokens"] == 0


def test_tensor_parallel_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker holds its heads; the scheduler side owns the slots of both."""
    # One NUMA node: without a binding by hand vLLM refuses two workers.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    prompt = Prompt(40)
    with engine(
        make_checkpoint("qwen2", tmp_path), skip_tokenizer_init=True, tensor_parallel_size=2
    ) as e:
        text = e.ask(prompt.ids())
        report = e.capture(prompt.ids(), capture_params("a", 0, prompt.spans()))
        assert report["failed"] == {}
        answer = e.ask(prompt.ids(), inject_params("a", [("a", 0)]))
        assert answer.report["injected_tokens"] == prompt.memory_tokens()
        assert answer.token_ids == text.token_ids
        assert text.distance(answer) < 1e-3


@pytest.mark.parametrize("kind", ["mamba"])
def test_unsupported_models_fail_at_start(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    code = (
        "from engines import engine\n"
        "if __name__ == '__main__':\n"
        f"    with engine({str(path)!r}, skip_tokenizer_init=True): pass\n"
    )
    script = tmp_path / "start.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "UnsupportedModelError" in output
    assert "without the InferScale connector" in output
