"""[pure] The cost model held against measured turns: speeds fitted, error stated.

Speeds are fitted on half of the conversations and tried on the other half, both ways round, so the
error is one of prediction and not of fitting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kvloop.advise.model import Costs, KvModel
from kvloop.advise.replay import (
    NO_APPENDS,
    NO_CACHE,
    Appends,
    PrefillCache,
    play,
    retention,
)
from kvloop.advise.traffic import Traffic, Turn, ordered
from kvloop.bench.legs import KNOWN_ARMS, expiry_margin
from kvloop.bench.records import Run, TurnRecord
from kvloop.bench.stats import median
from proxy.turn.plan import DecodeLocalAppend


class CannotFit(ValueError):
    """The run holds too little to fit speeds to; the message says what is missing."""


@dataclass(frozen=True)
class Check:
    """Prediction beside measurement. Errors are shares of the measured value; where that is a share
    itself, as its name then says, they are the difference."""

    what: str
    count: int
    median_error: float
    """Median of the absolute errors."""
    bias: float
    """Median of the signed errors: above 0 the model predicts too much."""


@dataclass(frozen=True)
class Fit:
    costs: Costs
    checks: tuple[Check, ...]


def fit(run: Run, model: KvModel) -> Fit:
    """Raises ``CannotFit``. Needs turns whose legs are known: of proxies that the run started."""
    turns = [r for r in run.turns if _usable(r)]
    costs = _fit(turns, model)
    checks = []
    halves = _halves(turns)
    pairs: list[tuple[TurnRecord, float]] = []
    for train, test in (halves, halves[::-1]):
        try:
            speeds = _fit(train, model)
        except CannotFit:
            continue
        pairs += [(record, predicted(record, model, speeds)) for record in test]
    for what, chosen in (
        ("prefill leg without a pull", [p for p in pairs if not p[0].pulled_tokens]),
        ("prefill leg with a pull", [p for p in pairs if p[0].pulled_tokens]),
    ):
        if chosen:
            checks.append(_check(what, [(p, r.legs["prefill"]) for r, p in chosen]))
    return Fit(costs, tuple(checks))


def predicted(record: TurnRecord, model: KvModel, costs: Costs) -> float:
    """Seconds of this turn's prefill leg, from its lengths alone."""
    pulled, known = record.pulled_tokens or 0, _known(record)
    new = (record.prompt_tokens or 0) - known
    return costs.compute(model, new, known) + costs.pull(model, pulled)


def _usable(record: TurnRecord) -> bool:
    return bool(
        record.ok and not record.loaded and record.prompt_tokens and record.legs.get("prefill")
    )


def _known(record: TurnRecord) -> int:
    return (record.pulled_tokens or 0) + (record.prefill_cached_tokens or 0)


def _fit(turns: Sequence[TurnRecord], model: KvModel) -> Costs:
    cold = [r for r in turns if not r.pulled_tokens]
    work = [model.flops((r.prompt_tokens or 0) - _known(r), _known(r)) for r in cold]
    if len(set(work)) < 2:
        raise CannotFit("speeds need turns of at least two lengths without a pull")
    slope, intercept = _line(work, [r.legs["prefill"] for r in cold])
    if slope <= 0:
        raise CannotFit("longer prefills took no longer: the run is too noisy to fit speeds to")
    base = Costs(1 / slope, float("inf"), intercept, 0.0)
    warm = [r for r in turns if r.pulled_tokens]
    if not warm:
        return Costs(1 / slope, float("inf"), intercept)
    sizes = [model.bytes_of(r.pulled_tokens or 0) for r in warm]
    extra = [r.legs["prefill"] - predicted(r, model, base) for r in warm]
    transfers = [(s, r.pull.seconds) for s, r in zip(sizes, warm, strict=True) if r.pull]
    transfers = [(size, seconds) for size, seconds in transfers if seconds > 0]
    if transfers:
        speed = sum(size for size, _ in transfers) / sum(seconds for _, seconds in transfers)
    else:
        speed = float("inf")
    # What a pull costs beyond the bytes: the median, as single stalls would spoil a mean.
    rest = median([e - size / speed for e, size in zip(extra, sizes, strict=True)])
    return Costs(1 / slope, speed, intercept, max(0.0, rest))


_MOST_POINTS = 300
"""Each pair of points gives a slope: more points would take seconds and change nothing."""


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept after Theil and Sen: medians, as a stalled machine makes points that are
    off by a factor of ten, and least squares would follow them."""
    points = list(zip(x, y, strict=True))
    points = points[:: max(1, len(points) // _MOST_POINTS)]
    pairs = [(a, b) for a, b in combinations(points, 2) if a[0] != b[0]]
    slope = median([(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs])
    intercept = median([b - slope * a for a, b in points])
    if intercept < 0:
        # No prefill takes less than no time: then all of it is in proportion.
        return median([b / a for a, b in points]), 0.0
    return slope, intercept


def _halves(turns: Sequence[TurnRecord]) -> tuple[list[TurnRecord], list[TurnRecord]]:
    names = sorted({(r.workload, r.conversation.split(".")[0]) for r in turns})
    even = set(names[::2])
    first = [r for r in turns if (r.workload, r.conversation.split(".")[0]) in even]
    second = [r for r in turns if (r.workload, r.conversation.split(".")[0]) not in even]
    return first, second


def _check(what: str, pairs: Iterable[tuple[float, float]]) -> Check:
    errors = [(predicted - measured) / measured for predicted, measured in pairs if measured > 0]
    return Check(what, len(errors), median([abs(e) for e in errors]), median(errors))


def traffic_of(run: Run, arm: str) -> Traffic:
    """An arm's turns as traffic, as a log of them would look: lengths and times, no contents."""
    assumed = ("a prompt that grew repeats all of the last one with its answer",)
    return ordered(_turns(run, arm), f"arm {arm} of a benchmark run", assumed=assumed)


def _turns(run: Run, arm: str) -> list[Turn]:
    return [
        Turn(
            f"{arm}/{r.workload}/{r.repeat}/{r.conversation}",
            r.started,
            r.started + r.total,
            r.prompt_tokens or 0,
            r.output_tokens or 0,
        )
        for r in run.turns
        if r.arm == arm and r.ok and r.prompt_tokens
    ]


def prefill_cache(run: Run, arm: str) -> PrefillCache:
    """The prefix cache that an arm's prefill workers had: an even share of it, as the arms of a run
    keep their prompts apart by a salt each."""
    known = KNOWN_ARMS.get(arm)
    sizes = [
        float(worker.blocks * worker.block_size)
        for worker in run.workers
        if worker.role == "prefill"
        and worker.prefix_cache
        and worker.blocks is not None
        and worker.block_size is not None
    ]
    if known is None or not known.prefix_cache or not sizes:
        return NO_CACHE
    sharing = [each for each in run.arms if (one := KNOWN_ARMS.get(each.name)) and one.prefix_cache]
    return PrefillCache(min(sizes) / len(sharing), len(sizes))


def appended(arm: str) -> bool:
    """Did decode compute short additions itself on this arm?"""
    known = KNOWN_ARMS.get(arm)
    return known is not None and known.decode_local


def check_replay(
    run: Run,
    arm: str,
    model: KvModel,
    costs: Costs,
    *,
    block: int,
    threshold: int,
    appends: Appends = NO_APPENDS,
) -> tuple[Check, ...]:
    """What a replay within the run's lease pulls, as a share of all prompt tokens, and which turns
    it has decode compute, as a share of all turns, beside what was.

    Per workload, with prefill's own cache as the run had it. Left out where the lease is not known
    or nothing of the kind was measured.
    """
    if run.lease_seconds is None:
        return ()
    lease = run.lease_seconds - expiry_margin(run.lease_seconds)
    pulled: list[tuple[float, float]] = []
    on_decode: list[tuple[float, float]] = []
    for workload in dict.fromkeys(r.workload for r in run.turns):
        mine = [r for r in run.turns if r.arm == arm and r.workload == workload]
        part = traffic_of(_only(run, mine), arm)
        prompts = sum(turn.prompt for turn in part.turns)
        if prompts:
            outcome = play(
                part,
                model,
                costs,
                lease=lease,
                block=block,
                threshold=threshold,
                cache=prefill_cache(run, arm),
                appends=appends,
            )
            pulled.append(
                (outcome.pulled / prompts, sum(r.pulled_tokens or 0 for r in mine) / prompts)
            )
            measured = sum(r.route == DecodeLocalAppend.route for r in mine)
            on_decode.append((outcome.appends / len(part.turns), measured / len(part.turns)))
    checks = (
        _off(f"share of prompt tokens pulled by {arm}, per workload", pulled),
        _off(f"share of turns that decode computes on {arm}, per workload", on_decode),
    )
    return tuple(check for check in checks if check is not None)


def _off(what: str, pairs: Sequence[tuple[float, float]]) -> Check | None:
    """Differences of shares; None where nothing was measured."""
    if not any(measured for _, measured in pairs):
        return None
    off = [predicted - measured for predicted, measured in pairs]
    return Check(what, len(off), median([abs(each) for each in off]), median(off))


def check_retained(run: Run, *, block: int) -> Check | None:
    """Mean blocks kept on decode as a replay has them beside those that decode reported.

    Of all arms that reuse, as they share decode. None where lease or gauge is not known.
    """
    arms = [arm.name for arm in run.arms if (known := KNOWN_ARMS.get(arm.name)) and known.reuse]
    if run.lease_seconds is None or not arms:
        return None
    turns = sorted((turn for arm in arms for turn in _turns(run, arm)), key=lambda turn: turn.start)
    if not turns:
        return None
    end = max(turn.end for turn in turns)
    totals: dict[float, float] = {}
    for sample in run.samples:
        if sample.pinned_blocks is not None and turns[0].start <= sample.time <= end:
            totals[sample.time] = totals.get(sample.time, 0.0) + sample.pinned_blocks
    if not totals:
        return None
    traffic = ordered(turns, "run")
    kept = retention(
        list(traffic.follows()), lease=run.lease_seconds, block=block, until=traffic.seconds
    )
    measured = sum(totals.values()) / len(totals)
    return _check("mean blocks kept on decode", [(kept.mean, measured)]) if measured else None


def _only(run: Run, turns: Sequence[TurnRecord]) -> Run:
    return replace(run, turns=tuple(turns))
