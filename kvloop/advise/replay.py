"""[pure] Traffic played against a lease and prefill's own cache: what is caught, kept and moved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from kvloop.advise.model import Costs, KvModel
from kvloop.advise.traffic import Follow, Traffic
from kvloop.bench.stats import quantile


@dataclass(frozen=True)
class PrefillCache:
    """Prefill's own prefix cache. ``tokens`` 0: off. Conversations go round the workers."""

    tokens: float = 0.0
    """Room in one worker."""
    workers: int = 1


NO_CACHE = PrefillCache()


@dataclass(frozen=True)
class Appends:
    """When decode computes a turn's addition itself, behind the history that it keeps: the proxy's
    ``append_tokens`` and ``append_stall_seconds``. ``tokens`` 0: never."""

    tokens: int = 0
    stall: float = 0.0
    """Seconds: longer additions too, if computing them takes no longer than this."""

    def takes(self, new: float, seconds: float) -> bool:
        return new > 0 and self.tokens > 0 and (new <= self.tokens or seconds <= self.stall)


NO_APPENDS = Appends()


@dataclass(frozen=True)
class Retention:
    """Blocks that decode keeps, over time."""

    mean: float
    p95: float
    peak: float


@dataclass(frozen=True)
class Outcome:
    """One lease, over the whole traffic. Seconds are prefill's time."""

    lease: float
    later: int
    """Turns after a first one."""
    caught: int
    """Of these, turns that came within the lease and share something."""
    pulls: int
    """Turns that pull: caught, and worth it."""
    appends: int
    """Turns that decode computes itself."""
    pulled: float
    """Tokens."""
    cached: float
    """Tokens from prefill's own cache."""
    prompt: float
    seconds_without: float
    """Prefill time with its own cache alone."""
    seconds_with: float
    append_seconds: float
    """Decode's time for what it computes itself."""
    longest_append: float
    """Seconds for which decode's running streams stand still at most."""
    retention: Retention
    bytes_moved: float
    peak_bytes_per_second: float
    """Over the busiest ten seconds."""
    saved_per_turn: tuple[float, ...]
    """Seconds saved, of turns that pull."""

    @property
    def saved(self) -> float:
        """Prefill's time, less what decode does instead."""
        return self.seconds_without - self.seconds_with - self.append_seconds

    @property
    def saved_share(self) -> float:
        return self.saved / self.seconds_without if self.seconds_without else 0.0


_WINDOW = 10.0


def play(
    traffic: Traffic,
    model: KvModel,
    costs: Costs,
    *,
    lease: float,
    block: int,
    threshold: int | None,
    cache: PrefillCache = NO_CACHE,
    margin: float = 0.0,
    appends: Appends = NO_APPENDS,
) -> Outcome:
    """``lease``: how long a session can be found. ``margin``: how much longer decode keeps its
    blocks (the proxy's ``expiry_margin_seconds``). ``threshold``: shortest pull in tokens;
    None: no pulls."""
    follows = list(traffic.follows())
    cached_by_turn = list(_cached(follows, cache))
    later = caught = pulls = appended = 0
    pulled_tokens = cached_tokens = without = with_reuse = moved = on_decode = longest = 0.0
    saved: list[float] = []
    windows: dict[int, float] = {}
    for follow, cached in zip(follows, cached_by_turn, strict=True):
        turn = follow.turn
        computed = costs.compute(model, turn.prompt - cached, cached)
        without += computed
        cached_tokens += cached
        later += follow.before is not None
        hit = follow.gap is not None and follow.gap <= lease and follow.shared > 0
        caught += hit
        more = follow.shared - cached
        new = turn.prompt - follow.shared
        behind = costs.compute(model, new, follow.shared)
        stall = behind - costs.overhead  # which decode's leg has in any case
        if hit and appends.takes(new, stall):
            appended += 1
            on_decode += stall
            longest = max(longest, stall)
        elif hit and threshold is not None and more >= threshold:
            reused = behind + costs.pull(model, more)
            pulls += 1
            pulled_tokens += more
            size = model.bytes_of(more)
            moved += size
            windows[int(turn.start // _WINDOW)] = windows.get(int(turn.start // _WINDOW), 0) + size
            saved.append(computed - reused)
            with_reuse += reused
        else:
            with_reuse += computed
    return Outcome(
        lease,
        later,
        caught,
        pulls,
        appended,
        pulled_tokens,
        cached_tokens,
        float(sum(turn.prompt for turn in traffic.turns)),
        without,
        with_reuse,
        on_decode,
        longest,
        retention(follows, lease=lease + margin, block=block, until=traffic.seconds),
        moved,
        max(windows.values(), default=0.0) / _WINDOW,
        tuple(saved),
    )


def _cached(follows: Sequence[Follow], cache: PrefillCache) -> Iterable[float]:
    """Tokens of each turn that the prefill worker it comes to still has.

    Least recently used conversations go first, whole ones. Turns go to the workers in rotation: a
    proxy that balances load and knows no affinity does as good as that.
    """
    workers: list[OrderedDict[str, float]] = [OrderedDict() for _ in range(cache.workers)]
    for number, follow in enumerate(follows):
        if not cache.tokens:
            yield 0.0
            continue
        held = workers[number % cache.workers]
        session = follow.turn.session
        had = held.pop(session, 0.0)
        yield min(had, float(follow.shared_with_prefill))
        held[session] = float(follow.turn.prompt)
        while sum(held.values()) > cache.tokens and len(held) > 1:
            held.popitem(last=False)


def retention(follows: Sequence[Follow], *, lease: float, block: int, until: float) -> Retention:
    """Each turn's blocks are kept from its end until the next turn or the end of the lease."""
    changes: list[tuple[float, float]] = []
    following: dict[str, Follow] = {}
    for follow in reversed(follows):
        turn = follow.turn
        after = following.get(turn.session)
        end = turn.end + lease
        if after is not None:
            end = min(end, max(turn.end, after.turn.start))
        blocks = ceil(max(0, turn.prompt + turn.output - 1) / block)
        changes += [(turn.end, blocks), (end, -blocks)]
        following[turn.session] = follow
    level = last = 0.0
    areas: list[tuple[float, float]] = []
    for time, change in sorted(changes):
        if time > until:
            break
        areas.append((level, time - last))
        level, last = level + change, time
    areas.append((level, max(0.0, until - last)))
    total = sum(length for _, length in areas)
    if total <= 0:
        return Retention(0.0, 0.0, max((level for level, _ in areas), default=0.0))
    mean = sum(level * length for level, length in areas) / total
    return Retention(mean, _weighted(areas, 0.95, total), max(level for level, _ in areas))


def _weighted(areas: Iterable[tuple[float, float]], share: float, total: float) -> float:
    """The level that is not exceeded for ``share`` of the time."""
    seen = 0.0
    for level, length in sorted(areas):
        seen += length
        if seen >= share * total:
            return level
    return 0.0


@dataclass(frozen=True)
class Repeats:
    """How much of the prompts repeats, at one place in conversations."""

    number: int
    turns: int
    prompt: float
    """Median length."""
    shared: float
    """Median share that repeats."""


def repeats(traffic: Traffic, *, upto: int = 20) -> list[Repeats]:
    """By turn number; later turns count as turn ``upto``."""
    groups: dict[int, list[Follow]] = {}
    for follow in traffic.follows():
        groups.setdefault(min(follow.number, upto), []).append(follow)
    return [
        Repeats(
            number,
            len(each),
            quantile([follow.turn.prompt for follow in each], 0.5),
            quantile([follow.shared / max(1, follow.turn.prompt) for follow in each], 0.5),
        )
        for number, each in sorted(groups.items())
    ]


def repeated_share(traffic: Traffic) -> float:
    """Of all prompt tokens, those that repeat the conversation's last turn."""
    total = sum(turn.prompt for turn in traffic.turns)
    return sum(follow.shared for follow in traffic.follows()) / total if total else 0.0


def gaps(traffic: Traffic) -> list[float]:
    """Seconds between an answer's end and the next turn, of conversations that went on."""
    return [follow.gap for follow in traffic.follows() if follow.gap is not None]
