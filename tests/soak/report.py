"""[pure] What a soak saw, as numbers, a table and a verdict."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STALL_FACTOR = 5.0
"""A prefill over this many medians of its class is a stall: one that had to wait for another's
tokens or for a busy core stays below."""

IDLE_LIMIT_PERCENT = 10.0
"""Of one core, for an idle worker with all its processes."""

SPEED_FROM_TOKENS = 128
"""Prefill speed is taken from prefills that are not all overhead."""

_SHORTEST_CLASS = 32


@dataclass(frozen=True)
class Prefill:
    """One prefill leg. ``new_tokens``: what prefill had to compute itself."""

    new_tokens: int
    pulled: bool
    seconds: float

    @property
    def length_class(self) -> str:
        upper = _SHORTEST_CLASS
        while upper <= self.new_tokens:
            upper *= 2
        return f"{'pull, ' if self.pulled else ''}under {upper:,} new tokens"


@dataclass(frozen=True)
class LengthClass:
    """The prefills of one length class."""

    count: int
    median: float
    longest: float
    stalls: int


@dataclass
class Soak:
    """One soak. ``idle``: state -> worker -> percent of a core, empty when not measured."""

    turns: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    retries: int = 0
    checked: int = 0
    differing: list[str] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def classes(self) -> dict[str, LengthClass]:
        by_class: dict[str, list[Prefill]] = {}
        for prefill in sorted(self.prefills, key=lambda one: (one.pulled, one.new_tokens)):
            by_class.setdefault(prefill.length_class, []).append(prefill)
        return {name: _length_class(members) for name, members in by_class.items()}

    @property
    def stalls(self) -> int:
        return sum(one.stalls for one in self.classes.values())

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """None when there was no prefill long enough to tell."""
        long = [one for one in self.prefills if one.new_tokens >= SPEED_FROM_TOKENS]
        seconds = sum(one.seconds for one in long)
        return sum(one.new_tokens for one in long) / seconds if seconds else None

    @property
    def slowest_prefill(self) -> Prefill | None:
        return max(self.prefills, key=lambda one: one.seconds, default=None)


def _length_class(members: list[Prefill]) -> LengthClass:
    times = [one.seconds for one in members]
    median = statistics.median(times)
    return LengthClass(
        len(times), median, max(times), sum(one > STALL_FACTOR * median for one in times)
    )


def read_turn_log(lines: Iterable[str], soak: Soak) -> None:
    """Take prefills, routes and retries from the proxy's log."""
    for line in lines:
        turn = _turn(line)
        if turn is None:
            continue
        soak.routes[turn["route"] or "none"] += 1
        soak.retries += max(0, turn["attempts"] - 1)
        if (milliseconds := turn["legs_ms"].get("prefill")) is not None:
            pulled = turn["pulled_tokens"] or 0
            new = turn["prompt_tokens"] - pulled
            soak.prefills.append(Prefill(new, pulled > 0, milliseconds / 1000))


def _turn(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.get("event") == "turn" else None


def complaints(soak: Soak, wanted_turns: int) -> list[str]:
    """Why this soak is not clean. Empty: it is."""
    found = []
    if soak.turns < wanted_turns:
        found.append(f"{soak.turns} turns of {wanted_turns}")
    for name, events in (
        ("hangs", soak.hangs),
        ("errors", soak.errors),
        ("answers unlike a cold one's", soak.differing),
    ):
        if events:
            found.append(f"{len(events)} {name}: {'; '.join(events[:3])}")
    if soak.retries:
        found.append(f"{soak.retries} legs had to be repeated")
    if soak.stalls:
        found.append(f"{soak.stalls} stalls")
    if not soak.routes["prefill-with-pull"]:
        found.append("nothing was reused")
    if not soak.idle:
        found.append("idle use was not measured")
    for state, workers in soak.idle.items():
        for worker, percent in workers.items():
            if percent >= IDLE_LIMIT_PERCENT:
                found.append(f"idle {worker}, {state}: {percent:.1f} % of a core")
    return found


def as_text(soaks: Mapping[str, Soak]) -> str:
    """One Markdown table with a column for each soak, and the last one's classes."""
    last = list(soaks.values())[-1]
    rows = [("", *soaks), ("---",) * (len(soaks) + 1)]
    rows += [
        (name, *(value(soak) for soak in soaks.values()))
        for name, value in (
            ("turns", lambda one: f"{one.turns}"),
            ("seconds", lambda one: f"{one.seconds:.0f}"),
            ("hangs", lambda one: f"{len(one.hangs)}"),
            ("errors", lambda one: f"{len(one.errors)}"),
            ("repeated legs", lambda one: f"{one.retries}"),
            ("stalls", lambda one: f"{one.stalls}"),
            ("slowest prefill", _slowest),
            ("prefill tokens/s", _speed),
            ("answers unlike a cold one's", lambda one: f"{len(one.differing)} of {one.checked}"),
        )
    ]
    rows += [
        (
            f"idle {worker}, {state}",
            *(_percent(soak.idle.get(state, {}).get(worker)) for soak in soaks.values()),
        )
        for state, workers in last.idle.items()
        for worker in workers
    ]
    classes = [("prefills", "count", "median s", "longest s", "ratio"), ("---",) * 5]
    classes += [
        (
            name,
            f"{one.count}",
            f"{one.median:.2f}",
            f"{one.longest:.2f}",
            f"{one.longest / one.median:.1f}",
        )
        for name, one in last.classes.items()
    ]
    kinds = ", ".join(f"{count} {kind}" for kind, count in (last.kinds + last.routes).items())
    return f"{_markdown(rows)}\n\n{_markdown(classes)}\n\n{kinds}"


def _slowest(soak: Soak) -> str:
    one = soak.slowest_prefill
    return f"{one.seconds:.1f} s ({one.new_tokens} tokens)" if one else "-"


def _speed(soak: Soak) -> str:
    speed = soak.prefill_tokens_per_second
    return "-" if speed is None else f"{speed:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _markdown(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
