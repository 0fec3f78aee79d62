"""A real store in a temporary file, and short ways to write facts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import FactStore

ALICE = Scope(user="alice")
BOB = Scope(user="bob")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "facts.db"


@pytest.fixture
def store(path: Path) -> Iterator[FactStore]:
    with FactStore(path) as opened:
        yield opened
