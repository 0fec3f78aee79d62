"""``gpu_check`` without a GPU: its parts run on the kernels compiled for the host.

The times are the host's; what is tested is that work is right, counted and reported.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_transfer import HostRunner

from inferscale_kernels.gpu_check import (
    bandwidth,
    correctness,
    engine,
    memcheck_cases,
    processes,
    report,
    requirements,
    sanitizer,
    targets,
)
from inferscale_kernels.gpu_check.__main__ import main, run_and_report
from inferscale_kernels.gpu_check.cases import ORDERS, Case
from inferscale_kernels.gpu_check.check import Plan, full_plan, run
from inferscale_kernels.gpu_check.machine import commit
from inferscale_kernels.gpu_check.statistics import ratios, scaled, spread
from inferscale_kernels.gpu_check.workload import GEOMETRIES, Geometry, Workload

CPU = torch.device("cpu")
SMALL = Geometry("small", 3, 2, 64)
PLAN = Plan(
    [Case(), Case(codec="int8", rotations=("neox", "none"))],
    [SMALL], tokens=(40,), codecs=("auto", "int8"), orders=ORDERS[:2], least_bytes=200_000,
    rounds=3, host_rounds=3, seconds=0.0,
)  # fmt: skip
"""No time: the parts that are processes of their own are left out."""


def test_statistics() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert ratios([2.0, 9.0], [1.0, 3.0])["median"] == 2.5
    assert scaled(10.0, [2.0])["median"] == 5.0
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_a_right_kernel_passes(host_compiler) -> None:
    for case in PLAN.cases:
        assert correctness.check_case(HostRunner(host_compiler), case) == []


SKIP = "if (slot < 0 || source < 0) return;"
PADDED = "const PagedSlot paged(source < 0 ? 0 : source,"


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("write", "first * cos - second * sin", "first * cos + second * sin"),
        ("write captured", "multiply(b, key_scale)", "multiply(b, 1.0f)"),
        ("read", "second * cos - first * sin", "second * cos"),
        ("read captured", SKIP + "\n  const PagedSlot paged(source,", PADDED),
    ],
    ids=["a sign", "a factor", "a term", "padding"],
)
def test_a_wrong_kernel_is_told(host_compiler, form: str, old: str, new: str) -> None:
    def text_of(program) -> str:
        assert old in program.text()
        return program.text().replace(old, new)

    case = Case(key_scale=0.5, skipped=0)
    runner = HostRunner(host_compiler, text_of=text_of)
    result = correctness.check(runner, [case], print)
    wrong = {failure["form"] for failure in result["failures"]}
    # Padding is only in a captured launch.
    direction = form.split()[0]
    assert wrong == ({form} if SKIP in old else {direction, f"{direction} captured"})
    assert all(failure["elements"] > 0 for failure in result["failures"])


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_bytes_are_those_of_the_tensors(codec: str) -> None:
    workload = Workload(SMALL, 30, 1, codec, "NHD", CPU)
    # 30 tokens fill the arena, and all but two slots of the cache.
    arena = workload.arena.nbytes + (0 if workload.scales is None else workload.scales.nbytes)
    cache = sum(storage.nbytes for storage in workload.storages) * 30 // 32
    assert workload.bytes_moved == arena + cache


def test_geometries() -> None:
    kib = {name: g.bytes_moved("auto") / 2048 for name, g in GEOMETRIES.items()}
    assert kib == {"1B": 32, "8B": 128, "70B TP8": 40}


def test_steps_share_no_slot() -> None:
    workload = Workload(SMALL, 50, 4, "auto", "HND", CPU)
    for name, most in (("src", workload.arena.shape[1]), ("dst", 4 * 64)):
        slots = torch.cat([getattr(step, name) for step in workload.steps])
        assert len(slots.unique()) == len(slots) == 200
        assert slots.min() >= 0
        assert slots.max() < most


@pytest.mark.parametrize("codec", ["auto", "fp8_e4m3"])
def test_index_put_is_the_same_work(host_compiler, codec: str) -> None:
    row = bandwidth.compare(HostRunner(host_compiler), SMALL, 40, codec, 2, 0)
    assert row["equal"]
    assert row["times_faster"]["n"] == 2


def test_measured_launches_are_compared(host_compiler) -> None:
    def text_of(program) -> str:
        return program.text().replace("multiply(b, key_scale)", "multiply(b, 2.0f)")

    for runner, right in (
        (HostRunner(host_compiler), True),
        (HostRunner(host_compiler, text_of), False),
    ):
        rows = bandwidth.measure(runner, SMALL, 40, "auto", "NHD", 2, 0)
        assert [row["equal"] for row in rows] == [right, True]
        assert bandwidth.compare(runner, SMALL, 40, "auto", 2, 0)["equal"] is right


def test_what_does_not_fit_is_left_out(host_compiler) -> None:
    runner = HostRunner(host_compiler)
    runner.free = 1000
    (row,) = bandwidth.measure(runner, SMALL, 40, "auto", "NHD", 2, 0)
    assert "GiB" in row["left_out"]
    assert "GiB" in bandwidth.compare(runner, SMALL, 40, "auto", 2, 0)["left_out"]


def test_the_whole_check(host_compiler, tmp_path: Path, capsys) -> None:
    path = tmp_path / "new" / "gpu-check.json"
    status = run_and_report(HostRunner(host_compiler), PLAN, {"gpu": "none"}, path)
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["correctness"] == {"cases": 2, "runs": 8, "failures": []}
    # Two codecs, and the second order with one of them; two kernels each.
    assert len(result["bandwidth"]) == 6
    assert {row["order"] for row in result["bandwidth"]} == set(ORDERS[:2])
    for row in result["bandwidth"]:
        assert row["equal"]
        assert row["of_copy"]["q1"] <= row["of_copy"]["median"] <= row["of_copy"]["q3"]
        assert row["launches_a_sample"] * row["bytes"] >= PLAN.least_bytes
    assert result["launches"]["launches"] == {"rotate_scatter": 1, "gather_unrotate": 1}
    assert "left_out" in result["sanitizer"]
    assert result["machine"]["gpu"] == "none"
    # The targets are of the 8B geometry, which this plan lacks.
    assert status == 1
    assert not result["passed"]
    assert printed.count("not measured") == 3
    for title in ("Correctness: 2 cases", "Bandwidth:", "index-put", "Launches of a step", "TTFT"):
        assert title in printed


def test_a_part_that_breaks_off_fails_the_check(host_compiler) -> None:
    class Broken(HostRunner):
        def profile(self, work):
            raise ValueError("no such thing")

    results = run(Broken(host_compiler), replace(PLAN, cases=[]), print)
    assert results["launches"] == {"error": "ValueError: no such thing"}
    assert not targets.evaluate(results)[0].met
    assert "no such thing" in report.text({}, results, targets.evaluate(results))


def _results(of_copy: float = 0.85, times_faster: float = 6.0, launches: int = 1) -> dict:
    where = {"geometry": "8B", "tokens": 1500, "codec": "auto"}
    rows = [
        where | {"kernel": kernel, "of_copy": {"median": share}, "equal": True}
        for share in (of_copy, 0.1)
        for kernel in bandwidth.KERNELS
    ]
    return {
        "correctness": {"failures": []},
        "sanitizer": {"clean": True, "control": True},
        "bandwidth": rows,
        "index_put": [where | {"times_faster": {"median": times_faster}, "equal": True}],
        "launches": {"launches": {"rotate_scatter": launches, "gather_unrotate": 1}},
        "engine": {"left_out": "no vLLM"},
    }


def test_targets() -> None:
    def missed(results: dict) -> list[str]:
        return [t.name.split(" (")[0] for t in targets.evaluate(results) if not t.met]

    assert missed(_results()) == []
    both = [f"{kernel} over copy bandwidth" for kernel in bandwidth.KERNELS]
    assert missed(_results(of_copy=0.79)) == both
    assert missed(_results(times_faster=4.9)) == ["times faster than index-put"]
    assert missed(_results(launches=2)) == ["launches of a step"]
    assert missed(_results() | {"bandwidth": [], "index_put": []}) == [
        *both, "times faster than index-put"
    ]  # fmt: skip
    assert missed(_results() | {"bandwidth": {"error": "x"}}) == ["failures", *both]
    for change in (
        {"correctness": {"failures": [{}]}},
        {"sanitizer": {"clean": False, "control": True}},
        {"sanitizer": {"clean": True, "control": False}},
        {"index_put": [_results()["index_put"][0] | {"equal": False}]},
        {"engine": {"error": "x"}},
    ):
        assert missed(_results() | change) == ["failures"]


def test_table() -> None:
    assert report.table(("name", "us"), [["a", "1.0"], ["bcdef", "12.5"]]).splitlines() == [
        "name     us",
        "-----  ----",
        "a       1.0",
        "bcdef  12.5",
    ]


def test_full_plan_measures_the_targets() -> None:
    plan = full_plan(230)
    assert [g.name for g in plan.geometries] == ["1B", "8B", "70B TP8"]
    assert plan.tokens == (500, 1500, 8000)
    assert set(plan.codecs) == {"auto", "fp8_e4m3", "int8"}
    assert len(plan.cases) > 100


@pytest.mark.parametrize("fault", [False, True])
def test_memcheck_cases(host_compiler, fault: bool) -> None:
    """Each in both directions; the fault is one slot behind the cache, and only written."""
    runner, seen = HostRunner(host_compiler), []
    make_transfer = runner.transfer

    def transfer(*arguments):
        made = make_transfer(*arguments)
        made._launch = lambda launch: seen.append(launch.kernel)
        return made

    runner.transfer = transfer
    memcheck_cases.run(runner, memcheck_cases.CASES[0], fault)
    assert seen == (["rotate_scatter"] if fault else list(bandwidth.KERNELS))


def _tool(path: Path, of_cases: int, of_fault: int) -> str:
    path.write_text(
        '#!/bin/sh\necho "$@"\n'
        f'for last; do :; done\nif [ "$last" = fault ]; then exit {of_fault}; fi\nexit {of_cases}\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("of_cases", "of_fault", "clean", "control"),
    [(0, 86, True, True), (86, 86, False, True), (0, 0, True, False), (1, 1, False, False)],
)
def test_what_the_sanitizer_says(tmp_path, of_cases, of_fault, clean, control) -> None:
    said = sanitizer.check(_tool(tmp_path / "tool", of_cases, of_fault), 20)
    assert (said["clean"], said["control"]) == (clean, control)
    assert bool(said["output"]) != (clean and control)
    assert all("memcheck" in line for line in said["output"])


def test_no_sanitizer(tmp_path, monkeypatch) -> None:
    assert "not found" in sanitizer.check(None, 20)["left_out"]
    assert "does not start" in sanitizer.check(str(tmp_path), 20)["left_out"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "compute-sanitizer"
    _tool(tool, 0, 86)
    assert sanitizer.find_tool() == str(tool)


def test_a_process_ends_with_its_children(tmp_path) -> None:
    mark = tmp_path / "mark"
    script = f"(sleep 1; touch {mark}) & sleep 30"
    began = time.monotonic()
    status, lines = processes.run(["sh", "-c", f"echo said; {script}"], 0.3, {})
    assert (status, lines) == (None, ["said"])
    time.sleep(1.2)
    assert not mark.exists()
    assert time.monotonic() - began < 10
    assert processes.run(["sh", "-c", "echo $WORD; exit 3"], 10, {"WORD": "x"}) == (3, ["x"])


def test_engine(monkeypatch) -> None:
    """A command in its place: what it writes is kept, what fails is said, no time is no run."""
    script = (
        "import json, sys; mode, _, path = sys.argv[1:]\n"
        "print('trying'); assert mode == '--eager'\n"
        "json.dump({'rows': [], 'mode': mode}, open(path, 'w'))"
    )
    results = engine.check(time.monotonic() + 100, [sys.executable, "-c", script])
    assert results["eager"] == {"rows": [], "mode": "--eager"}
    assert results["graphs"]["left_out"] == "failed with status 1"
    assert results["graphs"]["output"][-1] == "AssertionError"
    results = engine.check(time.monotonic(), [sys.executable, "-c", script])
    assert results["eager"] == results["graphs"] == {"left_out": "0 s are left"}


def test_engine_options_are_those_of_the_command() -> None:
    pytest.importorskip("typer")
    done = subprocess.run(
        [*engine.COMMAND[:5], "--help"], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    for option in (*engine.COMMAND[5::2], *engine.MODES.values(), "--json"):
        assert option in done.stdout


def test_ttft_rows_are_shown() -> None:
    three = {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    rows = [{"k": 50, "text_ms": three, "injected_ms": three, "ratio": three}]
    results = _results() | {
        "engine": {"eager": {"rows": rows}, "graphs": {"left_out": "9 s are left"}}
    }
    shown = report._engine(results["engine"])
    assert "3.0 (2.0-4.0)" in shown
    assert "9 s are left" in shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cuda": None}, "not built for CUDA"),
        ({"available": False}, "no CUDA device"),
        ({"lacking": "torch"}, "torch is not installed"),
        ({"lacking": "cupy"}, "pip install cupy-cuda13x"),
        ({"major": 7}, "Ampere"),
    ],
)
def test_what_is_missing(monkeypatch, capsys, tmp_path, changes: dict, said: str) -> None:
    class Properties:
        name, major, minor = "a GPU", changes.get("major", 9), 0

    monkeypatch.setattr(torch.version, "cuda", changes.get("cuda", "13.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: changes.get("available", True))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(
        requirements, "find_spec", lambda name: None if name == changes.get("lacking") else name
    )
    assert main(["--json", str(tmp_path / "x.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: ")
    assert said in line
    assert not (tmp_path / "x.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_without_a_gpu(tmp_path) -> None:
    package = Path(requirements.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "inferscale_kernels.gpu_check"], capture_output=True, text=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(package)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_commit_is_of_this_checkout() -> None:
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
