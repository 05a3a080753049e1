"""[pure] Traffic as turns of conversations, whatever it was read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Turn:
    """One request. Times are seconds on any one clock, lengths tokens."""

    session: str
    start: float
    end: float
    prompt: int
    output: int
    shared: int | None = None
    """Leading prompt tokens equal to what the session's previous turn left (its prompt and its
    answer). None: not known, see ``Traffic.assumed``."""


@dataclass(frozen=True)
class Follow:
    """A turn together with the one before it in its session; None for a first turn."""

    turn: Turn
    before: Turn | None
    number: int
    """In its session, from 1."""

    @property
    def gap(self) -> float | None:
        """Seconds from the end of the last answer; never below zero."""
        return None if self.before is None else max(0.0, self.turn.start - self.before.end)

    @property
    def shared(self) -> int:
        """Prompt tokens that the previous turn's KV covers."""
        if self.before is None:
            return 0
        left = max(0, self.before.prompt + self.before.output - 1)
        if self.turn.shared is not None:
            return min(self.turn.shared, self.turn.prompt)
        # A prompt that did not grow was rewritten: how much of it is left nobody knows.
        return min(left, self.turn.prompt) if self.turn.prompt >= self.before.prompt else 0

    @property
    def shared_with_prefill(self) -> int:
        """The part of ``shared`` that prefill has seen too: the last answer it has not."""
        return 0 if self.before is None else min(self.shared, self.before.prompt)


@dataclass(frozen=True)
class Traffic:
    """Turns in order of their start, and how far to trust them."""

    turns: tuple[Turn, ...]
    source: str
    assumed: tuple[str, ...] = ()
    """What was taken for granted where the source does not say, in words."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Why lines were left out -> how many."""
    timed: bool = True
    """False: the source has no times; gaps and everything that follows from them are unknown."""

    @property
    def seconds(self) -> float:
        if not self.turns or not self.timed:
            return 0.0
        return max(turn.end for turn in self.turns) - self.turns[0].start

    def follows(self) -> Iterator[Follow]:
        last: dict[str, tuple[Turn, int]] = {}
        for turn in self.turns:
            before, number = last.get(turn.session, (None, 0))
            yield Follow(turn, before, number + 1)
            last[turn.session] = (turn, number + 1)


def ordered(
    turns: Iterable[Turn],
    source: str,
    *,
    assumed: Iterable[str] = (),
    skipped: Mapping[str, int] | None = None,
    timed: bool = True,
) -> Traffic:
    """Sorted by start, with times from zero."""
    found: Sequence[Turn] = sorted(turns, key=lambda turn: turn.start)
    if timed and found:
        zero = found[0].start
        found = [replace(turn, start=turn.start - zero, end=turn.end - zero) for turn in found]
    return Traffic(tuple(found), source, tuple(assumed), Counter(skipped or {}), timed)
