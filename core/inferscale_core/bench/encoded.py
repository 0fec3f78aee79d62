"""A benchmark's facts, encoded in one way or another in an engine of this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_core.bench.dataset import Dataset, Fact
from inferscale_core.bench.inprocess import BATCH, Continue, InProcessEngine
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


class EncodedFacts:
    """A dataset's facts on an engine, encoded in any number of ways.

    ``live``: each fact behind those stored before it, or behind any of them.
    """

    def __init__(
        self,
        engine: InProcessEngine,
        dataset: Dataset,
        config: CoreConfig,
        live: bool,
        progress: Progress,
    ) -> None:
        self.engine = engine
        self.config = config
        self.progress = progress
        self.template = PromptTemplate(engine.tokenizer, config)
        self.embedder = Embedder(config.embedder)
        self.facts = self._store(dataset.facts)
        self.source = StoredFacts(self.facts, live, config.window.growth)
        self.by_id = {fact.id: fact for fact in self.facts}

    def _store(self, facts: Sequence[Fact]) -> list[StoredFact]:
        embeddings = np.asarray(self.embedder.embed([fact.text for fact in facts]))
        stored: dict[str, StoredFact] = {}
        for fact, embedding in zip(facts, embeddings, strict=True):
            line = render_line(self.config, fact.text, fact.date)
            ids = tuple(self.template.line_ids(line))
            stored.setdefault(line, StoredFact(fact, line, segment_key(line), ids, embedding))
        return list(stored.values())

    def retrieve(self, question: str, k: int) -> list[StoredFact]:
        """The k facts nearest to a question, best last."""
        query = np.asarray(self.embedder.embed([question]))[0]
        scores = np.stack([fact.embedding for fact in self.facts]) @ query
        best = np.argsort(-scores, kind="stable")[:k]
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

    def meet_header(self, encoding: Encoding, question: str, fact: StoredFact) -> None:
        """Let the connector see the header once in this namespace, where no anchor brought it.

        It learns one only in front of a ``fact`` that is encoded.
        """
        messages = [{"role": "user", "content": question}]
        ids = self.template.compose(messages, [fact.line]).ids
        params, salt = inject_params(encoding.namespace, [(encoding.namespace, 0)])
        # The worker has it in the step behind the prompt's.
        self.engine.continue_all([Continue(ids, 0, (ids[-1],) * 2, params, salt)])
        self.engine.forget_prefixes()
