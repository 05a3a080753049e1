"""[pure] From traffic, a model and speeds to settings, or to "do not adopt", with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from kvloop.advise import replay
from kvloop.advise.model import Costs, KvModel
from kvloop.advise.replay import NO_APPENDS, NO_CACHE, Appends, Outcome, PrefillCache
from kvloop.advise.traffic import Traffic
from kvloop.bench.stats import quantile

LEASES = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
"""Seconds for which a session can be found. Doubling: what matters of a gap is its order of
magnitude."""

WORTH_IT = 0.05
"""Share of prefill's time below which saving it is not worth a second system to run."""

MOST = 0.95
"""A longer lease than catches this share of what any lease could save only keeps memory."""

DECODE_SHARE = 0.5
"""Of decode's blocks that retained KV may take: the connector's own limit."""


class Verdict(StrEnum):
    ADOPT = "adopt"
    DO_NOT = "do not adopt"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Pair:
    """The deployment as it is or would be. Blocks and speeds are one decode worker's."""

    block: int = 16
    decode_blocks: int | None = None
    """KV blocks of all decode workers together."""
    decode_tokens_per_second: float | None = None
    """Of one decode worker at the load wanted."""
    cache: PrefillCache = NO_CACHE
    margin: float = 30.0
    """The proxy's ``expiry_margin_seconds``: decode keeps blocks this much longer than a lease."""
    appends: Appends = NO_APPENDS


@dataclass(frozen=True)
class Ratio:
    """Prefill workers for each decode worker, by their busy times."""

    without: float
    with_reuse: float


@dataclass(frozen=True)
class Advice:
    """What to do, and what it rests on."""

    verdict: Verdict
    reasons: tuple[str, ...]
    lease: float | None
    threshold: int | None
    budget_blocks: int | None
    """Retained blocks to allow, over all decode workers."""
    budget_share: float | None
    ratio: Ratio | None
    crossover: int | None
    outcomes: tuple[Outcome, ...]
    chosen: Outcome | None


def advise(traffic: Traffic, model: KvModel, costs: Costs, pair: Pair) -> Advice:
    """Weigh it up. Never raises for traffic that has turns."""
    crossover = costs.crossover(model, block=pair.block)
    never = "at this speed no prefix below a million tokens is quicker to pull than to compute"
    if crossover is None and not pair.appends.tokens:
        return _no([never], crossover)
    threshold = None if crossover is None else max(crossover, pair.block)
    if not traffic.timed:
        share = replay.repeated_share(traffic)
        reasons = [
            f"{share:.0%} of prompt tokens repeat, but the source has no times: gaps, lease and "
            "memory cannot be known"
        ]
        return Advice(
            Verdict.UNKNOWN, tuple(reasons), None, threshold, None, None, None, crossover, (), None
        )
    outcomes = tuple(
        replay.play(
            traffic,
            model,
            costs,
            lease=lease,
            block=pair.block,
            threshold=threshold,
            cache=pair.cache,
            margin=pair.margin,
            appends=pair.appends,
        )
        for lease in LEASES
    )
    chosen, capped = _choose(outcomes, pair)
    best = max(outcome.saved for outcome in outcomes)
    reasons = _facts(traffic, pair, chosen)
    if threshold is None:
        reasons.append(never)
    if best <= 0 or chosen.saved_share < WORTH_IT:
        reasons.append(
            f"reuse would save {chosen.saved_share:.1%} of prefill's time, below "
            f"{WORTH_IT:.0%}: not worth a second system"
        )
        if pair.cache.tokens and not chosen.pulls and not chosen.appends:
            reasons.append("prefill's own prefix cache already holds nearly all that repeats")
        if capped:
            reasons.append("decode has too few blocks for a longer lease; more may change this")
        return _no(reasons, crossover, outcomes, chosen)
    reasons.append(
        f"a lease of {chosen.lease:g} s saves {chosen.saved_share:.0%} of prefill's time "
        f"({chosen.saved / max(best, 1e-9):.0%} of what any lease here could)"
    )
    if capped:
        reasons.append("a longer lease would save more, but decode's blocks do not suffice for it")
    budget = ceil(chosen.retention.peak)
    of_decode = budget / pair.decode_blocks if pair.decode_blocks else None
    return Advice(
        Verdict.ADOPT,
        tuple(reasons),
        chosen.lease,
        threshold,
        budget,
        of_decode,
        _ratio(traffic, chosen, pair),
        crossover,
        outcomes,
        chosen,
    )


def _no(
    reasons: Sequence[str],
    crossover: int | None,
    outcomes: tuple[Outcome, ...] = (),
    chosen: Outcome | None = None,
) -> Advice:
    return Advice(
        Verdict.DO_NOT, tuple(reasons), None, None, None, None, None, crossover, outcomes, chosen
    )


def _choose(outcomes: Sequence[Outcome], pair: Pair) -> tuple[Outcome, bool]:
    """The shortest lease that saves most of what can be saved; and whether memory cut it short."""
    room = float("inf")
    if pair.decode_blocks is not None:
        room = pair.decode_blocks * DECODE_SHARE
    fitting = [outcome for outcome in outcomes if outcome.retention.p95 <= room]
    pool = fitting or [outcomes[0]]
    best = max(outcome.saved for outcome in pool)
    chosen = next(outcome for outcome in pool if outcome.saved >= MOST * best or best <= 0)
    overall = max(outcome.saved for outcome in outcomes)
    return chosen, best < MOST * overall


def _facts(traffic: Traffic, pair: Pair, chosen: Outcome) -> list[str]:
    turns = len(traffic.turns)
    first = turns - chosen.later
    facts = [
        f"{turns:,} turns in {traffic.seconds / 60:,.0f} minutes; {first / turns:.0%} of them are "
        "first turns, which reuse cannot help",
        f"{replay.repeated_share(traffic):.0%} of all prompt tokens repeat the turn before",
    ]
    if chosen.appends:
        facts.append(
            f"{chosen.appends / turns:.0%} of the turns skip prefill: decode computes their "
            f"additions itself, for which its running streams stand still for up to "
            f"{chosen.longest_append * 1000:,.0f} ms"
        )
    if pair.cache.tokens:
        facts.append(
            f"prefill's own cache serves {chosen.cached / max(1.0, chosen.prompt):.0%} of prompt "
            f"tokens; pulls add {chosen.pulled / max(1.0, chosen.prompt):.0%}"
        )
    found = replay.gaps(traffic)
    if found:
        facts.append(
            f"half of the next turns come within {quantile(found, 0.5):,.1f} s, nine of ten within "
            f"{quantile(found, 0.9):,.1f} s"
        )
    return facts


def _ratio(traffic: Traffic, chosen: Outcome, pair: Pair) -> Ratio | None:
    speed = pair.decode_tokens_per_second
    output = sum(turn.output for turn in traffic.turns)
    if not speed or not output:
        return None
    decoding = output / speed
    return Ratio(
        chosen.seconds_without / decoding,
        chosen.seconds_with / (decoding + chosen.append_seconds),
    )
