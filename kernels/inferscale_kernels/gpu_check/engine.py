"""Time to first token in vLLM, where vLLM for CUDA is installed: ``inferscale bench geometry``.

A process of its own: nothing here imports vLLM or the core.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferscale_kernels.gpu_check import processes

MODES = {"eager": "--eager", "graphs": "--graphs"}
LEAST_SECONDS = 60
"""An engine of this size takes about that to start and to answer."""

COMMAND = (
    sys.executable, "-m", "inferscale_core.cli", "bench", "geometry",
    "--shape", "8b", "--k", "5,20,50,100,200", "--repeats", "5",
)  # fmt: skip


def unavailable() -> str | None:
    """Why the engine cannot be measured, or None."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return "vLLM for CUDA is not installed"
    if find_spec("vllm") is None or find_spec("inferscale_core") is None:
        return "inferscale_core cannot be imported: install the package, or add core/ to PYTHONPATH"
    return None


def check(until: float, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Run ``command`` eager, then with CUDA graphs.

    Args:
        until: ``time.monotonic()`` by which both must have ended.
        command: to which the mode and ``--json PATH`` are added.

    Returns:
        For each mode the command's own JSON, or ``left_out``: why there is none.

    """
    results = {}
    for mode, option in MODES.items():
        seconds = until - time.monotonic()
        if seconds < LEAST_SECONDS:
            results[mode] = {"left_out": f"{max(0, seconds):.0f} s are left"}
            continue
        results[mode] = _run([*command, option], seconds)
    return results


def _run(command: Sequence[str], seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="inferscale-gpu-check-") as directory:
        path = Path(directory) / "geometry.json"
        status, lines = processes.run(
            [*command, "--json", str(path)], seconds, {"VLLM_NO_USAGE_STATS": "1"}
        )
        if status is None:
            return {"left_out": f"not finished within {seconds:.0f} s"}
        if status or not path.exists():
            return {"left_out": f"failed with status {status}", "output": lines[-5:]}
        return json.loads(path.read_text())
