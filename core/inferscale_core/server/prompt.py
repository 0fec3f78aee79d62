"""The prompt of a question: which facts it holds, in which order, and what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inferscale_core.client.models import ChatMemory, FactReport, Memory, MemoryReport
from inferscale_core.encoding.template import ComposedPrompt, PromptTemplate
from inferscale_core.facts.records import segment_key
from inferscale_core.server.engine import Segment

DOES_NOT_FIT = "does not fit"
NO_FACTS = "no facts were found, or asked for"

_NOT_READY = {
    "pending": "its KV is not computed yet",
    "stale": "its KV is being computed again, after a fact before it changed",
    "failed": "its KV could not be computed",
    "none": "it is stored without KV",
}


@dataclass
class Question:
    """A composed question. ``facts`` are in prompt order, ``dropped`` did not fit."""

    memory: ChatMemory
    tail: int
    prompt: ComposedPrompt | None = None
    facts: list[Memory] = field(default_factory=list)
    dropped: list[tuple[Memory, int]] = field(default_factory=list)

    @property
    def injects(self) -> bool:
        return self.memory.mode == "inject"

    @property
    def names_none(self) -> bool:
        """Whether it asks for facts, or explicitly for none, and there are none."""
        memory = self.memory
        asks = memory.fact_ids is not None or memory.query is not None or memory.k is not None
        return asks and not self.facts and not self.dropped

    @property
    def ready(self) -> int:
        """Facts with KV, which stand before those without."""
        return sum(memory.kv_state == "ready" for memory in self.facts)


def ready_first(ranked: Sequence[Memory]) -> list[Memory]:
    """Prompt order of facts that are ranked best last: those without KV stand behind the others,
    where they end no cover."""
    return sorted(ranked, key=lambda memory: memory.kv_state != "ready")


def lay_out(
    template: PromptTemplate, text: str, ranked: Sequence[Memory], limit: int, **options: Any
) -> tuple[ComposedPrompt, list[Memory], list[tuple[Memory, int]]]:
    """Compose the prompt of a rendered ``text`` with as many facts as fit in ``limit`` tokens.

    ``ranked`` is best last: the first ones give way. Returns the prompt, its facts in prompt
    order, and those left out with their tokens.
    """
    sizes = [len(template.line_ids(memory.line)) for memory in ranked]
    around = len(template.split(text, [], **options).ids)
    excess = around + sum(sizes) - limit
    first = 0
    while first < len(ranked) and excess > 0:
        excess -= sizes[first]
        first += 1
    facts = ready_first(ranked[first:])
    prompt = template.split(text, [memory.line for memory in facts], **options)
    return prompt, facts, list(zip(ranked[:first], sizes[:first], strict=True))


def report(
    question: Question, engine: dict[str, Any] | None, prompt_tokens: int, cached: int
) -> MemoryReport:
    """What the answer says about its memories.

    ``engine`` is the connector's report of an injected question, None when there is none;
    ``cached`` counts the prompt tokens that vLLM took from its prefix cache, for mode ``text``.
    """
    reason: str | None
    injected = 0
    times: dict[str, Any] = {}
    if not question.injects:
        reason = "mode is text"
    elif engine is None:
        reason = "the engine gave no report"
    else:
        reason = NO_FACTS if question.names_none else engine.get("reason")
        injected = int(engine.get("injected_tokens") or 0)
        cached = int(engine.get("cached_tokens") or 0)
        prompt_tokens = int(engine.get("prompt_tokens") or prompt_tokens)
        times = {name: engine.get(name) for name in ("match_ms", "write_ms", "bytes")}
    ranges = question.prompt.lines if question.prompt is not None else []
    facts = [
        FactReport(
            id=memory.id, text=memory.text, tokens=tokens, injected=False, reason=DOES_NOT_FIT
        )
        for memory, tokens in question.dropped
    ]
    tail_from = question.ready - question.tail
    for place, (memory, (start, end)) in enumerate(zip(question.facts, ranges, strict=True)):
        inside = end <= cached + injected and injected > 0
        entry = FactReport(id=memory.id, text=memory.text, tokens=end - start, injected=False)
        if not question.injects:
            entry.reason = reason
        elif end <= cached:
            entry.reason = "in vLLM's prefix cache"
        elif inside:
            entry.injected = True
        elif memory.kv_state != "ready":
            entry.reason = _NOT_READY[memory.kv_state]
            if memory.kv_reason:
                entry.reason += f" ({memory.kv_reason})"
        elif question.tail and place >= tail_from:
            entry.reason = "in the tail, which is prefilled"
        else:
            entry.reason = reason or "it stands behind a part of the prompt that has no KV"
        facts.append(entry)
    return MemoryReport(
        prompt_tokens=prompt_tokens,
        memory_tokens=sum(end - start for start, end in ranges),
        injected_tokens=injected,
        cached_tokens=cached,
        prefilled_tokens=max(0, prompt_tokens - cached - injected),
        reason=reason,
        facts=facts,
        **times,
    )


def missing_segments(question: Question, engine: dict[str, Any]) -> list[Segment]:
    """The line that ended the cover although the store takes it for resident, if there is one."""
    matched = int(engine.get("matched_tokens") or 0)
    if question.prompt is None or not matched:
        return []
    for place, (start, _) in enumerate(question.prompt.lines):
        if start == matched:
            # The connector cuts the tail off what it found, wherever that ends.
            place += question.tail
            if place < question.ready:
                memory = question.facts[place]
                return [(memory.scope.key, segment_key(memory.line))]
    return []
