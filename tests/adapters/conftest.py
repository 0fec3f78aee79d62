"""A real private core for the adapters' tests, one per test session."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from inferscale_adapters.mem0 import Memory

# A short path: that of a Unix socket in it is limited.
_DIRECTORY = Path(tempfile.mkdtemp(prefix="isa-"))

# Mem0 reads these when it is imported, by the first test module that does.
os.environ["MEM0_TELEMETRY"] = "False"
os.environ["MEM0_DIR"] = str(_DIRECTORY / "mem0")


def pytest_unconfigure() -> None:
    shutil.rmtree(_DIRECTORY, ignore_errors=True)


@pytest.fixture(scope="session")
def core_environment() -> Iterator[dict[str, str]]:
    """Environment of the tests' cores: a home of their own, and an early end."""
    environment = {
        "INFERSCALE_HOME": str(_DIRECTORY / "home"),
        "INFERSCALE_IDLE_GRACE": "2",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


@pytest.fixture(scope="session")
def model_path() -> str:
    """Directory of the small model; resolved in the user's home, which keeps it."""
    from inferscale_core import models

    return os.environ.get("INFERSCALE_TEST_MODEL") or str(models.resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def core_options(model_path: str, core_environment: dict[str, str]) -> dict[str, Any]:
    """Provider options that name the session's core."""
    return {"model": model_path, "config": {"arena_bytes": 256 << 20}, "progress": False}


@pytest.fixture(scope="session")
def make_memory(
    core_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> "Callable[..., Memory]":
    """Makes a Memory on the session's core; keyword arguments go into its vector store's config."""
    from inferscale_adapters.mem0 import Memory

    def make(llm: dict[str, Any] | None = None, **vector_store: Any) -> "Memory":
        return Memory(
            {
                "vector_store": {"config": {**core_options, **vector_store}},
                "llm": {"config": {"max_tokens": 300, **(llm or {})}},
                "history_db_path": str(tmp_path_factory.mktemp("history") / "history.db"),
            }
        )

    return make


@pytest.fixture(scope="session")
def memory(make_memory: "Callable[..., Memory]") -> "Iterator[Memory]":
    memory = make_memory()
    yield memory
    memory.close()
