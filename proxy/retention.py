"""[pure] What a retained handle is worth, from the observed time between turns.

The worth of keeping a handle of age ``a`` is the best rate of hits that any further keeping time
``w`` promises: the chance of a next turn in ``(a, a + w]`` over the expected time the blocks stay
taken, times tokens per block. This is the Gittins index of the handle: with it, the least valuable
handle is the one to give up, whatever the mix of agents (seconds between turns), chats (minutes)
and one-shot requests (no next turn). Reads no clock: ages come in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from proxy.session.identity import Identity

EDGES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
"""Upper ends of the gap buckets in seconds. Doubling: what matters is the order of magnitude."""

FORGET = 0.995
"""Weight that remains of an observation after each later one: some 200 turns are remembered.
Nearer to 1 follows a changed workload late; lower makes an estimate of a handful of turns."""

PRIOR_TURNS = 4.0
"""Weight of the first guess, a next turn for half of the handles at any order of magnitude."""


MOST_GROUPS = 4096
"""Groups whose gaps one proxy remembers; the one unused for longest is forgotten. About 1 KB each:
fewer would forget tenants between their turns, more only helps fleets with more tenants."""

UNGUARDED_SHARE = 0.5
"""Share of a decode worker's blocks that may be retained where its connector sets no limit of its
own: the default of our connector."""


_FIRST_RETURNS = [PRIOR_TURNS / 2 * weight / (len(EDGES) + 1) for weight in (2, *[1] * 11)]
"""More in the first bucket, which has all orders below a second: so of handles of which nothing is
known the oldest is worth least."""


@dataclass(slots=True)
class ReturnTimes:
    """Gaps between turns of one group of sessions, and how many turns had no next one."""

    kept: float = PRIOR_TURNS
    returned: list[float] = field(default_factory=lambda: list(_FIRST_RETURNS))

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
        """Hits per second of keeping from this age on, for the best time to keep.

        Within a bucket returns are taken to be spread evenly, but for the first: below a second
        ages tell nothing.
        """
        first = bisect_right(EDGES, age_seconds)
        if first == len(EDGES):
            return 0.0
        start, left = 0.0, 1.0
        if first:
            start, begin, end = age_seconds, EDGES[first - 1], EDGES[first]
            left = (end - start) / (end - begin)
        returned = self.returned[first] * left
        alive = self.kept - sum(self.returned[:first]) - self.returned[first] * (1 - left)
        alive = max(alive, returned + sum(self.returned[first + 1 :]))
        best = hits = time = 0.0
        for bucket in range(first, len(EDGES)):
            end = EDGES[bucket]
            came = self.returned[bucket] if bucket > first else returned
            # Those that come in this bucket hold the blocks for half of it on average.
            time += (end - start) * (alive - came / 2)
            hits += came
            alive -= came
            start = end
            best = max(best, hits / time if time > 0 else 0.0)
        return best

    def lease(self, *, shortest: float, longest: float, share: float = 0.98) -> float:
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


class Groups:
    """The return times of each group of sessions, as far as this proxy has seen them."""

    def __init__(self, most: int = MOST_GROUPS) -> None:
        self._most = most
        self._times: OrderedDict[str, ReturnTimes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def learn(self, group: str) -> ReturnTimes:
        """The group's times, to add to."""
        times = self._times.get(group)
        if times is None:
            times = self._times[group] = ReturnTimes()
            if len(self._times) > self._most:
                self._times.popitem(last=False)
        self._times.move_to_end(group)
        return times

    def of(self, group: str) -> ReturnTimes:
        """The group's times, to read: the first guess for a group never seen."""
        return self._times.get(group) or _FIRST_GUESS


_FIRST_GUESS = ReturnTimes()


def group_of(identity: Identity, *, continues: bool) -> str:
    """Sessions that probably come back alike: one tenant's, named or not, once begun or not.

    A conversation in its second turn is far likelier to have a third one than a first to have a
    second: that parts the one-shot requests of a tenant from its chats and agents.
    """
    named = "named" if identity.conversation else "found"
    return f"{identity.tenant.hex()[:12]}-{named}-{'later' if continues else 'first'}"


class Entry(NamedTuple):
    """One line of a decode worker's ledger: blocks that are pinned there, or soon will be.

    ``since`` and ``deadline`` are Redis' Unix time in seconds, set by the ledger.
    ``usable_seconds`` is how long after ``since`` the handle may still be claimed; after that the
    blocks only wait for decode's lease. A ``reserved`` entry stands for a turn that decode is
    answering. A tuple, because a turn may look through a hundred of them.
    """

    id: str
    blocks: int
    tokens: int = 0
    group: str = ""
    scope: str = ""
    tenant: str = ""
    conversation: str = ""
    model: str = ""
    usable_seconds: float = 0.0
    reserved: bool = False
    since: float = 0.0
    deadline: float = 0.0

    def encode(self) -> bytes:
        """What the ledger stores besides blocks and times."""
        return orjson.dumps(
            [
                self.tokens,
                self.group,
                self.scope,
                self.tenant,
                self.conversation,
                self.model,
                self.usable_seconds,
                self.reserved,
            ]
        )

    @classmethod
    def decode(cls, id: str, record: bytes) -> Entry:
        """From a stored record: blocks, deadline and start in milliseconds, then ``encode``'s."""
        blocks, deadline, since, rest = record.split(b" ", 3)
        fields: list[Any] = orjson.loads(rest)
        return cls._make((id, int(blocks), *fields, int(since) / 1000, int(deadline) / 1000))


def budget_blocks(
    *, share: float, pin_limit_blocks: int | None, kv_blocks: int | None
) -> int | None:
    """Blocks that may be retained on a decode worker; None while its size is unknown."""
    if pin_limit_blocks is not None:
        return int(pin_limit_blocks * share)
    return None if kv_blocks is None else int(kv_blocks * UNGUARDED_SHARE * share)


_STEPS = 16
"""Parts of a gap bucket within which ages count as equal: an index is computed once for each."""


def by_worth(entries: Iterable[Entry], groups: Groups, *, now: float) -> list[Entry]:
    """What may be given up, least valuable first; of equals the oldest.

    Left out: what is reserved, and what can be claimed no more (nobody could release it).
    """
    return [entry for _, _, entry in _valued(entries, groups, now)]


def to_give_up(
    entries: Iterable[Entry],
    groups: Groups,
    *,
    now: float,
    excess: int,
    must: int,
    newcomers: Sequence[Entry] = (),
) -> list[str]:
    """Ids of the least valuable entries with ``excess`` blocks in all, or as many as there are.

    ``newcomers`` need a part of that room: beyond ``must`` blocks nothing is given up that is worth
    more than each of them will be.
    """
    limit = max((_fresh_worth(each, groups) for each in newcomers), default=float("inf"))
    found: list[str] = []
    freed = 0
    for value, _, entry in _valued(entries, groups, now):
        if freed >= excess or (freed >= must and value > limit):
            break
        found.append(entry.id)
        freed += entry.blocks
    return found


def _fresh_worth(entry: Entry, groups: Groups) -> float:
    times = groups.of(entry.group)
    if not entry.blocks:
        return float("inf")
    return worth(times, age_seconds=0.0, tokens=entry.tokens, blocks=entry.blocks)


def _valued(
    entries: Iterable[Entry], groups: Groups, now: float
) -> list[tuple[float, float, Entry]]:
    known: dict[tuple[str, float], float] = {}
    valued = []
    for entry in entries:
        age = max(0.0, now - entry.since)
        if entry.reserved or age >= entry.usable_seconds:
            continue
        at = entry.group, _rounded(age)
        index = known.get(at)
        if index is None:
            index = known[at] = groups.of(entry.group).index(at[1])
        value = index * entry.tokens / entry.blocks if entry.blocks else 0.0
        valued.append((value, entry.since, entry))
    valued.sort(key=_first_two)
    return valued


_first_two = itemgetter(0, 1)


def _rounded(age: float) -> float:
    """The age at which its part of its bucket begins."""
    bucket = bisect_right(EDGES, age)
    if bucket == 0 or bucket == len(EDGES):
        return float(EDGES[bucket - 1]) if bucket else 0.0
    begin = EDGES[bucket - 1]
    step = (EDGES[bucket] - begin) / _STEPS
    return begin + (age - begin) // step * step
