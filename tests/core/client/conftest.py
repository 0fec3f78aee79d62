"""A private home for cores, and the small model."""

import os
from pathlib import Path

import pytest

from inferscale_core import models


@pytest.fixture(scope="session")
def small_model() -> str:
    """Directory of SmolLM2-135M, fetched once into the user's own cache."""
    return str(models.get("smollm2-135m"))


@pytest.fixture
def core_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path))
    monkeypatch.delenv("INFERSCALE_BASE_URL", raising=False)
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
