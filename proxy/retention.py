"""[pure] What a retained handle is worth, from the observed time between turns.

The worth of keeping a handle of age ``a`` is the best rate of hits that any further keeping time
``w`` promises: the chance of a next turn in ``(a, a + w]`` over the expected time the blocks stay
taken, times tokens per block. This is the Gittins index of the handle: with it, the least valuable
handle is the one to give up, whatever the mix of agents (seconds between turns), chats (minutes)
and one-shot requests (no next turn). Reads no clock: ages come in.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

EDGES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
"""Upper ends of the gap buckets in seconds. Doubling: what matters is the order of magnitude."""

FORGET = 0.995
"""Weight that remains of an observation after each later one: some 200 turns are remembered.
Nearer to 1 follows a changed workload late; lower makes an estimate of a handful of turns."""

PRIOR_TURNS = 4.0
"""Weight of the first guess, a next turn for half of the handles at any order of magnitude."""


@dataclass(slots=True)
class ReturnTimes:
    """Gaps between turns of one group of sessions, and how many turns had no next one."""

    kept: float = PRIOR_TURNS
    returned: list[float] = field(
        default_factory=lambda: [PRIOR_TURNS / 2 / len(EDGES)] * len(EDGES)
    )

    def turn_kept(self) -> None:
        """A turn ended and its blocks were kept."""
        self.kept = self.kept * FORGET + 1
        self.returned = [weight * FORGET for weight in self.returned]

    def turn_came(self, gap_seconds: float) -> None:
        """The next turn came. Gaps beyond the last bucket are as good as none."""
        bucket = bisect_right(EDGES, gap_seconds)
        if bucket < len(EDGES):
            self.returned[bucket] += 1

    def index(self, age_seconds: float) -> float:
        """Hits per second of keeping from this age on, for the best time to keep."""
        first = bisect_right(EDGES, age_seconds)
        alive = max(self.kept - sum(self.returned[:first]), sum(self.returned[first:]))
        best = hits = time = 0.0
        start = age_seconds
        for bucket in range(first, len(EDGES)):
            end = EDGES[bucket]
            came = self.returned[bucket]
            # Those that come in this bucket hold the blocks for half of it on average.
            time += (end - start) * (alive - came / 2)
            hits += came
            alive -= came
            start = end
            best = max(best, hits / time if time > 0 else 0.0)
        return best

    def lease(self, *, shortest: float, longest: float, share: float = 0.95) -> float:
        """Seconds within which ``share`` of the next turns came, between the limits."""
        wanted = sum(self.returned) * share
        seen = 0.0
        for end, weight in zip(EDGES, self.returned, strict=True):
            seen += weight
            if seen >= wanted:
                return min(max(end, shortest), longest)
        return longest


def worth(times: ReturnTimes, *, age_seconds: float, tokens: int, blocks: int) -> float:
    """Expected hit tokens per block-second of keeping this handle on."""
    return times.index(age_seconds) * tokens / blocks if blocks else 0.0
