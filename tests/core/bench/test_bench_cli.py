import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferscale_core.bench.cli import bench_app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ttft", "--k", "many"], "takes numbers"),
        (["ttft", "--k", "0,5000"], "as many facts"),
        (["ttft", "--repeats", "1000"], "1001 questions"),
        (["ttft", "--dataset", "/nowhere/facts.jsonl"], "cannot read"),
        (["ttft", "--base-url", "http://127.0.0.1:9"], "no core answers"),
        (["geometry", "--shape", "9b"], "known: 8b, 1b, tiny"),
        (["geometry", "--k", "5,5000"], "from 1 to 250"),
        (["fidelity", "--core-config", "{]"], "not valid"),
        (["fidelity", "--core-config", '{"kv_store_dtype": "int3"}'], "kv_store_dtype"),
        (["fidelity", "--conv", "nobody"], "no conversation 'nobody'"),
        (["fidelity", "--model", "/nowhere/model"], "no model"),
    ],
)
def test_expected_failures_are_one_message(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench_app, arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_commands_take_what_the_readme_says() -> None:
    for command in ("ttft", "fidelity"):
        result = CliRunner().invoke(bench_app, [command, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        for option in ("--model", "--dataset", "--questions", "--json", "--repeats", "--k"):
            assert option in result.output


def test_writer_is_measured_without_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "writer.json"
    arguments = ["writer", "--tokens", "100", "--repeats", "2", "--json", str(path)]
    result = CliRunner().invoke(bench_app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert set(written["summary"]) == {
        f"writer_over_memcpy_{codec}" for codec in ("auto", "fp8_e4m3", "int8")
    }
    by_codec = {
        (row["model"], row["kv_store_dtype"]): row["arena_bytes"] for row in written["rows"]
    }
    assert by_codec["SmolLM2-135M", "auto"] == 100 * 23_040
    assert by_codec["SmolLM2-135M", "int8"] == 100 * (23_040 // 2 + 30 * 2 * 3 * 2)


def test_a_shape_is_measured_with_random_weights(tmp_path: Path) -> None:
    """In a process of its own: an engine stays for the life of its process."""
    path = tmp_path / "geometry.json"
    command = [sys.executable, "-m", "inferscale_core.cli", "bench", "geometry"]
    arguments = ["--shape", "tiny", "--k", "3,20", "--repeats", "1", "--json", str(path)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads(path.read_text())
    assert [(row["k"], row["tokens"]) for row in written["rows"]] == [(3, 90), (20, 600)]
    assert set(written["summary"]) == {"ttft_ratio_k20", "injected_over_floor_k20"}


def test_demo_names_a_model_that_is_not_there(tmp_path: Path) -> None:
    from inferscale_core.cli import app

    result = CliRunner().invoke(app, ["demo", "--model", "/nowhere/model", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "/nowhere/model" in result.stderr
