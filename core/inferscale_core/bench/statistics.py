"""Medians, quartiles, paired ratios, and the divergence of next-token distributions."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray


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


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of ``numerators[i] / denominators[i]``: noise that both of a pair saw cancels."""
    pairs = zip(numerators, denominators, strict=True)
    return spread([numerator / denominator for numerator, denominator in pairs])


def kl_divergence(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """KL(reference || other) in nats of two next-token distributions.

    Both are log probabilities over the whole vocabulary, ``[vocab_size]``; they are normalised
    again in float64, so that rounding in the engine cannot make the result negative by much.
    A token that the reference rules out (``-inf``) adds nothing.
    """
    if reference.shape != other.shape or reference.ndim != 1:
        raise ValueError(f"expected two [vocab_size] arrays, got {reference.shape}, {other.shape}")
    p = _normalised(reference)
    q = _normalised(other)
    possible = np.isfinite(p)
    return float(np.sum(np.exp(p[possible]) * (p[possible] - q[possible])))


def _normalised(logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logprobs.astype(np.float64)
    peak = wide.max()
    return np.asarray(wide - (peak + np.log(np.sum(np.exp(wide - peak)))))
