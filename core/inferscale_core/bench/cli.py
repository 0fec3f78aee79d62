"""``inferscale bench ...``: each command runs with no arguments on the small model."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from inferscale_core import models
from inferscale_core.bench import DEFAULT_MODEL
from inferscale_core.bench.dataset import Dataset, load
from inferscale_core.bench.errors import BenchError, reported
from inferscale_core.bench.record import record, write_json
from inferscale_core.bench.statistics import Spread
from inferscale_core.config import CoreConfig

DEFAULT_K = 50

bench_app = typer.Typer(
    name="bench", help="Measure InferScale on this machine.", no_args_is_help=True
)

Model = Annotated[str, typer.Option(help="Model: a short name, a directory or a hub id.")]
DatasetPath = Annotated[
    Path | None, typer.Option("--dataset", help="Facts, JSONL: text, date_iso, conv.")
]
QuestionsPath = Annotated[
    Path | None, typer.Option("--questions", help="Questions, JSONL: question, answer, conv.")
]
Conv = Annotated[
    str | None, typer.Option(help="Conversation of the dataset; default its first one.")
]
JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write the result with all raw samples here.")
]

CoreConfigJson = Annotated[
    str | None, typer.Option(help="Fields of the core's configuration, JSON.")
]


@bench_app.command()
def ttft(
    model: Model = DEFAULT_MODEL,
    dataset: DatasetPath = None,
    questions: QuestionsPath = None,
    conv: Conv = None,
    json_path: JsonPath = None,
    k: Annotated[str, typer.Option(help="Numbers of facts, comma-separated.")] = "0,5,10,20,50",
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of requests for each k.")] = 9,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of TTFT over k.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Measure a core that runs already, at this address.")
    ] = None,
) -> None:
    """Time to first token over k: prompt text (prefix caching on) against injected KV."""
    from inferscale_core.bench import ttft as bench
    from inferscale_core.bench.display import progress_bars, ttft_table
    from inferscale_core.bench.live import live_core
    from inferscale_core.bench.plot import plot_ttft

    console = Console()
    with reported():
        ks = _numbers(k)
        data = load(dataset, questions, conv)
        bench.check_sizes(data, ks, repeats)
        result = record("bench ttft", _arguments(model, data, k=ks, repeats=repeats))
        with live_core(model, "ttft", base_url) as core, progress_bars(console) as progress:
            samples = bench.measure(core, data, ks, repeats, progress)
        summary = bench.summarise(samples)
        rows = summary["rows"]
        console.print(ttft_table(rows, "Time to first token: median (quartiles)"))
        _print_summary(console, summary)
        for warning in bench.warnings(samples):
            console.print(f"[yellow]Not injected: {warning}[/yellow]")
        if plot is not None:
            series = {
                "prompt text": [row["text_ms"] for row in rows],
                "injected KV": [row["injected_ms"] for row in rows],
            }
            plot_ttft(plot, sorted(ks), series, f"Time to first token, {Path(model).name}")
            console.print(f"Plot: {plot.resolve()}")
        _write(console, json_path, result | {"summary": summary, "samples": samples})


@bench_app.command()
def fidelity(
    model: Model = DEFAULT_MODEL,
    dataset: DatasetPath = None,
    questions: QuestionsPath = None,
    conv: Conv = None,
    json_path: JsonPath = None,
    k: Annotated[int, typer.Option(min=1, help="Facts in the prompt.")] = DEFAULT_K,
    repeats: Annotated[int, typer.Option(min=1, help="How many questions to ask.")] = 24,
    live: Annotated[
        bool,
        typer.Option(
            "--live/--bulk",
            help="Encode each fact behind those stored before it, or behind any of them.",
        ),
    ] = True,
    check: Annotated[
        bool, typer.Option(help="Exit with 1 when the KL of the defaults is out of bounds.")
    ] = True,
    core_config: CoreConfigJson = None,
) -> None:
    """KL of injected answers to prompt-text answers, for several ways of encoding facts."""
    from inferscale_core.bench import fidelity as bench
    from inferscale_core.bench.display import progress_bars
    from inferscale_core.bench.inprocess import InProcessEngine

    console = Console()
    with reported():
        data = load(dataset, questions, conv)
        data = Dataset(data.name, data.facts, data.questions[:repeats], data.source)
        config = _core_config(core_config)
        arguments = _arguments(model, data, k=k, live=live, questions=len(data.questions))
        result = record("bench fidelity", arguments | {"config": config.model_dump(mode="json")})
        console.print("Starting vLLM in this process; this takes about half a minute.")
        engine = InProcessEngine(models.resolve(model), config)
        with progress_bars(console) as progress:
            measured = bench.run(engine, data, config, k, live, progress)
        # The recorded bound is that of the small model on the built-in conversation.
        recorded = model == DEFAULT_MODEL and dataset is None and k == DEFAULT_K
        bound = bench.KL_BOUND if recorded else math.inf
        problems = bench.violations(measured["summary"], bound)
        _print_summary(console, measured["summary"])
        _write(console, json_path, result | measured | {"violations": problems})
        if check and problems:
            raise BenchError("; ".join(problems))


@bench_app.command()
def locomo(
    dataset: Annotated[
        Path | None, typer.Option(help="locomo10.json; default the built-in conversation.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option(help="Facts instead of the dataset's observations, JSONL.")
    ] = None,
    questions: QuestionsPath = None,
    conv: Conv = None,
    model: Model = DEFAULT_MODEL,
    k: Annotated[str, typer.Option(help="Numbers of facts, comma-separated.")] = "5,20,50",
    modes: Annotated[
        str, typer.Option(help="none, text, shuffle, w0, w8, neighbours16, default+tail3 ...")
    ] = "none,text,shuffle,w0,w8,default",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    instruction: Annotated[
        str, typer.Option(help="Stands behind each question.")
    ] = "Answer in a few words.",
    rows: Annotated[
        Path, typer.Option(help="Results of each question; a run that was cut off goes on.")
    ] = Path("out/locomo.rows.jsonl"),
    json_path: JsonPath = None,
    core_config: CoreConfigJson = None,
) -> None:
    """Answers to LoCoMo's questions as text and injected: F1, containment, NLL, KL."""
    from inferscale_core.bench import locomo as bench
    from inferscale_core.bench.display import locomo_table, progress_bars
    from inferscale_core.bench.inprocess import InProcessEngine
    from inferscale_core.bench.locomo_data import load_locomo
    from inferscale_core.bench.modes import PLAIN, encoding_of

    console = Console()
    with reported():
        ks = [number for number in _numbers(k) if number > 0]
        names = list(dict.fromkeys(["text", *(m.strip() for m in modes.split(",") if m.strip())]))
        config = _core_config(core_config)
        if dataset is not None and facts is None:
            data = load_locomo(dataset, conv)
        else:
            data = [load(facts, questions, conv)]
        data = bench.limited(data, limit)
        if not ks or not data:
            raise BenchError("nothing to ask: --k takes numbers from 1, questions need an answer")
        settings = {
            "model": model, "k": ks, "modes": names, "instruction": instruction,
            "facts": {d.name: len(d.facts) for d in data}, "source": data[0].source,
            "config": config.model_dump(mode="json"),
        }  # fmt: skip
        result = record("bench locomo", settings)
        kept = bench.Rows(rows, settings)
        encodings = {m: encoding_of(m, config) for m in names if m not in PLAIN}
        console.print("Starting vLLM in this process; this takes about half a minute.")
        engine = InProcessEngine(models.resolve(model), config)
        with progress_bars(console) as progress:
            bench.run(engine, data, config, names, ks, instruction, kept, progress)
        summary = bench.summarise(kept.rows)
        console.print(locomo_table(summary))
        least = bench.least_injected(kept.rows, encodings)
        for mode, share in least.items():
            if share < bench.LEAST_INJECTED:
                console.print(
                    f"[yellow]{mode}: only {share:.0%} of a prompt's facts were injected[/yellow]"
                )
        _write(
            console, json_path,
            result | {"summary": summary, "least_injected": least, "rows": kept.rows},
        )  # fmt: skip


@bench_app.command()
def writer(
    json_path: JsonPath = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=5000, help="Tokens of facts in a prompt.")
    ] = 1500,
    repeats: Annotated[int, typer.Option(min=1, help="Writes for each row.")] = 25,
) -> None:
    """The CPU writer against a plain copy of the bytes that it reads and writes; no engine."""
    from inferscale_core.bench import writer as bench
    from inferscale_core.bench.display import progress_bars

    console = Console()
    with reported():
        layout = bench.layout_of_this_machine()
        arguments = {"tokens": tokens, "repeats": repeats, "layout": layout}
        result = record("bench writer", arguments)
        with progress_bars(console) as progress:
            rows = bench.measure(tokens, repeats, progress)
        table = Table(
            title=f"Write of {tokens} tokens, {layout} pages",
            title_justify="left",
        )
        for heading in (
            "model",
            "arena",
            "MB read + written",
            "ms",
            "/ memcpy",
            "/ memcpy, threads",
        ):
            table.add_column(heading, justify="right")
        for row in rows:
            spreads = (row.write_ms, row.over_memcpy, row.over_memcpy_threads)
            table.add_row(
                row.model, row.kv_store_dtype,
                f"{row.arena_bytes / 1e6:.0f} + {row.page_bytes / 1e6:.0f}",
                *(_spread(s) for s in spreads),
            )  # fmt: skip
        console.print(table)
        summary = bench.summarise(rows)
        _print_summary(console, summary)
        _write(console, json_path, result | {"summary": summary, "rows": [asdict(r) for r in rows]})


@bench_app.command()
def geometry(
    json_path: JsonPath = None,
    shape: Annotated[str, typer.Option(help="Shape of the model: 8b, 1b or tiny.")] = "tiny",
    k: Annotated[str, typer.Option(help="Numbers of facts.")] = "5,10,20,50,100,200",
    repeats: Annotated[int, typer.Option(min=1, help="Turns for each k.")] = 9,
    eager: Annotated[
        bool, typer.Option("--eager/--graphs", help="Eager, or compiled with CUDA graphs.")
    ] = True,
    core_config: CoreConfigJson = None,
) -> None:
    """Time to first token of a model's shape with random weights; needs no checkpoint."""
    from inferscale_core.bench import geometry as bench
    from inferscale_core.bench.display import progress_bars

    console = Console()
    with reported():
        if shape not in bench.LLAMA:
            raise BenchError(f"no shape {shape!r}; known: {', '.join(bench.LLAMA)}")
        ks = [number for number in _numbers(k) if number > 0]
        if not ks or max(ks) * bench.FACT_TOKENS > bench.MOST_MEMORY_TOKENS:
            raise BenchError(
                f"--k takes numbers from 1 to {bench.MOST_MEMORY_TOKENS // bench.FACT_TOKENS}"
            )
        config = _core_config(core_config)
        arguments = {"shape": shape, "k": ks, "repeats": repeats, "eager": eager}
        result = record("bench geometry", arguments | {"config": config.model_dump(mode="json")})
        console.print("Starting vLLM in this process; this takes about half a minute.")
        with progress_bars(console) as progress:
            measured = bench.run(shape, ks, repeats, eager, config, progress)
        table = Table(title=f"Time to first token, {shape}", title_justify="left")
        columns = {
            "text, ms": "text_ms", "injected, ms": "injected_ms", "no memory, ms": "floor_ms",
            "text / injected": "ratio", "injected / no memory": "over_floor",
        }  # fmt: skip
        for heading in ("k", *columns):
            table.add_column(heading, justify="right")
        for row in measured["rows"]:
            table.add_row(str(row["k"]), *(_spread(row[name]) for name in columns.values()))
        console.print(table)
        _print_summary(console, measured["summary"])
        _write(console, json_path, result | measured)


def _spread(values: Spread) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f}-{values['q3']:.2f})"


def _core_config(text: str | None) -> CoreConfig:
    try:
        return CoreConfig.from_json(text)
    except ValueError as error:
        raise BenchError(f"--core-config is not valid: {error}") from error


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise BenchError(f"--k takes numbers such as 0,5,50, not {text!r}") from error


def _arguments(model: str, data: Dataset, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "dataset": data.source,
        "conversation": data.name,
        "facts": len(data.facts),
        **more,
    }


def _print_summary(console: Console, summary: dict[str, Any]) -> None:
    table = Table(title="Summary", title_justify="left", show_header=False)
    for name, value in summary.items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.3f}")
    console.print(table)


def _write(console: Console, path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, result)
        console.print(f"Written: {path.resolve()}")
