"""Answers to LoCoMo's questions over k, in several modes: ``inferscale bench locomo``.

For each question the k nearest facts make one prompt, best fact last, and every mode (``modes.py``)
answers it greedily. Scored without a judge, means over questions:

- ``f1``, ``contains``: of the answer (``scoring.py``);
- ``nll``: negative log-likelihood of the gold answer, nats a token, given token by token;
- ``kl``, ``agree``: of the next-token distributions along prompt text's answer, to prompt text's:
  KL divergence in nats, and the share of positions with the same most likely token.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from inferscale_core.bench.dataset import Dataset, Question
from inferscale_core.bench.encoded import EncodedFacts, Encoding, Progress, StoredFact
from inferscale_core.bench.errors import BenchError
from inferscale_core.bench.inprocess import Continuation, Continue, InProcessEngine
from inferscale_core.bench.modes import PLAIN, encoding_of
from inferscale_core.bench.scoring import contains, locomo_f1, mean_ci95
from inferscale_core.bench.statistics import kl_divergence
from inferscale_core.config import CoreConfig
from inferscale_core.connector.protocol import inject_params

METRICS = ("f1", "contains", "nll", "kl", "agree")
ANSWER_TOKENS = 24
LEAST_INJECTED = 0.8
COMPARED_TOKENS = 12
"""Positions of prompt text's answer at which distributions are compared."""

Row = dict[str, Any]


class Rows:
    """Results of an unfinished run, one JSON object a line, the settings in the first.

    Raises BenchError when the file was made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.rows: list[Row] = []
        written = json.loads(json.dumps(settings))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(json.dumps(written) + "\n", encoding="utf-8")
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # an interruption cut the last line short
                path.write_text(whole, encoding="utf-8")
            first, *rest = whole.splitlines()
            found = json.loads(first)
            self.rows = [json.loads(line) for line in rest]
        except (OSError, ValueError) as error:
            raise BenchError(f"cannot go on with {path}: {error}") from error
        if found != written:
            changed = [name for name in written if found.get(name) != written[name]]
            raise BenchError(
                f"{path} holds results of other settings ({', '.join(changed)}); remove it, or "
                "name another --rows file"
            )
        self.done = {(row["conv"], row["question"], row["k"]) for row in self.rows}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise BenchError(f"cannot write {self._path}: {error}") from error


class Asker:
    """Asks one conversation's questions in every mode."""

    def __init__(
        self, facts: EncodedFacts, modes: Sequence[str], config: CoreConfig, instruction: str
    ) -> None:
        self._facts = facts
        self._modes = modes
        self._instruction = instruction
        self._shuffler = random.Random(0)
        self.encodings = {m: encoding_of(m, config) for m in modes if m not in PLAIN}
        self._turns: list[list[str]] = []
        seen: Counter[str] = Counter()
        for mode in modes:
            name = self.encodings[mode].name if mode in self.encodings else mode
            if seen[name] == len(self._turns):
                self._turns.append([])
            self._turns[seen[name]].append(mode)
            seen[name] += 1

    def encode(self, questions: Sequence[Question], k: int) -> None:
        """Put the KV of every fact that some question finds in the arena, in every encoding."""
        needed = {fact.key for q in questions for fact in self._facts.retrieve(q.text, k)}
        facts = [fact for fact in self._facts.facts if fact.key in needed]
        for encoding in {e.name: e for e in self.encodings.values()}.values():
            self._facts.encode(encoding, facts)
            self._facts.meet_header(encoding, questions[0].text, facts[0])

    def ask(self, question: Question, k: int) -> dict[str, Row]:
        """Every mode's scores."""
        facts = self._facts.retrieve(question.text, k)
        prompts = {mode: self._prompt(mode, question, facts) for mode in self._modes}
        length = {mode: {"max_tokens": ANSWER_TOKENS} for mode in prompts}
        answers = self._continue(prompts, length)
        reference = answers["text"].ids[:COMPARED_TOKENS]
        along = self._continue(prompts, {mode: {"forced": reference} for mode in prompts})
        gold = {mode: {"forced": self._gold(prompts[mode].ids, question)} for mode in prompts}
        likely = self._continue(prompts, gold)
        return {
            mode: self._score(question, answers[mode], along["text"], along[mode], likely[mode])
            | {"injected_share": self._share(mode, answers[mode], facts)}
            for mode in prompts
        }

    def _prompt(self, mode: str, question: Question, facts: Sequence[StoredFact]) -> Continue:
        text = f"{question.text} {self._instruction}".strip()
        messages = [{"role": "user", "content": text}]
        lines = [] if mode == "none" else [fact.line for fact in facts]
        if mode == "shuffle":
            self._shuffler.shuffle(lines)
        ids = self._facts.template.compose(messages, lines).ids
        encoding = self.encodings.get(mode)
        if encoding is None:
            return Continue(ids)
        namespace = encoding.namespace
        params, salt = inject_params(namespace, [(namespace, 0)], encoding.tail)
        return Continue(ids, params=params, salt=salt)

    def _continue(
        self, prompts: Mapping[str, Continue], options: Mapping[str, dict[str, Any]]
    ) -> dict[str, Continuation]:
        """Modes that share KV share prefix-cached blocks too, so they take turns."""
        found: dict[str, Continuation] = {}
        for turn in self._turns:
            requests = [
                replace(prompts[mode], distributions="forced" in options[mode], **options[mode])
                for mode in turn
            ]
            found |= zip(turn, self._facts.engine.continue_all(requests), strict=True)
            self._facts.engine.forget_prefixes()
        return found

    def _gold(self, ids: list[int], question: Question) -> tuple[int, ...]:
        tokenizer = self._facts.engine.tokenizer
        # A plain layout ends in "Assistant:", a chat template in a newline or a special token.
        space = " " if tokenizer.decode(ids[-1:]).endswith(":") else ""
        return tuple(tokenizer.encode(space + str(question.answer), add_special_tokens=False))

    def _score(
        self,
        question: Question,
        answer: Continuation,
        reference: Continuation,
        along: Continuation,
        likely: Continuation,
    ) -> Row:
        gold = str(question.answer)
        pairs = list(zip(reference.distributions(), along.distributions(), strict=True))
        of_gold = likely.distributions()[np.arange(len(likely.ids)), list(likely.ids)]
        text = answer.text.strip()
        return {
            "answer": text,
            "f1": locomo_f1(text, gold, question.category),
            "contains": contains(text, gold),
            "nll": float(-of_gold.mean()),
            "kl": float(np.mean([kl_divergence(p, q) for p, q in pairs])),
            "agree": float(np.mean([p.argmax() == q.argmax() for p, q in pairs])),
        }

    def _share(self, mode: str, answer: Continuation, facts: Sequence[StoredFact]) -> float | None:
        encoding = self.encodings.get(mode)
        if encoding is None:
            return None
        injected = facts[: len(facts) - encoding.tail]
        expected = sum(len(fact.ids) for fact in injected)
        return float(answer.report.get("injected_tokens") or 0) / max(1, expected)


def run(
    engine: InProcessEngine,
    datasets: Sequence[Dataset],
    config: CoreConfig,
    modes: Sequence[str],
    ks: Sequence[int],
    instruction: str,
    rows: Rows,
    progress: Progress,
) -> None:
    """Ask what ``rows`` does not hold yet. Conversations follow each other, so that only one's KV
    is needed at a time."""
    total = sum(len(data.questions) for data in datasets) * len(ks)
    done = len(rows.rows)
    for data in datasets:
        left = [
            (q, k) for q in data.questions for k in ks if (data.name, q.text, k) not in rows.done
        ]
        if not left:
            continue
        asker = Asker(
            EncodedFacts(engine, data, config, True, progress), modes, config, instruction
        )
        asker.encode([q for q, _ in left], max(ks))
        for question, k in left:
            found = asker.ask(question, k)
            rows.add(
                {
                    "conv": data.name, "question": question.text, "k": k,
                    "category": question.category, "gold": question.answer, "modes": found,
                }
            )  # fmt: skip
            done += 1
            progress("asking questions", done, total)


def limited(datasets: Sequence[Dataset], limit: int | None) -> list[Dataset]:
    """At most ``limit`` questions with an answer in all, taken from the conversations in turn."""
    kept: dict[str, list[Question]] = {data.name: [] for data in datasets}
    for name, question in _in_turn(datasets):
        if limit is None or sum(map(len, kept.values())) < limit:
            kept[name].append(question)
    return [
        Dataset(data.name, data.facts, tuple(kept[data.name]), data.source)
        for data in datasets
        if kept[data.name]
    ]


def _in_turn(datasets: Sequence[Dataset]) -> Iterator[tuple[str, Question]]:
    for place in range(max(len(data.questions) for data in datasets)):
        for data in datasets:
            if place < len(data.questions) and data.questions[place].answer:
                yield data.name, data.questions[place]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """``[mode][k][metric]`` means with 95 % intervals; ``*_to_text`` are paired differences."""
    summary: dict[str, Any] = {}
    for mode in rows[0]["modes"]:
        summary[mode] = {}
        for k in sorted({row["k"] for row in rows}):
            of_k = [row["modes"] for row in rows if row["k"] == k]
            cell: dict[str, Any] = {"questions": len(of_k)}
            for metric in METRICS:
                cell[metric] = mean_ci95([modes[mode][metric] for modes in of_k])
                if metric in ("f1", "contains", "nll"):
                    cell[f"{metric}_to_text"] = mean_ci95(
                        [modes[mode][metric] - modes["text"][metric] for modes in of_k]
                    )
            summary[mode][str(k)] = cell
    return summary


def least_injected(rows: Sequence[Row], encodings: Mapping[str, Encoding]) -> dict[str, float]:
    """The smallest share of the facts' tokens that came from injected KV, by mode."""
    return {
        mode: min(float(row["modes"][mode]["injected_share"]) for row in rows) for mode in encodings
    }
