"""How near injected answers are to prompt-text answers: ``inferscale bench fidelity``.

For each question the k nearest facts make one prompt, best fact last. The greedy prompt-text
answer is the reference; at each of its positions the next-token distribution of every mode is
compared with prompt text's, over the whole vocabulary:

- ``w0``: each fact encoded alone, without anchor (w = 0 of arXiv:2607.27090);
- ``turns8``: behind the conversation turns it came from, up to 8, without anchor (the paper's w);
- ``default``: as a core with its default settings does it;
- ``shuffle``: prompt text with the same facts in another order. The yardstick: what stays under
  it differs from prompt text by less than the order of the facts does.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from inferscale_core.bench.dataset import Dataset, Question
from inferscale_core.bench.encoded import EncodedFacts, Encoding, Progress, StoredFact
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.inprocess import Continuation, Continue, InProcessEngine
from inferscale_core.bench.statistics import kl_divergence, spread
from inferscale_core.config import CoreConfig, WindowConfig
from inferscale_core.connector.protocol import inject_params

KL_BOUND = 0.06
"""Largest ``kl_default`` that ``make check-fidelity`` accepts (nats, SmolLM2-135M, k = 50, the
built-in conversation)."""

W0_SHARE = 0.1
"""``kl_default`` may be at most this share of ``kl_w0``."""

ANSWER_TOKENS = 12
LEAST_INJECTED = 0.8
"""Share of a prompt's fact tokens that must come from injected KV for the figure to mean
anything: what falls back to text has a KL of 0."""


def encodings(config: CoreConfig) -> tuple[Encoding, ...]:
    """The three that are compared; ``default`` is what ``config`` says."""
    return (
        Encoding("w0", False, WindowConfig(kind="none", size=0)),
        Encoding("turns8", False, WindowConfig(kind="turns", size=8)),
        Encoding("default", config.anchor, config.window, config.tail),
    )


class FidelityCheck:
    """Asks questions in each mode."""

    def __init__(self, facts: EncodedFacts, k: int) -> None:
        self.facts = facts
        self.k = k
        self.shuffler = random.Random(0)

    def ask(self, question: Question, modes: Sequence[Encoding]) -> dict[str, Any]:
        """One question in every mode: KL per answer position, and whether the top token agrees."""
        facts = self.facts.retrieve(question.text, self.k)
        messages = [{"role": "user", "content": question.text}]
        ids = self.facts.template.compose(messages, [fact.line for fact in facts]).ids
        prompt = Continue(ids, ANSWER_TOKENS, distributions=True)
        (text,) = self.facts.engine.continue_all([prompt])
        shuffled = list(facts)
        self.shuffler.shuffle(shuffled)
        other_ids = self.facts.template.compose(messages, [fact.line for fact in shuffled]).ids
        others = [Continue(other_ids, forced=text.ids, distributions=True)]
        for mode in modes:
            params, salt = inject_params(mode.namespace, [(mode.namespace, 0)], mode.tail)
            others.append(Continue(ids, 0, text.ids, params, salt, distributions=True))
        shuffle, *injected = self.facts.engine.continue_all(others)
        measured = {"shuffle": _compare(text, shuffle)}
        for mode, other in zip(modes, injected, strict=True):
            share = _injected_share(other.report, facts, mode.tail)
            if share < LEAST_INJECTED:
                raise BenchError(
                    f"only {share:.0%} of the facts' tokens came from injected KV in mode "
                    f"{mode.name!r} for {question.text!r}: {other.report}"
                )
            measured[mode.name] = _compare(text, other) | {"injected_share": share}
        return {
            "question": question.text,
            "gold": question.answer,
            "answer": text.text,
            "prompt_tokens": len(ids),
            "memory_tokens": sum(len(fact.ids) for fact in facts),
            "modes": measured,
        }


def run(
    engine: InProcessEngine,
    dataset: Dataset,
    config: CoreConfig,
    k: int,
    live: bool,
    progress: Progress,
) -> dict[str, Any]:
    """The whole check; returns ``summary``, ``encoding_tokens`` and the raw ``questions``."""
    stored = EncodedFacts(engine, dataset, config, live, progress)
    check = FidelityCheck(stored, k)
    modes = encodings(config)
    needed = {fact.key for q in dataset.questions for fact in stored.retrieve(q.text, k)}
    facts = [fact for fact in stored.facts if fact.key in needed]
    tokens = {}
    for mode in modes:
        tokens[mode.name] = stored.encode(mode, facts)
        stored.meet_header(mode, dataset.questions[0].text, facts[0])
    rows = []
    for number, question in enumerate(dataset.questions, 1):
        rows.append(check.ask(question, modes))
        engine.forget_prefixes()
        progress("asking questions", number, len(dataset.questions))
    return {"summary": summarise(rows), "encoding_tokens": tokens, "questions": rows}


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over questions of the means over answer positions, with quartiles beside them."""
    summary: dict[str, Any] = {"questions": len(rows)}
    for mode in ("w0", "turns8", "default", "shuffle"):
        per_question = [float(np.mean(row["modes"][mode]["kl"])) for row in rows]
        summary[f"kl_{mode}"] = float(np.mean(per_question))
        summary[f"kl_{mode}_spread"] = spread(per_question)
        agreement = [float(np.mean(row["modes"][mode]["agree"])) for row in rows]
        summary[f"agree_{mode}"] = float(np.mean(agreement))
    summary["default_over_w0"] = summary["kl_default"] / summary["kl_w0"]
    return summary


def violations(summary: dict[str, Any], bound: float = KL_BOUND) -> list[str]:
    """What the check fails for; empty when it passes."""
    kl = summary["kl_default"]
    limits = {
        f"the recorded bound {bound:g}": bound,
        f"kl_shuffle {summary['kl_shuffle']:.4f}": summary["kl_shuffle"],
        f"{W0_SHARE:g} of kl_w0 {summary['kl_w0']:.4f}": W0_SHARE * summary["kl_w0"],
    }
    return [f"kl_default {kl:.4f} is above {name}" for name, limit in limits.items() if kl > limit]


def _compare(reference: Continuation, other: Continuation) -> dict[str, Any]:
    """KL at each position of the reference's answer, and whether the most likely token is it."""
    pairs = list(zip(reference.distributions(), other.distributions(), strict=True))
    return {
        "kl": [kl_divergence(p, q) for p, q in pairs],
        "agree": [bool(p.argmax() == q.argmax()) for p, q in pairs],
    }


def _injected_share(report: dict[str, Any], facts: Sequence[StoredFact], tail: int) -> float:
    """Injected tokens over the tokens of the facts that are not left to prefill on purpose."""
    expected = sum(len(fact.ids) for fact in facts[: len(facts) - tail])
    return float(report.get("injected_tokens") or 0) / max(1, expected)
