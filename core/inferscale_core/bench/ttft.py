"""Time to first token over k, prompt text against injected KV: ``inferscale bench ttft``.

Both modes alternate in one run on one engine, prefix caching on. Every pair of requests gets a
question and an order of facts of its own, so that neither mode finds an earlier prompt of this run
in the prefix cache: what is measured is the first question after a user's facts have changed or
another selection was retrieved, which is what a memory framework sends. At k = 0 the text request
is the same request without memory: the floor.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from inferscale_core.bench.dataset import Dataset
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.live import Answer, LiveCore
from inferscale_core.bench.statistics import paired_ratios, spread

DEFAULT_K = (0, 5, 10, 20, 50)
MODES = ("text", "inject")

Progress = Callable[[str, int, int], None]
Sample = dict[str, Any]


class Selections:
    """Orders of facts for the pairs of one run; no two start with the same fact, if possible."""

    def __init__(self, fact_ids: Sequence[str], seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._ids = list(fact_ids)
        self._firsts: list[str] = []

    def next(self, k: int) -> list[str]:
        """``k`` fact ids in prompt order."""
        if k == 0:
            return []
        if not self._firsts:
            self._firsts = self._random.sample(self._ids, len(self._ids))
        first = self._firsts.pop()
        rest = [fact_id for fact_id in self._ids if fact_id != first]
        return [first, *self._random.sample(rest, k - 1)]


def check_sizes(dataset: Dataset, ks: Sequence[int], repeats: int) -> None:
    """Raises BenchError when the dataset is too small for the run."""
    if not ks or min(ks) < 0:
        raise BenchError("--k needs one or more numbers from 0 on, for example --k 0,5,50")
    if repeats < 1:
        raise BenchError("--repeats needs a number from 1 on")
    if max(ks) > len(dataset.facts):
        raise BenchError(
            f"k = {max(ks)} needs as many facts; {dataset.source} has {len(dataset.facts)}"
        )
    if repeats >= len(dataset.questions):
        raise BenchError(
            f"{repeats} repeats need {repeats + 1} questions, one for each and one to warm up; "
            f"{dataset.source} has {len(dataset.questions)}"
        )


def measure(
    core: LiveCore, dataset: Dataset, ks: Sequence[int], repeats: int, progress: Progress
) -> list[Sample]:
    """Samples of every repeat, k and mode, in the order they were taken."""
    check_sizes(dataset, ks, repeats)
    core.store(dataset.facts, lambda done, total: progress("computing KV", done, total))
    selections = Selections([fact.id for fact in dataset.facts])
    warmup = dataset.questions[-1].text
    for k in ks:
        for mode in MODES:
            _request(core, warmup, selections.next(k), mode)
    samples: list[Sample] = []
    shuffled = random.Random(1)
    for repeat, question in enumerate(dataset.questions[:repeats]):
        for place, k in enumerate(shuffled.sample(list(ks), len(ks))):
            fact_ids = selections.next(k)
            order = MODES if (repeat + place) % 2 == 0 else MODES[::-1]
            for mode in order:
                answer = _request(core, question.text, fact_ids, mode)
                samples.append(_sample(repeat, k, mode, answer))
                progress("asking", len(samples), repeats * len(ks) * len(MODES))
    for sample in samples:
        if sample["bytes"]:
            sample["memcpy_ms"], sample["memcpy_where"] = core.memcpy_ms(sample["bytes"])
    return samples


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians, quartiles and ratios; TTFT in milliseconds.

    ``rows`` has one entry a k. ``ttft_ratio_k*`` and ``injected_over_floor_k*`` are ratios of
    medians, the floor being the request without memory; the ratios of the pairs, in which noise
    common to both cancels, stand in the rows.
    """
    ks = sorted({sample["k"] for sample in samples})
    floor = _values(samples, 0, "text", "ttft_ms") if 0 in ks else []
    rows = []
    summary: dict[str, Any] = {}
    for k in ks:
        text = _values(samples, k, "text", "ttft_ms")
        injected = _values(samples, k, "inject", "ttft_ms")
        row: dict[str, Any] = {
            "k": k,
            "text_ms": spread(text),
            "injected_ms": spread(injected),
            "text_over_injected": paired_ratios(text, injected),
        }
        for name in ("memory_tokens", "injected_tokens", "prefilled_tokens"):
            row[name] = spread(_values(samples, k, "inject", name))["median"]
        summary[f"ttft_ratio_k{k}"] = row["text_ms"]["median"] / row["injected_ms"]["median"]
        if floor:
            row["injected_over_floor"] = paired_ratios(injected, floor)
            over = row["injected_ms"]["median"] / spread(floor)["median"]
            summary[f"injected_over_floor_k{k}"] = over
        copied = [s for s in samples if s["k"] == k and s["mode"] == "inject" and s["bytes"]]
        if copied:
            own = [s["match_ms"] + s["write_ms"] for s in copied]
            row["connector_ms"] = spread(own)
            row["match_ms"] = spread([s["match_ms"] for s in copied])
            row["write_ms"] = spread([s["write_ms"] for s in copied])
            row["bytes"] = spread([s["bytes"] for s in copied])["median"]
            row["memcpy_ms"] = spread([s["memcpy_ms"] for s in copied])
            ratio = paired_ratios(own, [s["memcpy_ms"] for s in copied])
            row["connector_over_memcpy"] = ratio
            summary[f"connector_over_memcpy_k{k}"] = ratio["median"]
        rows.append(row)
    by_k = {row["k"]: row["injected_ms"]["median"] for row in rows}
    if 5 in by_k and 50 in by_k:
        summary["flatness_50_over_5"] = by_k[50] / by_k[5]
    return {**summary, "rows": rows}


def warnings(samples: Sequence[Sample]) -> list[str]:
    """What makes the figures mean less than they say: facts that were not injected."""
    found = []
    for sample in samples:
        if sample["mode"] != "inject" or not sample["k"]:
            continue
        if sample["injected_tokens"] < 0.8 * sample["memory_tokens"]:
            found.append(
                f"repeat {sample['repeat']}, k = {sample['k']}: {sample['injected_tokens']} of "
                f"{sample['memory_tokens']} memory tokens injected ({sample['reason']})"
            )
    return found


def _request(core: LiveCore, question: str, fact_ids: list[str], mode: str) -> Answer:
    # The second token makes the answer long enough to hold text where the first is half a letter.
    length: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    if not fact_ids and mode == "text":
        return core.ask(question, plain=True, **length)
    return core.ask(question, fact_ids=fact_ids, mode=mode, **length)


def _sample(repeat: int, k: int, mode: str, answer: Answer) -> Sample:
    report = answer.report
    return {
        "repeat": repeat,
        "k": k,
        "mode": mode,
        "ttft_ms": answer.ttft * 1e3,
        "prompt_tokens": report.prompt_tokens,
        "memory_tokens": report.memory_tokens,
        "injected_tokens": report.injected_tokens,
        "cached_tokens": report.cached_tokens,
        "prefilled_tokens": report.prefilled_tokens,
        "match_ms": report.match_ms or 0.0,
        "write_ms": report.write_ms or 0.0,
        "bytes": report.bytes or 0,
        "reason": report.reason,
    }


def _values(samples: Sequence[Sample], k: int, mode: str, name: str) -> list[float]:
    """One value a repeat, in the order of repeats."""
    return [s[name] for s in samples if s["k"] == k and s["mode"] == mode]
