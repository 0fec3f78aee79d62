"""TTFT over k as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.statistics import Spread

COLOURS = {"prompt text": "#b5482a", "injected KV": "#1f6f8b"}


def plot_ttft(
    path: Path, ks: Sequence[int], series: Mapping[str, Sequence[Spread]], title: str
) -> None:
    """Write a PNG: medians over k with their quartiles; ``series`` in milliseconds.

    Raises BenchError when the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    try:
        for name, spreads in series.items():
            medians = [s["median"] for s in spreads]
            below = [s["median"] - s["q1"] for s in spreads]
            above = [s["q3"] - s["median"] for s in spreads]
            axes.errorbar(
                ks,
                medians,
                yerr=[below, above],
                marker="o",
                capsize=3,
                label=name,
                color=COLOURS.get(name),
            )
            axes.annotate(
                f"{medians[-1]:.0f} ms",
                (ks[-1], medians[-1]),
                textcoords="offset points",
                xytext=(8, -3),
                color=COLOURS.get(name),
            )
        axes.set_xlabel("facts in the prompt (k)")
        axes.set_ylabel("time to first token (ms)")
        axes.set_xticks(list(ks))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, loc="upper left")
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)
