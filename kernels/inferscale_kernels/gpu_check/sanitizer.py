"""``compute-sanitizer`` (memcheck) over a few cases, in processes of their own."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferscale_kernels.gpu_check import processes

ERRORS_FOUND = 86


def find_tool() -> str | None:
    """Path of ``compute-sanitizer``: on the path, or of a CUDA toolkit."""
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = [str(Path(toolkit) / "bin") for toolkit in toolkits if toolkit]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(folders)
    )


def check(tool: str | None, seconds: float) -> dict[str, Any]:
    """Run the cases, then a fault that must be told.

    Returns:
        ``clean``: no error in the cases. ``control``: the fault was told. ``output``: the last
        lines where either is not so. Or ``left_out``: why nothing was run.

    """
    if tool is None:
        return {"left_out": "compute-sanitizer was not found (it is part of the CUDA toolkit)"}
    output = []
    try:
        cases, said = _run(tool, [], seconds / 2)
        fault, said_of_fault = _run(tool, ["fault"], seconds / 2)
    except OSError as error:
        return {"left_out": f"compute-sanitizer does not start: {error}"}
    if cases is None or fault is None:
        return {"left_out": f"compute-sanitizer took more than {seconds / 2:.0f} s"}
    clean, control = cases == 0, fault == ERRORS_FOUND
    for passed, lines in ((clean, said), (control, said_of_fault)):
        if not passed:
            output += lines[-15:]
    return {"clean": clean, "control": control, "output": output}


def _run(tool: str, arguments: Sequence[str], seconds: float) -> tuple[int | None, list[str]]:
    script = [sys.executable, "-m", "inferscale_kernels.gpu_check.memcheck_cases", *arguments]
    # Errors of API calls are torch's own trials, such as asking for what a driver lacks.
    options = ["--report-api-errors", "no", "--error-exitcode", str(ERRORS_FOUND)]
    # Each tensor is then an allocation of its own, whose end the tool knows.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return processes.run([tool, "--tool", "memcheck", *options, *script], seconds, environment)
