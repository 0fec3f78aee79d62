"""Prompts of token ids: a header, lines and a question."""

import random
from dataclasses import dataclass, field

from inferscale_core.connector.protocol import Span
from tiny_models import VOCAB


@dataclass
class Prompt:
    """Random token ids in the shape of a prompt with facts."""

    seed: int = 0
    num_lines: int = 12
    header: list[int] = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)
    question: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)

        def ids(count: int) -> list[int]:
            return [draw.randrange(3, VOCAB) for _ in range(count)]

        self.header = [1, *ids(11)]
        self.lines = [ids(draw.randrange(5, 30)) for _ in range(self.num_lines)]
        self.question = ids(9)

    def ids(self, order: list[int] | None = None) -> list[int]:
        chosen = self.lines if order is None else [self.lines[i] for i in order]
        return self.header + [t for line in chosen for t in line] + self.question

    def memory_tokens(self) -> int:
        return len(self.header) + sum(len(line) for line in self.lines)

    def spans(self) -> list[Span]:
        spans = [Span("header", "header", 0, len(self.header))]
        position = len(self.header)
        for i, line in enumerate(self.lines):
            behind = tuple(f"line{j}" for j in range(i))
            spans.append(Span(f"line{i}", "line", position, position + len(line), behind))
            position += len(line)
        return spans
