"""Figures and their intervals."""

from __future__ import annotations

import random

import pytest

from kvloop.bench.stats import bootstrap, mean, median, quantile


def test_quantiles_are_linear_between_values() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.95) == pytest.approx(9.5)
    assert quantile([7], 0.99) == 7


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Clusters with a common offset: resampling single values would cover far too seldom."""
    dice = random.Random(3)
    held = 0
    for trial in range(40):
        clusters = {}
        for name in range(16):
            offset = dice.gauss(0, 5)
            clusters[name] = [10 + offset + dice.gauss(0, 0.1) for _ in range(6)]
        estimate = bootstrap(clusters, mean, seed=trial, resamples=100)
        held += estimate.low <= 10 <= estimate.high
    assert held >= 33


def test_one_conversation_says_nothing_about_others() -> None:
    estimate = bootstrap({"only": [1.0, 2.0, 3.0]}, median)
    assert estimate.value == 2
    assert (estimate.low, estimate.high) == (float("-inf"), float("inf"))


def test_no_value_has_no_figure() -> None:
    with pytest.raises(ValueError, match="no values"):
        bootstrap({"empty": []}, median)
