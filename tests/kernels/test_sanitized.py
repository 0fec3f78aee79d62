"""The kernels touch no byte that is not theirs, and the check that says so can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitized.py"


def _libasan() -> str:
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return os.path.realpath(found) if os.path.isabs(found) else ""


pytestmark = pytest.mark.skipif(not _libasan(), reason="g++ has no libasan")


def _run(directory: Path, fault: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": _libasan(),
        # Python and torch leave memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99:verify_asan_link_order=0",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, SCRIPT, directory, fault], env=environment, capture_output=True, text=True
    )


def test_no_byte_out_of_bounds(tmp_path: Path) -> None:
    done = _run(tmp_path, "none")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        ("token", "heap-buffer-overflow"),
        ("layer", "heap-buffer-overflow"),
        ("paged slot", "heap-buffer-overflow"),
        ("arena slot", "heap-buffer-overflow"),
        ("position", "heap-buffer-overflow"),
        ("alignment", "misaligned address"),
    ],
)
def test_a_fault_is_told(tmp_path: Path, fault: str, report: str) -> None:
    done = _run(tmp_path, fault)
    assert done.returncode != 0
    assert report in done.stderr, done.stderr[-2000:]
