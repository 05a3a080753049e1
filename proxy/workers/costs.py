"""[pure] How long a leg on a worker takes, learnt from the legs that were performed.

A leg's time is taken as a sum of non-negative parts: a constant, one for each token to compute,
one for each token and each token before it (attention), one for a transfer as such, and one for
each token moved by it. The factors are fitted online, newer legs counting more. Nothing is
predicted from legs of another kind, from far outside what was seen, or from what was seen long
ago: then the answer is None, and the planner keeps to its fixed rules.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.95
"""Weight of the past when a new leg arrives: some 20 legs count."""
_ENOUGH = 5
"""Legs of a kind before it is predicted; fewer, and one stall decides."""
_FRESH_SECONDS = 300.0
"""How long a kind stays known without a new leg. A route that looked dear once is tried again by
the fixed rules, or one bad moment would end it for good."""
_REACH = 4
"""How many times the largest amount seen may be asked about."""
_SURPRISE = 4.0
"""A leg that took more than so many times the expected counts as if it had taken just that: one
stall must not bend the fit, and a lasting change still gets through in a few legs."""
_FLOOR_SECONDS = 0.02
"""A leg counts less the longer it took, down to this: a long leg's error is larger too."""
_BESIDE_OTHERS = 0.3
"""Weight of a leg that had other work before it: its wait is only estimated."""
_MANY = 20
"""Legs of a kind from which on they may be thinned out,"""
_APART_SECONDS = 0.02
"""to one in this time: with hundreds a second the twenty that count would span a moment."""
_REFIT_SECONDS = 0.1
"""Between two fits of what is well known. A fit costs more than the rest of a turn's accounting."""
_SWEEPS = 60
_STILL = 1e-4
"""Relative change of every factor at which a fit has come to rest."""
_SIZE = 5


@dataclass(frozen=True, slots=True)
class Work:
    """What a leg has a worker do, in tokens.

    ``computed`` follow ``context`` tokens that are there already; ``moved`` are read from another
    worker first; ``ahead`` is what the worker had been given before and not finished.
    """

    computed: int
    context: int = 0
    moved: int = 0
    ahead: int = 0


class LegCosts:
    """The factors of one worker's legs (or of a role's, for workers that are still unknown)."""

    __slots__ = (
        "_factors", "_fitted", "_latest", "_most_computed", "_most_moved", "_products", "_seen",
        "_targets", "_unfitted", "error",
    )  # fmt: skip

    def __init__(self) -> None:
        self._products = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._targets = [0.0] * _SIZE
        self._factors = [0.0] * _SIZE
        self._seen = {False: 0, True: 0}
        self._latest = {False: 0.0, True: 0.0}
        self._fitted = float("-inf")
        self._unfitted = False
        self._most_computed = 0
        self._most_moved = 0
        self.error = 0.0
        """Mean of |taken - expected| / expected over the last legs that were expected."""

    def observe(self, work: Work, seconds: float, now: float) -> None:
        """A leg did ``work`` in ``seconds``; ``now``: any clock that does not go back."""
        moves = work.moved > 0
        if self._seen[moves] >= _MANY and now - self._latest[moves] < _APART_SECONDS:
            self._reached(work)
            return
        expected = self.expect(work, now)
        if expected:
            self.error += 0.1 * (abs(seconds - expected) / expected - self.error)
            seconds = min(seconds, expected * _SURPRISE)
        weight = (_BESIDE_OTHERS if work.ahead else 1.0) / max(seconds, _FLOOR_SECONDS)
        row = _features(work)
        for i, part in enumerate(row):
            share = weight * part
            self._products[i] = [
                old * _KEPT + share * other
                for old, other in zip(self._products[i], row, strict=True)
            ]
            self._targets[i] = self._targets[i] * _KEPT + share * seconds
        self._unfitted = True
        if now - self._latest[moves] > _FRESH_SECONDS:
            self._seen[moves] = 0
        self._seen[moves] += 1
        self._latest[moves] = now
        self._reached(work)
        if self._seen[moves] <= _MANY:
            self._fit(now)

    def _reached(self, work: Work) -> None:
        self._most_computed = max(self._most_computed, work.computed)
        self._most_moved = max(self._most_moved, work.moved)

    def expect(self, work: Work, now: float) -> float | None:
        """Seconds that ``work`` will take, or None when too little is known."""
        if not self.knows(work, now):
            return None
        factors, row = self._up_to_date(now), _features(work)
        return (
            factors[0]
            + factors[1] * row[1]
            + factors[2] * row[2]
            + factors[3] * row[3]
            + factors[4] * row[4]
        )

    def knows(self, work: Work, now: float) -> bool:
        moves = work.moved > 0
        return (
            self._seen[moves] >= _ENOUGH
            and now - self._latest[moves] <= _FRESH_SECONDS
            and work.computed <= _REACH * self._most_computed
            and work.moved <= _REACH * self._most_moved
        )

    def compute_seconds(self, work: Work, now: float) -> float | None:
        """The part of ``work`` that keeps the worker computing: no constant, no transfer."""
        if not self.knows(work, now):
            return None
        factors, row = self._up_to_date(now), _features(work)
        return factors[1] * row[1] + factors[2] * row[2]

    def _up_to_date(self, now: float) -> list[float]:
        if self._unfitted and now - self._fitted >= _REFIT_SECONDS:
            self._fit(now)
        return self._factors

    def _fit(self, now: float) -> None:
        """Least squares with factors of zero or more, by coordinate descent from the last fit.

        The small addition on the diagonal keeps factors still that the legs do not tell apart.
        """
        self._fitted, self._unfitted = now, False
        factors, targets = self._factors, self._targets
        rows = [(i, row, row[i]) for i, row in enumerate(self._products) if row[i] > 0]
        for _ in range(_SWEEPS):
            moving = False
            for i, row, diagonal in rows:
                before = factors[i]
                factors[i] = 0.0
                rest = (
                    row[0] * factors[0]
                    + row[1] * factors[1]
                    + row[2] * factors[2]
                    + row[3] * factors[3]
                    + row[4] * factors[4]
                )
                found = factors[i] = max(0.0, (targets[i] - rest) / (diagonal * 1.000001))
                moving = moving or abs(found - before) > _STILL * found
            if not moving:
                break


def _features(work: Work) -> tuple[float, ...]:
    """In thousands of tokens, so that the factors are of one order of magnitude."""
    computed = work.computed / 1000
    return (
        1.0,
        computed + work.ahead / 1000,
        computed * (work.context / 1000 + computed / 2),
        1.0 if work.moved else 0.0,
        work.moved / 1000,
    )
