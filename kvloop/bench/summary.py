"""[pure] From records to figures. Nothing here is rounded; that is the report's business."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvloop.bench.legs import BASELINES, KNOWN_ARMS, reference_of
from kvloop.bench.records import Run, Sample, Span, TurnRecord
from kvloop.bench.stats import Estimate, bootstrap, median, quantile

Value = Callable[[TurnRecord], float | None]
Group = Callable[[TurnRecord], Hashable]


@dataclass(frozen=True)
class Row:
    """One arm's times in one group of turns, in seconds."""

    group: Hashable
    arm: str
    p50: Estimate
    p95: float
    p99: float


def ttft(record: TurnRecord) -> float | None:
    return record.ttft if record.ok else None


def quantiles(turns: Iterable[TurnRecord], group: Group, value: Value = ttft) -> list[Row]:
    """For each group and arm: median with interval, p95, p99; groups in order."""
    found: dict[tuple[Hashable, str], dict[Hashable, list[float]]] = {}
    for record in turns:
        number = value(record)
        if number is None:
            continue
        key = (group(record), record.arm)
        found.setdefault(key, {}).setdefault(_cluster(record), []).append(number)
    return _rows(found)


def _rows(groups: Mapping[tuple[Hashable, str], Mapping[Hashable, Sequence[float]]]) -> list[Row]:
    rows = []
    for (name, arm), clusters in sorted(groups.items(), key=lambda item: _order(item[0])):
        flat = [number for values in clusters.values() for number in values]
        estimate = bootstrap(clusters, median)
        rows.append(Row(name, arm, estimate, quantile(flat, 0.95), quantile(flat, 0.99)))
    return rows


def _order(key: tuple[Hashable, str]) -> tuple[str, object, int]:
    arms = [*KNOWN_ARMS, key[1]]
    return (type(key[0]).__name__, key[0], arms.index(key[1]))


def _cluster(record: TurnRecord) -> Hashable:
    """Branches of one conversation share their beginning: they count as one."""
    return (record.workload, record.conversation.split(".")[0], record.repeat)


@dataclass(frozen=True)
class Comparison:
    """An arm beside its baseline in one workload, turn by turn. Above 1: the arm is faster."""

    workload: str
    arm: str
    baseline: str
    ratio: Estimate
    """Median of baseline's TTFT over the arm's, pair by pair."""
    saved: Estimate
    """Median of the difference in seconds."""
    slower: float
    """Share of the pairs in which the arm was slower."""


def compare(run_turns: Sequence[TurnRecord], *, first_turns: bool = False) -> list[Comparison]:
    """Paired comparisons of each arm with its baseline. Pairs are the same turn of the same
    conversation in the same pass. ``first_turns`` False leaves out turns that cannot reuse, unless
    a workload has no others."""
    by_place: dict[tuple[Hashable, ...], dict[str, TurnRecord]] = defaultdict(dict)
    for record in run_turns:
        if record.ok:
            place = (record.workload, record.conversation, record.repeat, record.turn)
            by_place[place][record.arm] = record
    several = {r.workload for r in run_turns if r.turn > 1}
    pairs: dict[tuple[str, str, str], dict[Hashable, list[tuple[float, float]]]] = {}
    for arms in by_place.values():
        for arm, baseline in _pairs(arms):
            record = arms[arm]
            if record.turn == 1 and not first_turns and record.workload in several:
                continue
            before, after = arms[baseline].ttft, record.ttft
            if before is None or after is None:
                continue
            key = (record.workload, arm, baseline)
            pairs.setdefault(key, {}).setdefault(_cluster(record), []).append((before, after))
    found = []
    workloads = list(dict.fromkeys(record.workload for record in run_turns))
    known = [*KNOWN_ARMS]
    for (workload, arm, baseline), clusters in sorted(
        pairs.items(),
        key=lambda item: (workloads.index(item[0][0]), known.index(item[0][1]), item[0][2]),
    ):
        ratios = {c: [before / after for before, after in v] for c, v in clusters.items()}
        saved = {c: [before - after for before, after in v] for c, v in clusters.items()}
        flat = [r for values in ratios.values() for r in values]
        slower = sum(r < 1 for r in flat) / len(flat)
        found.append(
            Comparison(
                workload,
                arm,
                baseline,
                bootstrap(ratios, median),
                bootstrap(saved, median),
                slower,
            )
        )
    return found


def _pairs(arms: Iterable[str]) -> list[tuple[str, str]]:
    """Arm and baseline, of those that were asked the same turn."""
    there = list(arms)
    return [(arm, other) for arm in there for other in BASELINES.get(arm, ()) if other in there]


@dataclass(frozen=True)
class Sources:
    """Where the prompt tokens of an arm's turns came from."""

    workload: str
    arm: str
    turns: int
    errors: int
    hits: int
    """Turns after the first that pulled something from decode."""
    later: int
    """Turns after the first."""
    prompt: int
    pulled: int
    cached: int
    """In prefill's own cache, or in the single worker's."""
    computed: int
    reasons: Mapping[str, int]


def sources(turns: Iterable[TurnRecord]) -> list[Sources]:
    groups: dict[tuple[str, str], list[TurnRecord]] = defaultdict(list)
    for record in turns:
        groups[record.workload, record.arm].append(record)
    return [_sources(workload, arm, each) for (workload, arm), each in groups.items()]


def _sources(workload: str, arm: str, turns: Sequence[TurnRecord]) -> Sources:
    good = [record for record in turns if record.ok]
    prompt = sum(record.prompt_tokens or 0 for record in good)
    pulled = sum(record.pulled_tokens or 0 for record in good)
    cached = sum(_cached(record) for record in good)
    reasons: dict[str, int] = defaultdict(int)
    for record in good:
        if record.reason:
            reasons[record.reason] += 1
    later = [record for record in good if record.turn > 1]
    return Sources(
        workload,
        arm,
        len(turns),
        len(turns) - len(good),
        sum(bool(record.pulled_tokens) for record in later),
        len(later),
        prompt,
        pulled,
        cached,
        prompt - pulled - cached,
        dict(sorted(reasons.items(), key=lambda item: -item[1])),
    )


def _cached(record: TurnRecord) -> int:
    """Tokens from a cache that is the worker's own."""
    if record.prefill_cached_tokens is not None:
        return record.prefill_cached_tokens
    if record.route:
        return max(0, (record.reused_tokens or 0) - (record.pulled_tokens or 0))
    return record.cached_tokens or 0


@dataclass(frozen=True)
class Answers:
    """Greedy answers of an arm beside the reference arm's, where both were asked the same."""

    workload: str
    arm: str
    reference: str
    compared: int
    different: int
    parted: int
    """Turns not compared: the histories differ since an earlier answer did."""


def answers(turns: Sequence[TurnRecord]) -> list[Answers]:
    """Per workload and arm; empty without a reference arm."""
    reference = reference_of({record.arm for record in turns})
    if reference is None:
        return []
    right = {
        (r.workload, r.conversation, r.repeat, r.turn): r
        for r in turns
        if r.arm == reference and r.ok
    }
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for record in turns:
        other = right.get((record.workload, record.conversation, record.repeat, record.turn))
        if record.arm == reference or not record.ok or other is None:
            continue
        count = counts[record.workload, record.arm]
        if record.history != other.history:
            count[2] += 1
        else:
            count[0] += 1
            count[1] += record.answer != other.answer
    return [Answers(w, arm, reference, *count) for (w, arm), count in counts.items()]


@dataclass(frozen=True)
class Split:
    """Where a turn's time to first token goes, in median seconds of one group of turns."""

    group: Hashable
    arm: str
    turns: int
    prompt_tokens: float
    pulled_tokens: float
    tokenise: float
    pull: float
    """Transfer from decode to prefill, by prefill's own clock."""
    compute: float
    """The rest of the prefill leg: queue, compute, HTTP."""
    decode: float
    """Decode leg to its first content: transfer from prefill, one step, HTTP."""
    bytes_pulled: float
    bytes_pushed: float


def splits(turns: Iterable[TurnRecord], group: Group) -> list[Split]:
    """Of turns whose legs and transfers are known (proxies that the run started itself)."""
    groups: dict[tuple[Hashable, str], list[TurnRecord]] = defaultdict(list)
    for record in turns:
        if record.ok and record.legs and record.pull is not None:
            groups[group(record), record.arm].append(record)
    found = []
    for (name, arm), each in sorted(groups.items(), key=lambda item: _order(item[0])):
        pulls = [record.pull.seconds for record in each if record.pull is not None]
        compute = [
            max(0.0, record.legs.get("prefill", 0.0) - record.pull.seconds)
            for record in each
            if record.pull is not None
        ]
        found.append(
            Split(
                name,
                arm,
                len(each),
                median([record.prompt_tokens or 0 for record in each]),
                median([record.pulled_tokens or 0 for record in each]),
                median([record.legs.get("tokenise", 0.0) for record in each]),
                median(pulls),
                median(compute),
                median([record.legs.get("decode", 0.0) for record in each]),
                median([record.pull.bytes for record in each if record.pull is not None]),
                median([record.push.bytes for record in each if record.push is not None] or [0.0]),
            )
        )
    return found


@dataclass(frozen=True)
class Throughput:
    """What an arm got done with all clients at once, over its passes."""

    workload: str
    arm: str
    passes: int
    seconds: Estimate
    output_per_second: float
    prompt_per_second: float
    turns_per_second: float


def throughput(turns: Sequence[TurnRecord], spans: Sequence[Span]) -> list[Throughput]:
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.workload, span.arm].append(span)
    found = []
    for (workload, arm), each in groups.items():
        mine = [r for r in turns if (r.workload, r.arm) == (workload, arm) and r.loaded and r.ok]
        length = sum(span.ended - span.started for span in each)
        found.append(
            Throughput(
                workload,
                arm,
                len(each),
                bootstrap({span.repeat: [span.ended - span.started] for span in each}, median),
                sum(record.output_tokens or 0 for record in mine) / length,
                sum(record.prompt_tokens or 0 for record in mine) / length,
                len(mine) / length,
            )
        )
    return found


def task_seconds(turns: Iterable[TurnRecord]) -> list[Row]:
    """Whole conversations: the sum of their turns' times without the client's pauses."""
    sums: dict[tuple[str, str, Hashable], list[float]] = {}
    failed: set[tuple[str, str, Hashable]] = set()
    for record in turns:
        key = (record.workload, record.arm, _cluster(record))
        sums.setdefault(key, []).append(record.total)
        if not record.ok:
            failed.add(key)
    longest: dict[tuple[str, Hashable], int] = {}
    for (workload, _, cluster), values in sums.items():
        place = (workload, cluster)
        longest[place] = max(longest.get(place, 0), len(values))
    groups: dict[tuple[Hashable, str], dict[Hashable, list[float]]] = {}
    for key, values in sums.items():
        workload, arm, cluster = key
        group: tuple[Hashable, str] = (workload, arm)
        # A conversation that was cut short is no faster one.
        if key not in failed and len(values) == longest[workload, cluster]:
            groups.setdefault(group, {})[cluster] = [sum(values)]
    return _rows(groups)


def itl(turns: Iterable[TurnRecord]) -> list[Row]:
    """Gaps between content chunks, all of an arm's in a workload together."""
    groups: dict[tuple[Hashable, str], dict[Hashable, list[float]]] = {}
    for record in turns:
        if record.ok and record.itl:
            clusters = groups.setdefault((record.workload, record.arm), {})
            clusters.setdefault(_cluster(record), []).extend(record.itl)
    return _rows(groups)


@dataclass(frozen=True)
class Retained:
    """KV blocks that decode keeps for turns that may come, during one workload."""

    workload: str
    mean: float
    peak: float
    of_blocks: int | None


def retained(run: Run) -> list[Retained]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in run.samples:
        if sample.pinned_blocks is not None:
            groups[sample.workload].append(sample)
    blocks = sum(w.blocks or 0 for w in run.workers if w.role == "decode") or None
    found = []
    for workload, samples in groups.items():
        totals: dict[float, float] = defaultdict(float)
        for sample in samples:
            totals[sample.time] += sample.pinned_blocks or 0.0
        values = list(totals.values())
        found.append(Retained(workload, sum(values) / len(values), max(values), blocks))
    return found


def length_group(lengths: Sequence[int]) -> Group:
    """Nearest of these prompt lengths, for tables by length."""

    def group(record: TurnRecord) -> Hashable:
        tokens = record.prompt_tokens or 0
        return min(lengths, key=lambda length: abs(length - tokens))

    return group


def length_classes(turns: Iterable[TurnRecord]) -> tuple[int, ...]:
    """Powers of two that the prompts of these turns fall near."""
    longest = max((record.prompt_tokens or 0 for record in turns), default=0)
    classes = [128]
    while classes[-1] < longest:
        classes.append(classes[-1] * 2)
    return tuple(classes)
