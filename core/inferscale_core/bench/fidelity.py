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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_core.bench.dataset import Dataset, Fact, Question
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.inprocess import BATCH, InProcessEngine
from inferscale_core.bench.statistics import kl_divergence, spread
from inferscale_core.client.models import Turn
from inferscale_core.config import CoreConfig, WindowConfig
from inferscale_core.connector.protocol import Span, inject_params
from inferscale_core.encoding import (
    PromptTemplate,
    WindowItem,
    plan_encoding,
    window_builder,
    within_budget,
)
from inferscale_core.facts.embedder import Embedder
from inferscale_core.facts.scope import Scope
from inferscale_core.facts.store import render_line, segment_key

KL_BOUND = 0.06
"""Largest ``kl_default`` that ``make check-fidelity`` accepts (nats, SmolLM2-135M, k = 50, the
built-in conversation)."""

W0_SHARE = 0.1
"""``kl_default`` may be at most this share of ``kl_w0``."""

ANSWER_TOKENS = 12
LEAST_INJECTED = 0.8
"""Share of a prompt's fact tokens that must come from injected KV for the figure to mean
anything: what falls back to text has a KL of 0."""

Progress = Callable[[str, int, int], None]
"""``(what, done, total)``."""


@dataclass(frozen=True)
class Encoding:
    """One way to encode facts; ``name`` is its namespace too."""

    name: str
    anchor: bool
    window: WindowConfig
    tail: int = 0

    @property
    def namespace(self) -> str:
        return Scope(tenant="inferscale-bench", user=self.name).key


def encodings(config: CoreConfig) -> tuple[Encoding, ...]:
    """The three that are compared; ``default`` is what ``config`` says."""
    return (
        Encoding("w0", False, WindowConfig(kind="none", size=0)),
        Encoding("turns8", False, WindowConfig(kind="turns", size=8)),
        Encoding("default", config.anchor, config.window, config.tail),
    )


@dataclass(frozen=True)
class StoredFact:
    """A fact as it stands in a prompt; ``embedding`` is ``[dimension]``, unit length."""

    fact: Fact
    line: str
    key: str
    ids: tuple[int, ...]
    embedding: NDArray[np.float32]

    @property
    def id(self) -> str:
        return self.fact.id

    @property
    def turns(self) -> Sequence[Turn]:
        return self.fact.turns


class StoredFacts:
    """What a fact's window is taken from.

    ``live``: as when facts are told one by one: a fact sees those stored before it, and when it
    was last encoded again (``growth``), those of that time. Otherwise all facts, as when many are
    added at once.
    """

    def __init__(self, facts: Sequence[StoredFact], live: bool, growth: float) -> None:
        self._facts = facts
        self._live = live
        self._growth = growth
        self._embeddings = np.stack([fact.embedding for fact in facts])
        self._place = {fact.id: i for i, fact in enumerate(facts)}

    def neighbours(self, fact: Any, count: int) -> list[WindowItem]:
        place = self._place[fact.id]
        scores = self._embeddings @ self._embeddings[place]
        scores[place] = -np.inf
        if self._live:
            scores[self._horizon(place) :] = -np.inf
        nearest = np.argsort(-scores, kind="stable")[:count]
        return [self._item(int(i)) for i in nearest if np.isfinite(scores[i])]

    def _horizon(self, place: int) -> int:
        """How many facts there were when the one at ``place`` was encoded the last time."""
        then = place + 1
        for now in range(place + 2, len(self._facts) + 1):
            if self._growth and then <= now / self._growth:
                then = now
        return then

    def preceding(self, fact: Any, count: int) -> list[WindowItem]:
        place = self._place[fact.id]
        return [self._item(i) for i in range(place - 1, max(-1, place - 1 - count), -1)]

    def _item(self, place: int) -> WindowItem:
        return WindowItem(self._facts[place].id, self._facts[place].line)


class FidelityCheck:
    """Encodes a dataset's facts in each way, then asks its questions in each mode."""

    def __init__(
        self,
        engine: InProcessEngine,
        dataset: Dataset,
        config: CoreConfig,
        k: int,
        live: bool,
        progress: Progress,
    ) -> None:
        self.engine = engine
        self.config = config
        self.k = k
        self.progress = progress
        self.template = PromptTemplate(engine.tokenizer, config)
        self.embedder = Embedder(config.embedder)
        self.facts = self._store(dataset.facts)
        self.source = StoredFacts(self.facts, live, config.window.growth)
        self.by_id = {fact.id: fact for fact in self.facts}
        self.shuffler = random.Random(0)

    def _store(self, facts: Sequence[Fact]) -> list[StoredFact]:
        embeddings = np.asarray(self.embedder.embed([fact.text for fact in facts]))
        stored: dict[str, StoredFact] = {}
        for fact, embedding in zip(facts, embeddings, strict=True):
            line = render_line(self.config, fact.text, fact.date)
            ids = tuple(self.template.line_ids(line))
            stored.setdefault(line, StoredFact(fact, line, segment_key(line), ids, embedding))
        return list(stored.values())

    def retrieve(self, question: Question) -> list[StoredFact]:
        """The k facts nearest to the question, best last."""
        query = np.asarray(self.embedder.embed([question.text]))[0]
        scores = np.stack([fact.embedding for fact in self.facts]) @ query
        best = np.argsort(-scores, kind="stable")[: self.k]
        return [self.facts[int(i)] for i in best[::-1]]

    def encode(self, encoding: Encoding, facts: Sequence[StoredFact]) -> int:
        """Put the facts' KV in the arena; returns the prompt tokens that it took."""
        requests = [self._plan(encoding, fact) for fact in facts]
        tokens = 0
        for start in range(0, len(requests), BATCH):
            tokens += self.engine.capture(encoding.namespace, requests[start : start + BATCH])
            done = min(start + BATCH, len(requests))
            self.progress(f"encoding facts, {encoding.name}", done, len(requests))
        return tokens

    def _plan(self, encoding: Encoding, fact: StoredFact) -> tuple[list[int], list[Span]]:
        builder = window_builder(encoding.window)
        window = within_budget(
            builder.window(fact, self.source),
            lambda line: len(self.template.line_ids(line)),
            encoding.window.max_tokens,
        )
        request = plan_encoding(
            self.template.header_ids(),
            [(self._key(item), self.template.line_ids(item.line)) for item in window],
            [(fact.key, fact.ids)],
            max_tokens=self.engine.max_model_len - 2,
            anchor=encoding.anchor,
        )
        return request.prompt_token_ids, request.spans

    def _key(self, item: WindowItem) -> str | None:
        return None if item.fact_id is None else self.by_id[item.fact_id].key

    def ask(self, question: Question, modes: Sequence[Encoding]) -> dict[str, Any]:
        """One question in every mode: KL per answer position, and whether the top token agrees."""
        facts = self.retrieve(question)
        messages = [{"role": "user", "content": question.text}]
        ids = self.template.compose(messages, [fact.line for fact in facts]).ids
        answer, text = self.engine.answer(ids, ANSWER_TOKENS)
        reference, _ = self.engine.distributions(ids, answer)
        measured: dict[str, Any] = {}
        for mode in modes:
            params, salt = inject_params(mode.namespace, [(mode.namespace, 0)], mode.tail)
            other, reports = self.engine.distributions(ids, answer, params, salt)
            share = _injected_share(reports[0], facts, mode.tail)
            if share < LEAST_INJECTED:
                raise BenchError(
                    f"only {share:.0%} of the facts' tokens came from injected KV in mode "
                    f"{mode.name!r} for {question.text!r}: {reports[0]}"
                )
            measured[mode.name] = _compare(reference, other) | {"injected_share": share}
        shuffled = list(facts)
        self.shuffler.shuffle(shuffled)
        other_ids = self.template.compose(messages, [fact.line for fact in shuffled]).ids
        measured["shuffle"] = _compare(reference, self.engine.distributions(other_ids, answer)[0])
        return {
            "question": question.text,
            "gold": question.answer,
            "answer": text,
            "prompt_tokens": len(ids),
            "memory_tokens": sum(len(fact.ids) for fact in facts),
            "modes": measured,
        }

    def meet_header(self, mode: Encoding, question: Question) -> None:
        """Let the connector see the header once in this namespace, where no anchor brought it."""
        lines = [fact.line for fact in self.facts[:1]]
        ids = self.template.compose([{"role": "user", "content": question.text}], lines).ids
        params, salt = inject_params(mode.namespace, [(mode.namespace, 0)])
        self.engine.distributions(ids, [ids[-1]] * 2, params, salt)
        self.engine.forget_prefixes()


def run(
    engine: InProcessEngine,
    dataset: Dataset,
    config: CoreConfig,
    k: int,
    live: bool,
    progress: Progress,
) -> dict[str, Any]:
    """The whole check; returns ``summary``, ``encoding_tokens`` and the raw ``questions``."""
    check = FidelityCheck(engine, dataset, config, k, live, progress)
    modes = encodings(config)
    needed = {fact.key for q in dataset.questions for fact in check.retrieve(q)}
    facts = [fact for fact in check.facts if fact.key in needed]
    tokens = {}
    for mode in modes:
        tokens[mode.name] = check.encode(mode, facts)
        check.meet_header(mode, dataset.questions[0])
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


def _compare(reference: NDArray[np.float32], other: NDArray[np.float32]) -> dict[str, list[Any]]:
    """Both ``[positions, vocab_size]``."""
    pairs = list(zip(reference, other, strict=True))
    return {
        "kl": [kl_divergence(p, q) for p, q in pairs],
        "agree": [bool(p.argmax() == q.argmax()) for p, q in pairs],
    }


def _injected_share(report: dict[str, Any], facts: Sequence[StoredFact], tail: int) -> float:
    """Injected tokens over the tokens of the facts that are not left to prefill on purpose."""
    expected = sum(len(fact.ids) for fact in facts[: len(facts) - tail])
    return float(report.get("injected_tokens") or 0) / max(1, expected)
