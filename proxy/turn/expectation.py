"""[pure] What each route of a turn is expected to cost, from what its workers' legs have cost.

Seconds from the plan to the first token: prefill's leg, with what it was given before, and decode's
leg up to its first content. Tokenising is the same for all routes and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.workers.costs import Work

Predict = Callable[[Work], float | None]


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds to the first token by route; None where too little is known, or it cannot be taken.

    ``append_stall``: of a local append, how long decode computes, while its other streams wait.
    """

    cold: float | None = None
    pull: float | None = None
    append: float | None = None
    append_stall: float | None = None

    def shown(self) -> dict[str, float]:
        """For the turn's log line: milliseconds by route, only what is known."""
        named = {
            "cold-prefill": self.cold,
            "prefill-with-pull": self.pull,
            "decode-local-append": self.append,
        }
        return {
            route: round(seconds * 1000, 1)
            for route, seconds in named.items()
            if seconds is not None
        }

    def of(self, route: str) -> float | None:
        milliseconds = self.shown().get(route)
        return None if milliseconds is None else milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Situation:
    """A turn, as far as its cost depends on it. All in tokens.

    ``pullable``: leading tokens that prefill could read from decode (0: none);
    ``prefill_cached`` and ``decode_cached``: that the workers have anyway; ``append``: what decode
    would have to compute by itself (None: it cannot).
    """

    prompt: int
    pullable: int
    prefill_cached: int
    decode_cached: int
    append: int | None = None
    prefill_ahead: int = 0
    decode_ahead: int = 0
    pull_threshold: int = 64


def cold_work(turn: Situation) -> Work:
    """Prefill's leg without a pull."""
    cached = min(turn.prefill_cached, turn.prompt - 1)
    return Work(turn.prompt - cached, cached, ahead=turn.prefill_ahead)


def pull_work(turn: Situation) -> Work:
    """Prefill's leg with one. What prefill has already is not read again, and what is left is read
    only from the threshold on."""
    moved = turn.pullable - min(turn.prefill_cached, turn.pullable)
    if moved < turn.pull_threshold:
        return cold_work(turn)
    there = min(turn.pullable, turn.prompt - 1)
    return Work(turn.prompt - there, there, moved, ahead=turn.prefill_ahead)


def handed_over_work(turn: Situation) -> Work:
    """Decode's leg after prefill: it reads what it has not."""
    return Work(1, turn.prompt - 1, max(1, turn.prompt - turn.decode_cached))


def append_work(turn: Situation) -> Work | None:
    """Decode's leg without prefill."""
    if turn.append is None:
        return None
    return Work(turn.append, turn.prompt - turn.append, ahead=turn.decode_ahead)


def expect(
    turn: Situation, *, prefill: Predict, decode: Predict, decode_compute: Predict
) -> Expected:
    """The three routes that a turn with a history can take."""
    after = decode(handed_over_work(turn))
    append = append_work(turn)
    return Expected(
        cold=_sum(prefill(cold_work(turn)), after),
        pull=_sum(prefill(pull_work(turn)), after) if turn.pullable else None,
        append=decode(append) if append else None,
        append_stall=decode_compute(append) if append else None,
    )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
