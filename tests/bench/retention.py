"""``make bench-retention``: which handles to keep, replayed on synthetic or recorded traces.

Synthetic: agents (seconds between turns), chats (about a minute) and one-shot requests share one
decode worker with a limited number of retained blocks. Recorded (``--trace FILE``): anything that
``kvloop advise`` reads, our own turn log among it. Compared: worth by observed gaps, as the proxy
does it (its sample of the ledger included), plain LRU, fixed TTL.

Gaps are observed for handles given up early too, as the marks in the session table allow.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvloop.advise import logs
from proxy.retention import Entry, Groups, to_give_up
from proxy.session.ledger import PER_VICTIM, SAMPLE
from proxy.turn.retaining import DOWN_TO

BLOCK = 16
TTL = 480.0
SHORTEST = 15.0
KINDS = {"agent": (4.0, 12), "chat": (60.0, 5), "one-shot": (0.0, 1)}
"""Kind -> (mean seconds between turns, mean turns)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One turn. ``shared``: tokens of it that its session's last turn left behind."""

    start: float
    end: float
    session: str
    tenant: str
    turn: int
    tokens: int
    shared: int

    @property
    def group(self) -> str:
        return f"{self.tenant}-{self.turn > 0}"


def synthetic(sessions: int, seed: int) -> list[Event]:
    """Turns in order of time."""
    rng = random.Random(seed)
    events = []
    for session in range(sessions):
        tenant = rng.choices(list(KINDS), (1, 2, 6))[0]
        gap, turns = KINDS[tenant]
        count = 1 if turns == 1 else 1 + int(rng.expovariate(1 / (turns - 1)))
        time, tokens = rng.uniform(0, 3600), 0
        for turn in range(count):
            shared = tokens
            tokens += rng.randint(200, 1500)
            events.append(Event(time, time, str(session), tenant, turn, tokens, shared))
            time += rng.lognormvariate(0, 0.8) * gap
    return sorted(events, key=lambda event: event.start)


def recorded(file: Path) -> list[Event]:
    """A log's turns. It names no tenants: their conversations count as one group."""
    traffic = logs.read(file.read_text().splitlines())
    if not traffic.timed:
        raise SystemExit(f"{file}: the trace has no times, and nothing can be said without gaps")
    return [
        Event(
            follow.turn.start,
            follow.turn.end,
            follow.turn.session,
            "",
            follow.number - 1,
            follow.turn.prompt + follow.turn.output,
            follow.shared,
        )
        for follow in traffic.follows()
    ]


def replay(
    events: Sequence[Event], policy: str, limit: int, *, seed: int = 0
) -> tuple[int, float, int]:
    """Hit tokens, retained block-seconds, tokens that a hit would have saved at best."""
    rng = random.Random(seed)
    kept: dict[str, Entry] = {}
    last: dict[str, Event] = {}
    groups = Groups()
    ends: list[tuple[float, str, float]] = []
    hit = best = used = 0
    area = 0.0

    def drop(session: str, now: float) -> None:
        nonlocal used, area
        gone = kept.pop(session)
        used -= gone.blocks
        area += gone.blocks * max(0.0, now - gone.since)

    for event in events:
        now, session = event.start, event.session
        while ends and ends[0][0] <= now:
            end, whose, since = heapq.heappop(ends)
            if whose in kept and kept[whose].since == since:
                drop(whose, end)
        if before := last.get(session):
            best += event.shared
            groups.learn(before.group).turn_came(max(0.0, now - before.end))
        if session in kept:
            hit += event.shared
            drop(session, now)
        last[session] = event
        groups.learn(event.group).turn_kept()
        lease = TTL
        if policy == "worth":
            lease = groups.of(event.group).lease(shortest=SHORTEST, longest=TTL)
        mine = Entry(
            session,
            blocks=-(-event.tokens // BLOCK),
            tokens=event.tokens,
            group=event.group,
            usable_seconds=lease,
            since=event.end,
        )
        if policy == "fixed TTL" and used + mine.blocks > limit:
            continue  # as the worker alone: over its share it refuses the pin
        kept[session] = mine
        used += mine.blocks
        heapq.heappush(ends, (event.end + lease, session, event.end))
        if policy == "worth" and used > limit:
            enough = int(limit * DOWN_TO)
            many = -(-(used - enough) * len(kept) // used)
            wanted = max(SAMPLE, many * PER_VICTIM)
            names = list(kept)
            sample = names if len(names) <= wanted else rng.sample(names, wanted)
            entries = [kept[name] for name in sample]
            excess = used - enough
            victims = to_give_up(entries, groups, now=event.end, excess=excess, must=excess)
            for victim in victims or sample[:1]:
                drop(victim, event.end)
        while used > limit:
            drop(min(kept, key=lambda name: kept[name].since), event.end)
    return hit, area, best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sessions", type=int, default=1500)
    options.add_argument("--limits", type=int, nargs="+", default=[500, 1500, 5000])
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--trace", type=Path, help="a recorded trace instead")
    chosen = options.parse_args()
    file, seed = chosen.trace, chosen.seed
    events = recorded(file) if file else synthetic(chosen.sessions, seed)
    print("| blocks | policy | hit tokens | of the possible | hit tokens per block-second |")
    print("|---|---|---|---|---|")
    for limit in chosen.limits:
        for policy in ("worth", "LRU", "fixed TTL"):
            hit, area, best = replay(events, policy, limit)
            share = f"{hit / best:.0%}" if best else "-"
            print(f"| {limit} | {policy} | {hit:,} | {share} | {hit / max(area, 1e-9):.2f} |")


if __name__ == "__main__":
    main()
