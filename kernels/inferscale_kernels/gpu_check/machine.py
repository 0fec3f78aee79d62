"""What a check was made on."""

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """The current CUDA device, its driver and the versions of everything between."""
    import cupy

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cuda_of_torch": torch.version.cuda,
        "torch": torch.__version__,
        "cupy": cupy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """Commit of the checkout, ``-dirty`` when it has changes; None outside of one."""
    return _output(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def _output(command: Sequence[str]) -> str | None:
    """First line of what a command prints, None where it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None
