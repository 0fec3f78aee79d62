import json
import math
from pathlib import Path
from typing import Any

import pytest

from inferscale_core.bench import record, ttft
from inferscale_core.bench.dataset import load
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.plot import plot_ttft
from inferscale_core.bench.statistics import spread


def sample(repeat: int, k: int, mode: str, ms: float, **more: Any) -> dict[str, Any]:
    values = {
        "repeat": repeat,
        "k": k,
        "mode": mode,
        "ttft_ms": ms,
        "memory_tokens": 30 * k,
        "injected_tokens": 30 * k if mode == "inject" else 0,
        "prefilled_tokens": 40,
        "match_ms": 0.0,
        "write_ms": 0.0,
        "bytes": 0,
        "reason": None,
    }
    return values | more


def run_of(repeats: int) -> list[dict[str, Any]]:
    samples = []
    for repeat in range(repeats):
        slow = 1 + repeat  # noise that both modes of a repeat see
        samples += [
            sample(repeat, 0, "text", 50 * slow),
            sample(repeat, 0, "inject", 50 * slow),
            sample(repeat, 5, "text", 120 * slow),
            sample(repeat, 5, "inject", 60 * slow, match_ms=1, write_ms=1, bytes=10, memcpy_ms=1.0),
            sample(repeat, 50, "text", 600 * slow),
            sample(
                repeat, 50, "inject", 75 * slow, match_ms=2, write_ms=4, bytes=99, memcpy_ms=3.0
            ),
        ]
    return samples


def test_ttft_summary_holds_the_promised_keys() -> None:
    summary = ttft.summarise(run_of(7))
    assert summary["ttft_ratio_k50"] == pytest.approx(8)
    assert summary["injected_over_floor_k50"] == pytest.approx(1.5)
    assert summary["connector_over_memcpy_k50"] == pytest.approx(2)
    assert summary["flatness_50_over_5"] == pytest.approx(75 / 60)
    assert [row["k"] for row in summary["rows"]] == [0, 5, 50]
    last = summary["rows"][-1]
    assert last["text_over_injected"]["q1"] == pytest.approx(8)
    assert last["injected_over_floor"]["q3"] == pytest.approx(1.5)
    assert last["memory_tokens"] == 1500
    json.dumps(summary)


def test_ttft_summary_without_a_floor() -> None:
    summary = ttft.summarise([s for s in run_of(2) if s["k"] == 50])
    assert "injected_over_floor_k50" not in summary
    assert "flatness_50_over_5" not in summary
    assert summary["ttft_ratio_k50"] == pytest.approx(8)


def test_requests_that_were_not_injected_are_said() -> None:
    samples = run_of(1)
    assert ttft.warnings(samples) == []
    samples[-1] |= {"injected_tokens": 0, "reason": "evicted"}
    (warning,) = ttft.warnings(samples)
    assert "k = 50: 0 of 1500" in warning
    assert "evicted" in warning


def test_selections_never_start_twice_with_the_same_fact() -> None:
    ids = [str(i) for i in range(60)]
    selections = ttft.Selections(ids)
    chosen = [selections.next(50) for _ in range(60)]
    assert len({picked[0] for picked in chosen}) == 60
    assert all(len(set(picked)) == 50 for picked in chosen)
    assert selections.next(0) == []
    assert len(selections.next(60)) == 60


@pytest.mark.parametrize(
    ("ks", "repeats", "message"),
    [([0, 5000], 7, "as many facts"), ([5], 500, "questions"), ([], 7, "--k"), ([-1], 7, "--k")],
)
def test_a_run_that_cannot_be_made_is_refused(ks: list[int], repeats: int, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        ttft.check_sizes(load(), ks, repeats)


def fidelity_row(default: float, agree: bool = True) -> dict[str, Any]:
    def mode(kl: float) -> dict[str, Any]:
        return {"kl": [kl, kl], "agree": [agree, True]}

    modes = {"w0": mode(1.0), "turns8": mode(0.5), "default": mode(default), "shuffle": mode(0.06)}
    return {"modes": modes}


def test_fidelity_summary_and_verdict() -> None:
    from inferscale_core.bench.fidelity import summarise, violations

    good = summarise([fidelity_row(0.02), fidelity_row(0.04, agree=False)])
    assert good["kl_default"] == pytest.approx(0.03)
    assert good["kl_w0"] == pytest.approx(1.0)
    assert good["kl_turns8"] == pytest.approx(0.5)
    assert good["kl_shuffle"] == pytest.approx(0.06)
    assert good["agree_default"] == pytest.approx(0.75)
    assert violations(good, 0.05) == []
    assert len(violations(good, 0.01)) == 1
    bad = summarise([fidelity_row(0.2)])
    assert len(violations(bad, math.inf)) == 2


def test_record_and_its_file(tmp_path: Path) -> None:
    result = record.record("bench ttft", {"k": [5]})
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["cpu"]
    assert "torch" in result["versions"]
    path = tmp_path / "new" / "result.json"
    record.write_json(path, result)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot write"):
        record.write_json(tmp_path / "file" / "result.json", {})


def test_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "out" / "ttft.png"
    series = {
        "prompt text": [spread([100, 110]), spread([500, 520])],
        "injected KV": [spread([60, 61]), spread([70, 75])],
    }
    plot_ttft(path, [5, 50], series, "TTFT")
    assert path.read_bytes().startswith(b"\x89PNG")
