import math

import numpy as np
import pytest

from inferscale_core.bench.statistics import kl_divergence, paired_ratios, spread


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def test_spread_of_odd_and_single_samples() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "n": 3}
    assert spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "n": 1}


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_paired_ratios_cancel_what_both_saw() -> None:
    noise = [1.0, 5.0, 0.3]
    ratios = paired_ratios([4 * n for n in noise], [2 * n for n in noise])
    assert ratios["q1"] == pytest.approx(2.0)
    assert ratios["q3"] == pytest.approx(2.0)


def test_paired_ratios_need_pairs() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_ratios([1.0, 2.0], [1.0])


def test_kl_of_a_distribution_to_itself_is_zero() -> None:
    p = log_softmax(np.random.default_rng(0).normal(size=49152) * 3)
    assert kl_divergence(p, p) == pytest.approx(0, abs=1e-9)


def test_kl_of_known_distributions() -> None:
    p = np.log(np.array([0.75, 0.25], dtype=np.float32))
    q = np.log(np.array([0.5, 0.5], dtype=np.float32))
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl_divergence(p, q) == pytest.approx(expected, abs=1e-6)
    assert kl_divergence(p, q) != pytest.approx(kl_divergence(q, p), abs=1e-4)


def test_kl_ignores_what_the_reference_rules_out() -> None:
    with np.errstate(divide="ignore"):
        p = np.log(np.array([1.0, 0.0], dtype=np.float32))
        q = np.log(np.array([0.5, 0.5], dtype=np.float32))
    assert kl_divergence(p, q) == pytest.approx(math.log(2))
    assert kl_divergence(q, p) == math.inf


def test_kl_does_not_depend_on_normalisation() -> None:
    rng = np.random.default_rng(1)
    p, q = log_softmax(rng.normal(size=100)), log_softmax(rng.normal(size=100))
    shifted = kl_divergence(p + np.float32(3), q - np.float32(2))
    assert shifted == pytest.approx(kl_divergence(p, q), abs=1e-5)


def test_kl_is_never_noticeably_negative() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        p = log_softmax(rng.normal(size=5000) * 4)
        q = (p + rng.normal(size=5000) * 1e-4).astype(np.float32)
        assert kl_divergence(p, q) > -1e-9


def test_kl_of_different_vocabularies_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        kl_divergence(np.zeros(3, dtype=np.float32), np.zeros(4, dtype=np.float32))
