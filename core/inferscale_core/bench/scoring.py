"""Scores of an answer that need no judge, as LoCoMo (Maharana et al., arXiv:2402.17753) has them.

Categories: 1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop, 5 adversarial (not scored).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}

_ARTICLES = re.compile(r"\b(a|an|the|and)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return str(_stemmer().stem(word))


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    from nltk.stem import PorterStemmer

    return PorterStemmer()


def words(text: str) -> list[str]:
    """LoCoMo's normalised words: no commas, articles or punctuation, lower case."""
    text = text.replace(",", "").lower().translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", text).split()


def token_f1(answer: str, gold: str) -> float:
    """F1 of the multisets of stemmed words, 0 to 1."""
    given, wanted = ([_stem(w) for w in words(text)] for text in (answer, gold))
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def locomo_f1(answer: str, gold: str, category: int | None) -> float:
    """LoCoMo's F1 by category, 0 to 1.

    Multi-hop answers are lists: each part of the gold at a comma counts with its best match among
    the answer's parts. Open-domain golds end at the first semicolon.
    """
    if category == 3:
        gold = gold.split(";")[0]
    if category != 1:
        return token_f1(answer, gold)
    parts = [part for part in gold.split(",") if part.strip()] or [gold]
    given = [part for part in answer.split(",") if part.strip()] or [answer]
    return float(np.mean([max(token_f1(a, part) for a in given) for part in parts]))


def contains(answer: str, gold: str) -> float:
    """1 when the gold's words stand in the answer one after another, stemmed; else 0."""
    given, wanted = ([_stem(w) for w in words(text)] for text in (answer, gold))
    if not wanted:
        return 0.0
    places = range(len(given) - len(wanted) + 1)
    return float(any(given[i : i + len(wanted)] == wanted for i in places))


def mean_ci95(values: Sequence[float]) -> dict[str, float | list[float]]:
    """Mean with its 95 % percentile bootstrap interval (10,000 resamples, fixed seed).

    Give paired differences for a paired interval.
    """
    samples = np.asarray(values, dtype=np.float64)
    if samples.size == 0:
        raise ValueError("no samples to summarise")
    draws = np.random.default_rng(0).integers(0, samples.size, (10_000, samples.size))
    low, high = np.percentile(samples[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(samples.mean()), "ci95": [float(low), float(high)]}
