"""Medians, quartiles and ratios of pairs."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np


class Spread(TypedDict):
    """Median and quartiles of ``n`` samples, in the samples' unit."""

    median: float
    q1: float
    q3: float
    n: int


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples to summarise")
    q1, median, q3 = (float(x) for x in np.percentile(np.asarray(samples), [25, 50, 75]))
    return {"median": median, "q1": q1, "q3": q3, "n": len(samples)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of ``numerators[i] / denominators[i]``: what slowed both of a pair cancels."""
    return spread([n / d for n, d in zip(numerators, denominators, strict=True)])


def scaled(factor: float, samples: Sequence[float]) -> Spread:
    """Spread of ``factor / samples[i]``, such as bytes over times."""
    return spread([factor / sample for sample in samples])
