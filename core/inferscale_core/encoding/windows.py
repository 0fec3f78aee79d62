"""Encoding windows: what stands before a fact while its KV is computed, and is then dropped.

A fact whose KV was computed behind lines like those it will be read with needs no correction at
serving time (Context-Window Encoding, arXiv:2607.27090, which uses conversation turns).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from inferscale_core.client.models import Turn
from inferscale_core.config import WindowConfig


@dataclass(frozen=True)
class WindowItem:
    """One text of a window. ``fact_id`` is None for text that is not a stored fact."""

    fact_id: str | None
    line: str


class WindowFact(Protocol):
    """What a window needs to know of the fact that it is for."""

    @property
    def id(self) -> str: ...

    @property
    def turns(self) -> Sequence[Turn]:
        """The conversation turns that the fact came from, in order."""
        ...


FactT = TypeVar("FactT", bound=WindowFact)
FactT_contra = TypeVar("FactT_contra", bound=WindowFact, contravariant=True)


class WindowSource(Protocol[FactT_contra]):
    """Where windows take other facts from.

    Both methods return at most ``count`` facts that ``fact``'s own owner scope, used as a reader,
    sees; never ``fact`` itself.
    """

    def neighbours(self, fact: FactT_contra, count: int) -> Sequence[WindowItem]:
        """The most similar facts, most similar first."""
        ...

    def preceding(self, fact: FactT_contra, count: int) -> Sequence[WindowItem]:
        """The facts stored before ``fact``, latest first."""
        ...


class WindowBuilder(ABC):
    """One kind of window. The last item stands right before the fact."""

    kind: ClassVar[str]
    outgrown: ClassVar[bool] = False
    """Whether facts that come later would make the window another."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def window(self, fact: FactT, source: WindowSource[FactT]) -> list[WindowItem]:
        """At most ``size`` items, the most relevant last."""


class NeighbourWindow(WindowBuilder):
    """The scope's most similar facts, most similar last, as they stand together in a prompt."""

    kind = "neighbours"
    outgrown = True

    def window(self, fact: FactT, source: WindowSource[FactT]) -> list[WindowItem]:
        return list(reversed(source.neighbours(fact, self.size)))


class PrecedingWindow(WindowBuilder):
    """The facts stored before it, latest last."""

    kind = "preceding"

    def window(self, fact: FactT, source: WindowSource[FactT]) -> list[WindowItem]:
        return list(reversed(source.preceding(fact, self.size)))


class TurnWindow(WindowBuilder):
    """The conversation turns that the fact came from: the paper's ``w``."""

    kind = "turns"

    def window(self, fact: FactT, source: WindowSource[FactT]) -> list[WindowItem]:
        turns = list(fact.turns)[-self.size :] if self.size else []
        return [WindowItem(None, f"{t.name or t.role}: {t.content}\n") for t in turns]


class NoWindow(WindowBuilder):
    """Nothing but the anchor: the paper's ``w = 0``."""

    kind = "none"

    def window(self, fact: FactT, source: WindowSource[FactT]) -> list[WindowItem]:
        return []


WINDOWS: dict[str, type[WindowBuilder]] = {
    cls.kind: cls for cls in (NeighbourWindow, PrecedingWindow, TurnWindow, NoWindow)
}


def window_builder(config: WindowConfig) -> WindowBuilder:
    """The builder that ``config`` names."""
    return WINDOWS[config.kind](config.size)


def within_budget(
    items: Sequence[WindowItem], count: Callable[[str], int], max_tokens: int
) -> list[WindowItem]:
    """The longest end of ``items`` of at most ``max_tokens``; ``count`` gives a line's tokens.

    The window is cut at its far end: an item that does not fit ends it, so what is kept is what
    stands right before the fact.
    """
    kept: list[WindowItem] = []
    for item in reversed(items):
        max_tokens -= count(item.line)
        if max_tokens < 0:
            break
        kept.append(item)
    return kept[::-1]
