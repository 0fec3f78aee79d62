"""``python -m inferscale_kernels.gpu_check``: are the kernels right and fast on this machine?

Needs torch for CUDA, CuPy and an NVIDIA GPU; exit status 2 without them, 1 where a result is wrong
or a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale_kernels.gpu_check.requirements import missing

if TYPE_CHECKING:
    from inferscale_kernels.gpu_check.check import Plan
    from inferscale_kernels.gpu_check.runner import Runner


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m inferscale_kernels.gpu_check")
    parser.add_argument("--json", type=Path, default=Path("out/gpu-check.json"), metavar="PATH")
    parser.add_argument(
        "--seconds", type=float, default=230.0, help="the check ends within them (default: 230)"
    )
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(f"gpu-check: {reason}", file=sys.stderr)
        return 2
    # Imported late: they need torch, which may be what is missing.
    from inferscale_kernels.gpu_check import check, machine
    from inferscale_kernels.gpu_check.runner import CudaRunner

    return run_and_report(
        CudaRunner(), check.full_plan(options.seconds), machine.describe(), options.json
    )


def run_and_report(runner: "Runner", plan: "Plan", machine: dict[str, Any], path: Path) -> int:
    """Run ``plan``, print what came out and write it to ``path``; 0 if all targets are met."""
    from inferscale_kernels.gpu_check import check, report, targets
    from inferscale_kernels.gpu_check.machine import commit

    began = time.monotonic()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    results = check.run(runner, plan, lambda line: print(line, file=sys.stderr, flush=True))
    reached = targets.evaluate(results)
    machine = machine | {"commit": commit(), "time": started}
    result = {
        "command": "gpu-check",
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
        **results,
        "targets": targets.as_json(reached),
        "passed": targets.passed(reached),
    }
    print(report.text(machine, results, reached))
    try:
        report.write_json(path, result)
    except OSError as error:
        print(f"gpu-check: cannot write {path}: {error}", file=sys.stderr)
        return 1
    print(f"\nWritten: {path.resolve()}, after {result['seconds']:.0f} s")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
