"""Scores of answers; the expected values are worked out by hand."""

import numpy as np
import pytest

from inferscale_core.bench.scoring import contains, locomo_f1, mean_ci95, token_f1, words


def test_words_are_normalised() -> None:
    assert words("The cat, and a dog's TAIL!") == ["cat", "dogs", "tail"]
    assert words("  An apple ") == ["apple"]


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("She was running in Lisbon", "ran to Lisbon", 2 * (1 / 5) * (1 / 3) / (1 / 5 + 1 / 3)),
        ("the clarinets", "a clarinet", 1.0),
        ("yes yes", "yes", 2 * 0.5 * 1 / 1.5),
        ("", "gold", 0.0),
        ("the", "gold", 0.0),
        ("7 May 2023", "May 7, 2023", 1.0),
    ],
)
def test_token_f1(answer: str, gold: str, expected: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(expected)


def test_f1_by_category() -> None:
    assert locomo_f1("hiking, pottery", "pottery, camping", 1) == pytest.approx(0.5)
    assert locomo_f1("pottery", "pottery, camping", 4) == pytest.approx(2 / 3)
    assert locomo_f1("likely yes", "Likely yes; since she paints", 3) == 1.0
    assert locomo_f1("a", ",", 1) == 0.0


def test_contains() -> None:
    assert contains("It was in Lisbon, Portugal, I think", "Lisbon Portugal") == 1
    assert contains("Portugal and Lisbon", "Lisbon Portugal") == 0
    assert contains("anything", "the") == 0


def test_bootstrap_interval() -> None:
    same = mean_ci95([0.25] * 7)
    assert same == {"mean": 0.25, "ci95": [0.25, 0.25]}
    samples = np.random.default_rng(1).normal(1.0, 1.0, 400)
    found = mean_ci95(list(samples))
    low, high = found["ci95"]
    half = 1.96 * samples.std() / 20
    assert found["mean"] == pytest.approx(samples.mean())
    assert (low, high) == pytest.approx((samples.mean() - half, samples.mean() + half), abs=0.02)
    with pytest.raises(ValueError, match="no samples"):
        mean_ci95([])
