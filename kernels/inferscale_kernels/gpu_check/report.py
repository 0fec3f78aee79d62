"""A check's results as plain text and as a JSON file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferscale_kernels.gpu_check.statistics import Spread
from inferscale_kernels.gpu_check.targets import Target


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Through a temporary file, so that an interrupted run leaves the old result.

    Raises:
        OSError: the file cannot be written.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def text(machine: dict[str, Any], results: dict[str, Any], targets: Sequence[Target]) -> str:
    """Everything that a reader needs, tables last but for the targets."""
    parts = [
        "\n".join(f"{name:20} {value}" for name, value in machine.items()),
        _correctness(results["correctness"]),
        _sanitizer(results["sanitizer"]),
        _bandwidth(results["bandwidth"]),
        _index_put(results["index_put"]),
        _launches(results["launches"]),
        _engine(results["engine"]),
        _targets(targets),
    ]
    return "\n\n".join(parts)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need be: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    right = [all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(widths))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *map(line, rows)])


def figure(value: Spread, digits: int = 1) -> str:
    """Median and quartiles."""
    median, q1, q3 = (f"{value[name]:,.{digits}f}" for name in ("median", "q1", "q3"))
    return f"{median} ({q1}-{q3})"


def _correctness(part: dict[str, Any]) -> str:
    if "error" in part:
        return f"Correctness: broke off. {part['error']}"
    failures = part["failures"]
    said = f"Correctness: {part['cases']} cases, {part['runs']} runs, {len(failures)} failures"
    worst = [
        f"  {f['form']}, tensor {f['tensor']}: {f['elements']} elements differ, by {f['apart']} "
        f"numbers at most: {f['case']}"
        for f in failures[:20]
    ]
    return "\n".join([said, *worst])


def _sanitizer(part: dict[str, Any]) -> str:
    if (reason := _missing(part)) is not None:
        return f"compute-sanitizer: {reason}"
    cases = "no error" if part["clean"] else "ERRORS"
    fault = "told" if part["control"] else "NOT TOLD"
    return "\n".join([
        f"compute-sanitizer: {cases} in the cases; a fault made on purpose was {fault}",
        *(f"  {line}" for line in part["output"]),
    ])  # fmt: skip


def _bandwidth(part: list[dict[str, Any]] | dict[str, Any]) -> str:
    title = "Bandwidth: read + written, medians (quartiles)"
    if isinstance(part, dict):
        return f"{title}: broke off. {part['error']}"
    headings = (
        "model", "tokens", "codec", "cache", "kernel", "MB", "us", "GB/s", "copy GB/s",
        "of copy, %", "equal",
    )  # fmt: skip
    rows = []
    for row in part:
        first = [row["geometry"], f"{row['tokens']:,}", row["codec"], row["order"]]
        if "left_out" in row:
            rows.append([*first, f"left out: {row['left_out']}", *["-"] * 6])
            continue
        percent = {name: 100 * row["of_copy"][name] for name in ("median", "q1", "q3")}
        rows.append([
            *first,
            row["kernel"],
            f"{row['bytes'] / 1e6:,.1f}",
            figure(row["microseconds"]),
            figure(row["gb_per_s"], 0),
            figure(row["copy_gb_per_s"], 0),
            figure({**percent, "n": row["of_copy"]["n"]}),  # type: ignore[typeddict-item]
            _yes(row["equal"]),
        ])  # fmt: skip
    return f"{title}\n{table(headings, rows)}"


def _index_put(part: list[dict[str, Any]] | dict[str, Any]) -> str:
    title = "rotate_scatter against index-put in PyTorch, us a step"
    if isinstance(part, dict):
        return f"{title}: broke off. {part['error']}"
    columns = {
        "kernel": "kernel_microseconds",
        "index-put": "index_put_microseconds",
        "kernel, graph": "kernel_captured_microseconds",
        "index-put, graph": "index_put_captured_microseconds",
        "times faster": "times_faster",
        "times faster, graph": "times_faster_captured",
    }
    rows = []
    for row in part:
        first = [row["geometry"], f"{row['tokens']:,}", row["codec"]]
        if "left_out" in row:
            rows.append([*first, f"left out: {row['left_out']}", *["-"] * len(columns)])
            continue
        rows.append([*first, *(figure(row[c]) for c in columns.values()), _yes(row["equal"])])
    return f"{title}\n{table(('model', 'tokens', 'codec', *columns, 'equal'), rows)}"


def _launches(part: dict[str, Any]) -> str:
    if "error" in part:
        return f"Launches: broke off. {part['error']}"
    counts = ", ".join(f"{kernel} {count}" for kernel, count in part["launches"].items())
    seen = part["profiled"]
    profiled = (
        "the profiler sees nothing on this machine"
        if seen is None
        else "the profiler saw " + ", ".join(f"{count} x {name}" for name, count in seen.items())
    )
    host = part["host_microseconds"]
    rows = [[call, figure(samples)] for call, samples in host.items()]
    return (
        f"Launches of a step ({part['geometry']}, {part['tokens']:,} tokens): {counts}; "
        f"{profiled}\n{table(('call', 'us of the host'), rows)}"
    )


def _engine(part: dict[str, Any]) -> str:
    title = "TTFT in vLLM, 8B with random weights"
    if (reason := _missing(part)) is not None:
        return f"{title}: {reason}"
    rows = []
    for mode, result in part.items():
        if (reason := _missing(result)) is not None:
            rows.append([mode, "-", reason, "-", "-"])
            continue
        for row in result["rows"]:
            figures = [figure(row[name]) for name in ("text_ms", "injected_ms", "ratio")]
            rows.append([mode, str(row["k"]), *figures])
    return f"{title}\n{table(('mode', 'k', 'text, ms', 'injected, ms', 'ratio'), rows)}"


def _targets(targets: Sequence[Target]) -> str:
    rows = [
        [
            "pass" if target.met else "FAIL",
            target.name,
            target.needed,
            "not measured" if target.value is None else f"{target.value:.4g}",
        ]
        for target in targets
    ]
    return f"Targets\n{table(('', 'what', 'needed', 'measured'), rows)}"


def _missing(part: dict[str, Any]) -> str | None:
    if "error" in part:
        return f"broke off. {part['error']}"
    if "left_out" in part:
        return "; ".join([f"left out, {part['left_out']}", *part.get("output", [])])
    return None


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
