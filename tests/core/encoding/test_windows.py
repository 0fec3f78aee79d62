"""The kinds of windows and how they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from inferscale_core.client.models import Turn
from inferscale_core.config import WindowConfig
from inferscale_core.encoding.windows import (
    WINDOWS,
    WindowItem,
    window_builder,
    within_budget,
)


@dataclass
class Fact:
    id: str = "f"
    turns: list[Turn] = field(default_factory=list)


class Source:
    """Facts n0 (nearest), n1, ... and p0 (latest), p1, ..."""

    def neighbours(self, fact: Fact, count: int) -> Sequence[WindowItem]:
        return [WindowItem(f"n{i}", f"- n{i}\n") for i in range(min(count, 20))]

    def preceding(self, fact: Fact, count: int) -> Sequence[WindowItem]:
        return [WindowItem(f"p{i}", f"- p{i}\n") for i in range(min(count, 20))]


def test_every_kind_is_registered_under_its_name() -> None:
    assert set(WINDOWS) == {"neighbours", "preceding", "turns", "none"}


@pytest.mark.parametrize("kind", sorted(WINDOWS))
@pytest.mark.parametrize("size", [0, 1, 16, 64])
def test_at_most_size_items(kind: str, size: int) -> None:
    fact = Fact(turns=[Turn(content=str(i)) for i in range(30)])
    builder = window_builder(WindowConfig(kind=kind, size=size))
    assert len(builder.window(fact, Source())) <= size


def test_the_most_relevant_stands_last() -> None:
    def ids(kind: str) -> list[str | None]:
        builder = window_builder(WindowConfig(kind=kind, size=3))
        return [item.fact_id for item in builder.window(Fact(), Source())]

    assert ids("neighbours") == ["n2", "n1", "n0"]
    assert ids("preceding") == ["p2", "p1", "p0"]
    assert ids("none") == []


def test_turns_are_the_last_ones_with_their_speaker() -> None:
    fact = Fact(turns=[Turn(content="one"), Turn(content="two"), Turn(content="3", name="Eve")])
    builder = window_builder(WindowConfig(kind="turns", size=2))
    items = builder.window(fact, Source())
    assert [(i.fact_id, i.line) for i in items] == [(None, "user: two\n"), (None, "Eve: 3\n")]


def test_the_budget_cuts_the_far_end() -> None:
    items = [WindowItem(str(i), "x" * n) for i, n in enumerate((1, 9, 3, 4))]
    assert [i.fact_id for i in within_budget(items, len, 7)] == ["2", "3"]
    assert [i.fact_id for i in within_budget(items, len, 8)] == ["2", "3"]
    assert within_budget(items, len, 3) == []
    assert within_budget(items, len, 100) == items
