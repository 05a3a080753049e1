"""[pure] Quantiles and their uncertainty.

Turns of one conversation are no independent measurements: they share a history, and a machine that
was slow for a while was slow for all of them. So the bootstrap draws whole conversations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor

RESAMPLES = 1000
"""Enough for a 95 % interval to two digits; more only costs time."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval. ``count``: values behind it; ``clusters``: conversations."""

    value: float
    low: float
    high: float
    count: int
    clusters: int


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, linear between two. Not of nothing."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    place = share * (len(ordered) - 1)
    low, high = floor(place), ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def bootstrap(
    clusters: Mapping[Hashable, Sequence[float]],
    figure: Callable[[Sequence[float]], float],
    *,
    seed: int = 1,
    resamples: int = RESAMPLES,
) -> Estimate:
    """``figure`` of all values, with a percentile interval over resampled clusters.

    With one cluster nothing can be said about others: the interval is then the whole line, as
    infinities, and a report must show it as unknown. Raises ``ValueError`` without any value.
    """
    groups = [list(values) for values in clusters.values() if values]
    everything = [value for group in groups for value in group]
    if not everything:
        raise ValueError("no values")
    point = figure(everything)
    if len(groups) < 2:
        return Estimate(point, float("-inf"), float("inf"), len(everything), len(groups))
    dice = random.Random(seed)
    found = []
    for _ in range(resamples):
        drawn = dice.choices(groups, k=len(groups))
        found.append(figure([value for group in drawn for value in group]))
    return Estimate(
        point, quantile(found, 0.025), quantile(found, 0.975), len(everything), len(groups)
    )
