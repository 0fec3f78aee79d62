"""``inferscale demo``: one conversation, eight questions, prompt text against injected KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferscale_core.bench import DEFAULT_MODEL
from inferscale_core.bench.dataset import Dataset, Question, load
from inferscale_core.bench.display import progress_bars, ttft_table
from inferscale_core.bench.errors import reported
from inferscale_core.bench.live import Answer, LiveCore, live_core
from inferscale_core.bench.plot import plot_ttft
from inferscale_core.bench.statistics import spread

DEMO_K = (5, 20, 50)
ANSWER_TOKENS = 24
PLOT_NAME = "demo_ttft.png"


@dataclass(frozen=True)
class Pair:
    """One question at one k, asked both ways."""

    question: Question
    k: int
    text: Answer
    injected: Answer


def demo(
    model: Annotated[
        str, typer.Option(help="Model: a short name, a directory or a hub id.")
    ] = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="Directory for the plot.")] = Path("out"),
) -> None:
    """Ask 8 questions about a long conversation, with prompt text and with injected KV."""
    with reported():
        run_demo(model, out, Console())


def run_demo(model: str, out: Path, console: Console) -> Path:
    """The demo; returns the path of the plot.

    Raises BenchError or InferScaleError with a message for the user.
    """
    dataset = load()
    questions = [question for question in dataset.questions if question.demo]
    console.print(
        f"Two people, ten months, {len(dataset.facts)} facts, {len(questions)} questions. "
        "The first start takes a minute or two."
    )
    with live_core(model, "demo") as core:
        with progress_bars(console) as progress:
            core.store(
                dataset.facts, lambda done, total: progress("computing the facts' KV", done, total)
            )
        console.print("Warming up, then asking each question twice for k = 5, 20 and 50.")
        _warm_up(core, dataset)
        console.print()
        pairs: list[Pair] = []
        for number, question in enumerate(questions, 1):
            console.print(f"question {number} of {len(questions)}", style="dim")
            asked = [_ask_both(core, question, k) for k in DEMO_K]
            console.print(_question_table(asked))
            pairs += asked
    rows = summary_rows(pairs)
    console.print(ttft_table(rows, "Time to first token: median (quartiles) of 8 questions"))
    path = out / PLOT_NAME
    series = {
        "prompt text": [row["text_ms"] for row in rows],
        "injected KV": [row["injected_ms"] for row in rows],
    }
    plot_ttft(path, DEMO_K, series, f"Time to first token, {Path(model).name}")
    console.print(f"Plot: {path.resolve()}")
    console.print(
        "Both modes ran on one engine with vLLM's prefix caching on. "
        "`inferscale bench ttft` measures with more care."
    )
    return path


def summary_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """One row a k for ``ttft_table``: medians and quartiles over the questions."""
    rows = []
    for k in sorted({pair.k for pair in pairs}):
        of_k = [pair for pair in pairs if pair.k == k]
        rows.append(
            {
                "k": k,
                "memory_tokens": spread([p.injected.report.memory_tokens for p in of_k])["median"],
                "injected_tokens": spread([p.injected.report.injected_tokens for p in of_k])[
                    "median"
                ],
                "text_ms": spread([p.text.ttft * 1e3 for p in of_k]),
                "injected_ms": spread([p.injected.ttft * 1e3 for p in of_k]),
            }
        )
    return rows


def _warm_up(core: LiveCore, dataset: Dataset) -> None:
    """One request a mode and k: first calls meet lazy initialisation that later ones do not."""
    for k in DEMO_K:
        ids = [fact.id for fact in dataset.facts[-k:]]
        for mode in ("text", "inject"):
            core.ask("What did they talk about?", fact_ids=ids, mode=mode, max_tokens=2)


def _ask_both(core: LiveCore, question: Question, k: int) -> Pair:
    text = core.ask(question.text, k=k, mode="text", max_tokens=ANSWER_TOKENS)
    injected = core.ask(question.text, k=k, mode="inject", max_tokens=ANSWER_TOKENS)
    return Pair(question, k, text, injected)


def _question_table(pairs: Sequence[Pair]) -> Table:
    question = pairs[0].question
    table = Table(
        title=Text(f"{question.text}  (expected: {question.answer})", style="bold"),
        title_justify="left",
        expand=True,
    )
    table.add_column("k", justify="right")
    table.add_column("mode", no_wrap=True)
    table.add_column("answer", ratio=1)
    table.add_column("TTFT, ms", justify="right")
    table.add_column("injected, of prompt tokens", justify="right")
    for pair in pairs:
        for name, answer in (("prompt text", pair.text), ("injected KV", pair.injected)):
            report = answer.report
            table.add_row(
                str(pair.k) if name == "prompt text" else "",
                name,
                Text(answer.text.replace("\n", " ")),
                f"{answer.ttft * 1e3:.0f}",
                f"{report.injected_tokens} of {report.prompt_tokens}"
                if name == "injected KV"
                else "-",
                end_section=name == "injected KV",
            )
    return table
