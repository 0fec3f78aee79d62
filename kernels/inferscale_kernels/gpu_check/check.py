"""The whole check: what is run, in which order, and what becomes of a part that fails."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.gpu_check import bandwidth, correctness, engine, sanitizer
from inferscale_kernels.gpu_check.cases import ORDERS, Case, sweep
from inferscale_kernels.gpu_check.runner import Runner
from inferscale_kernels.gpu_check.workload import GEOMETRIES, TOKENS, Geometry

Say = Callable[[str], None]

TARGET_GEOMETRY, TARGET_TOKENS, TARGET_CODEC = "8B", 1500, "auto"
_SANITIZER_SECONDS = 80


@dataclass(frozen=True)
class Plan:
    """What is measured. ``seconds``: the whole check ends within them, whatever is left out."""

    cases: Sequence[Case]
    geometries: Sequence[Geometry]
    tokens: Sequence[int] = TOKENS
    codecs: Sequence[str] = tuple(CODECS)
    orders: Sequence[str] = ORDERS
    least_bytes: int = 512 * 2**20
    rounds: int = 15
    host_rounds: int = 200
    seconds: float = 230.0


def full_plan(seconds: float) -> Plan:
    return Plan(list(sweep()), list(GEOMETRIES.values()), seconds=seconds)


def run(runner: Runner, plan: Plan, say: Say) -> dict[str, Any]:
    """Results by part: ``correctness``, ``sanitizer``, ``bandwidth``, ``index_put``, ``launches``,
    ``engine``. A part that raises becomes ``{"error": ...}`` and the others are tried."""
    until = time.monotonic() + plan.seconds
    tool = sanitizer.find_tool()
    parts: dict[str, Callable[[], Any]] = {
        "correctness": lambda: correctness.check(runner, plan.cases, say),
        "bandwidth": lambda: _bandwidth(runner, plan, say),
        "index_put": lambda: _index_put(runner, plan),
        "launches": lambda: bandwidth.launches(
            runner, _target(plan.geometries), _tokens(plan), plan.host_rounds
        ),
        "sanitizer": lambda: sanitizer.check(
            tool, min(_SANITIZER_SECONDS, until - time.monotonic())
        ),
        "engine": lambda: _engine(runner, until),
    }
    results = {}
    for name, part in parts.items():
        began = time.monotonic()
        try:
            results[name] = part()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            say(traceback.format_exc())
        say(f"{name}: {time.monotonic() - began:.1f} s")
    return results


def _bandwidth(runner: Runner, plan: Plan, say: Say) -> list[dict[str, Any]]:
    """Every geometry, number of tokens and codec; for the target's, every order of the cache."""
    wanted = [
        (geometry, tokens, codec, plan.orders[0])
        for geometry in plan.geometries
        for tokens in plan.tokens
        for codec in plan.codecs
    ]
    target = (_target(plan.geometries), _tokens(plan), TARGET_CODEC)
    rows = []
    for geometry, tokens, codec, order in wanted + [(*target, o) for o in plan.orders[1:]]:
        say(f"bandwidth: {geometry.name}, {tokens} tokens, {codec}, {order}")
        rows += bandwidth.measure(
            runner, geometry, tokens, codec, order, plan.rounds, plan.least_bytes
        )
    return rows


def _index_put(runner: Runner, plan: Plan) -> list[dict[str, Any]]:
    target = _target(plan.geometries)
    wanted = [(geometry, TARGET_CODEC) for geometry in plan.geometries]
    wanted += [(target, codec) for codec in plan.codecs if codec != TARGET_CODEC]
    return [
        bandwidth.compare(runner, geometry, _tokens(plan), codec, plan.rounds, plan.least_bytes)
        for geometry, codec in wanted
    ]


def _engine(runner: Runner, until: float) -> dict[str, Any]:
    if (reason := engine.unavailable()) is not None:
        return {"left_out": reason}
    # The engine takes a share of the whole memory: torch's cache must be given back.
    runner.free_bytes()
    return engine.check(until)


def _target(geometries: Sequence[Geometry]) -> Geometry:
    """The targets' geometry, or the first one where the plan lacks it."""
    return next((g for g in geometries if g.name == TARGET_GEOMETRY), geometries[0])


def _tokens(plan: Plan) -> int:
    return TARGET_TOKENS if TARGET_TOKENS in plan.tokens else plan.tokens[0]
