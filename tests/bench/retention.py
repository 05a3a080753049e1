"""``make bench-retention``: which handles to keep, replayed on synthetic traces.

Agents (seconds between turns), chats (about a minute) and one-shot requests share one decode worker
with a limited number of retained blocks. Compared: worth by observed gaps, plain LRU, fixed TTL.

Gaps are observed for handles given up early too: a proxy must leave a mark for those in the table,
or what it evicts looks as if it never came back.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass

from proxy.retention import ReturnTimes, worth

BLOCK = 16
TTL = 480.0
KINDS = {"agent": (4.0, 12), "chat": (60.0, 5), "one-shot": (0.0, 1)}
"""Kind -> (mean seconds between turns, mean turns)."""


@dataclass(slots=True)
class Kept:
    """One retained handle."""

    tenant: str
    turn: int
    tokens: int
    since: float

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK)


def trace(sessions: int, seed: int) -> list[tuple[float, int, str, int, int]]:
    """(time, session, tenant, turn, tokens) in order of time."""
    rng = random.Random(seed)
    events = []
    for session in range(sessions):
        tenant = rng.choices(list(KINDS), (1, 2, 6))[0]
        gap, turns = KINDS[tenant]
        count = 1 if turns == 1 else 1 + int(rng.expovariate(1 / (turns - 1)))
        time, tokens = rng.uniform(0, 3600), 0
        for turn in range(count):
            tokens += rng.randint(200, 1500)
            events.append((time, session, tenant, turn, tokens))
            time += rng.lognormvariate(0, 0.8) * gap
    return sorted(events)


def replay(
    events: list[tuple[float, int, str, int, int]], policy: str, limit: int
) -> tuple[int, float, int]:
    """Hit tokens, retained block-seconds, tokens that a hit would have saved at best."""
    kept: dict[int, Kept] = {}
    last: dict[int, tuple[float, int]] = {}
    groups: dict[tuple[str, bool], ReturnTimes] = {}
    ends: list[tuple[float, int, float]] = []
    hit = best = used = 0
    area = 0.0

    def times(tenant: str, turn: int) -> ReturnTimes:
        return groups.setdefault((tenant, turn > 0), ReturnTimes())

    def drop(session: int, now: float) -> Kept:
        nonlocal used, area
        gone = kept.pop(session)
        used -= gone.blocks
        area += gone.blocks * (now - gone.since)
        return gone

    for now, session, tenant, turn, tokens in events:
        while ends and ends[0][0] <= now:
            end, whose, since = heapq.heappop(ends)
            if whose in kept and kept[whose].since == since:
                drop(whose, end)
        if session in last:
            before, had = last[session]
            best += had
            times(tenant, turn - 1).turn_came(now - before)
        if session in kept:
            hit += drop(session, now).tokens
        last[session] = (now, tokens)
        times(tenant, turn).turn_kept()
        mine = Kept(tenant, turn, tokens, now)
        if policy == "fixed TTL" and used + mine.blocks > limit:
            continue  # as the worker alone: over its share it refuses the pin
        kept[session] = mine
        used += mine.blocks
        lease = TTL
        if policy == "worth":
            lease = times(tenant, turn).lease(shortest=15, longest=TTL)
        heapq.heappush(ends, (now + lease, session, now))
        while used > limit:
            if policy == "worth":
                victim = min(
                    kept,
                    key=lambda s: worth(
                        times(kept[s].tenant, kept[s].turn),
                        age_seconds=now - kept[s].since,
                        tokens=kept[s].tokens,
                        blocks=kept[s].blocks,
                    ),
                )
            else:
                victim = min(kept, key=lambda s: kept[s].since)
            drop(victim, now)
    return hit, area, best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sessions", type=int, default=1500)
    options.add_argument("--limits", type=int, nargs="+", default=[500, 1500, 5000])
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    events = trace(chosen.sessions, chosen.seed)
    print("| blocks | policy | hit tokens | of the possible | hit tokens per block-second |")
    print("|---|---|---|---|---|")
    for limit in chosen.limits:
        for policy in ("worth", "LRU", "fixed TTL"):
            hit, area, best = replay(events, policy, limit)
            print(f"| {limit} | {policy} | {hit:,} | {hit / best:.0%} | {hit / area:.2f} |")


if __name__ == "__main__":
    main()
