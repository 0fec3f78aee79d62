"""Progress bars and result tables in the terminal."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from inferscale_core.bench.statistics import Spread

LINE_EVERY = 10.0
"""Seconds between two lines about the same thing when not on a terminal."""


class ShowProgress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None: ...


@contextmanager
def progress_bars(console: Console) -> Iterator[ShowProgress]:
    """One bar for each ``what`` that is reported; a line now and then when not on a terminal."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def _lines(console: Console) -> ShowProgress:
    shown: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - shown.get(what, 0.0) > LINE_EVERY:
            shown[what] = now
            console.print(f"{what}: {done}/{total}")

    return show


def milliseconds(value: Spread) -> str:
    """Median and quartiles, as ``62 (58-71)``."""
    return f"{value['median']:.0f} ({value['q1']:.0f}-{value['q3']:.0f})"


def ttft_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row a k, from ``rows`` with ``text_ms``, ``injected_ms`` and memory tokens."""
    table = Table(title=title, title_justify="left")
    names = ("k", "tokens", "injected", "prompt text, ms", "injected KV, ms", "ratio")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        ratio = row["text_ms"]["median"] / row["injected_ms"]["median"]
        table.add_row(
            str(row["k"]),
            f"{row['memory_tokens']:.0f}",
            f"{row['injected_tokens']:.0f}",
            milliseconds(row["text_ms"]),
            milliseconds(row["injected_ms"]),
            f"{ratio:.1f}x",
        )
    return table


def locomo_table(summary: Mapping[str, Any]) -> Table:
    """One row a k and mode, from ``locomo.summarise``."""
    table = Table(title="Means (95 % intervals)", title_justify="left")
    for name in ("k", "mode", "F1", "gold NLL", "NLL - text's", "KL to text", "same token"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for k in next(iter(summary.values())):
        for mode, by_k in summary.items():
            cell = by_k[k]
            table.add_row(
                k, mode, _interval(cell["f1"]), _interval(cell["nll"]),
                _interval(cell["nll_to_text"]), _interval(cell["kl"]),
                f"{cell['agree']['mean']:.0%}",
            )  # fmt: skip
        table.add_section()
    return table


def _interval(value: Mapping[str, Any]) -> str:
    low, high = value["ci95"]
    return f"{value['mean']:.3f} ({low:.3f} to {high:.3f})"
