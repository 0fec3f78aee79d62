"""What must be reached, and whether a check's results reach it."""

from dataclasses import asdict, dataclass
from typing import Any

from inferscale_kernels.gpu_check.bandwidth import KERNELS
from inferscale_kernels.gpu_check.check import TARGET_CODEC, TARGET_GEOMETRY, TARGET_TOKENS

LEAST_OF_COPY = 0.8
LEAST_TIMES_FASTER = 5.0


@dataclass(frozen=True)
class Target:
    """``value`` is None where it was not measured: then the target is missed."""

    name: str
    needed: str
    value: float | None
    met: bool


def evaluate(results: dict[str, Any]) -> list[Target]:
    """Targets of the results of ``check.run``; medians count."""
    wanted = {"geometry": TARGET_GEOMETRY, "tokens": TARGET_TOKENS, "codec": TARGET_CODEC}
    where = f"{TARGET_GEOMETRY}, {TARGET_TOKENS:,} tokens, {TARGET_CODEC}"
    targets = [_correct(results)]
    bandwidth = _rows(results, "bandwidth")
    for kernel in KERNELS:
        # The first: further rows are other orders of the cache.
        row = _find(bandwidth, wanted | {"kernel": kernel})
        value = row["of_copy"]["median"] if row else None
        targets.append(_at_least(f"{kernel} over copy bandwidth ({where})", value, LEAST_OF_COPY))
    row = _find(_rows(results, "index_put"), wanted)
    value = row["times_faster"]["median"] if row and "times_faster" in row else None
    targets.append(_at_least(f"times faster than index-put ({where})", value, LEAST_TIMES_FASTER))
    launches = results["launches"].get("launches", {})
    most = max(launches.values(), default=None)
    targets.append(Target("launches of a step", "1", most, most == 1))
    return targets


def passed(targets: list[Target]) -> bool:
    return all(target.met for target in targets)


def as_json(targets: list[Target]) -> list[dict[str, Any]]:
    return [asdict(target) for target in targets]


def _correct(results: dict[str, Any]) -> Target:
    """Wrong results anywhere, and parts that broke off, count."""
    failures = len(results["correctness"].get("failures", []))
    failures += sum("error" in part for part in results.values() if isinstance(part, dict))
    sanitizer = results["sanitizer"]
    failures += sum(not sanitizer.get(name, True) for name in ("clean", "control"))
    for part in ("bandwidth", "index_put"):
        failures += sum(not row.get("equal", True) for row in _rows(results, part))
    return Target("failures (sweep, measured launches, sanitizer)", "0", failures, not failures)


def _at_least(name: str, value: float | None, least: float) -> Target:
    return Target(name, f">= {least:g}", value, value is not None and value >= least)


def _rows(results: dict[str, Any], part: str) -> list[dict[str, Any]]:
    rows = results[part]
    return rows if isinstance(rows, list) else []


def _find(rows: list[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any] | None:
    return next((row for row in rows if wanted.items() <= row.items()), None)
