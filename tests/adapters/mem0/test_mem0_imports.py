"""What importing the adapter brings with it."""

import subprocess
import sys


def imported_by(statement: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_importing_the_package_loads_neither_torch_nor_vllm_nor_mem0() -> None:
    loaded = imported_by("import inferscale_adapters.mem0")
    assert "torch" not in loaded
    assert "vllm" not in loaded
    assert "| mem0" not in loaded


def test_importing_memory_loads_neither_torch_nor_vllm() -> None:
    loaded = imported_by("from inferscale_adapters.mem0 import Memory, install")
    modules = {line.split("|")[-1].strip() for line in loaded.splitlines()}
    assert "mem0.memory.main" in modules
    assert not {name for name in modules if name.split(".")[0] in ("torch", "vllm", "transformers")}
