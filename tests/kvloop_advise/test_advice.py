"""Replay and advice, on traffic whose right answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloop.advise.advice import Pair, Verdict, advise
from kvloop.advise.model import Costs, KvModel
from kvloop.advise.replay import Appends, PrefillCache, play
from kvloop.advise.traffic import Traffic, Turn, ordered

MODEL = KvModel("test", kv_bytes=1e5, parameters=8e9, attention=0.0)
FAST = Costs(flops_per_second=1.6e14, bytes_per_second=1e10, overhead=0.0, pull_overhead=0.01)
"""10,000 tokens a second to compute, 100,000 to pull."""
PAIR = Pair(block=16, decode_blocks=100_000, decode_tokens_per_second=1000)


def conversations(count: int, turns: int, gap: float, *, every: float = 3.0) -> Traffic:
    """Each turn adds 1,000 tokens, 100 of them the last answer's; a turn takes a second."""
    made = []
    for number in range(count):
        start = number * every
        for turn in range(turns):
            made.append(Turn(f"s{number}", start, start + 1, 1000 * (turn + 1), 100))
            start += 1 + gap
    return ordered(made, "test")


def play_at(traffic: Traffic, lease: float, cache: PrefillCache | None = None) -> object:
    return play(
        traffic, MODEL, FAST, lease=lease, block=16, threshold=64, cache=cache or PrefillCache()
    )


def test_a_lease_catches_the_turns_that_come_within_it() -> None:
    traffic = conversations(5, 4, gap=20)
    short, long = play_at(traffic, 19), play_at(traffic, 21)
    assert (short.caught, short.later) == (0, 15)
    assert (long.caught, long.later) == (15, 15)
    assert long.pulled == 5 * (1099 + 2099 + 3099)
    assert long.bytes_moved == pytest.approx(long.pulled * 1e5)


def test_saved_time_is_computing_less_pulling() -> None:
    outcome = play_at(conversations(1, 2, gap=1), 60)
    # Turn 2: 2,000 tokens at 10,000/s, or 901 of them and a pull of 1,099.
    assert outcome.seconds_without == pytest.approx(0.1 + 0.2)
    assert outcome.saved == pytest.approx(0.1099 - (0.01 + 1099 * 1e5 / 1e10))


def test_blocks_are_kept_until_the_next_turn_or_the_lease() -> None:
    traffic = ordered(
        [Turn("a", 0, 0, 160, 1), Turn("a", 10, 10, 160, 1), Turn("b", 100, 100, 16, 1)], "test"
    )
    kept = play_at(traffic, 20).retention
    # 10 blocks from 0 to 30 of 100 seconds.
    assert (kept.mean, kept.peak) == (pytest.approx(3.0), 10)


def test_blocks_that_nobody_comes_back_for_are_kept_for_the_margin_too() -> None:
    traffic = ordered([Turn("a", 0, 0, 160, 1), Turn("b", 100, 100, 16, 1)], "test")
    kept = play(traffic, MODEL, FAST, lease=20, block=16, threshold=64, margin=30).retention
    assert kept.mean == pytest.approx(10 * 50 / 100)


def test_prefill_s_own_cache_leaves_only_answers_to_pull() -> None:
    traffic = conversations(1, 3, gap=5)
    cached = play_at(traffic, 60, PrefillCache(tokens=1e6))
    assert cached.cached == 1000 + 2000
    assert cached.pulled == 2 * 99
    assert cached.saved < play_at(traffic, 60).saved


def test_a_full_prefill_cache_or_another_worker_has_nothing() -> None:
    traffic = conversations(4, 3, gap=30, every=1)
    assert play_at(traffic, 60, PrefillCache(tokens=1500)).cached == 0
    assert (
        play_at(conversations(1, 3, gap=5), 60, PrefillCache(tokens=1e6, workers=2)).cached < 3000
    )


def test_quick_growing_conversations_are_advised_a_lease_that_fits_their_gaps() -> None:
    advice = advise(conversations(20, 6, gap=25), MODEL, FAST, PAIR)
    assert advice.verdict is Verdict.ADOPT
    assert advice.lease == 30
    assert advice.threshold is not None
    assert advice.threshold >= advice.crossover
    assert advice.budget_blocks == advice.chosen.retention.peak
    assert advice.ratio.with_reuse < advice.ratio.without


def test_one_shot_traffic_is_told_to_stay_away() -> None:
    advice = advise(conversations(30, 1, gap=0), MODEL, FAST, PAIR)
    assert advice.verdict is Verdict.DO_NOT
    assert advice.lease is None
    assert any("100% of them are first turns" in reason for reason in advice.reasons)


def test_a_prefill_cache_that_holds_everything_makes_it_not_worth_it() -> None:
    pair = Pair(16, 100_000, None, PrefillCache(tokens=1e9))
    advice = advise(conversations(10, 5, gap=5), MODEL, FAST, pair)
    assert advice.verdict is Verdict.DO_NOT


def test_a_link_too_slow_makes_it_not_worth_it() -> None:
    slow = Costs(FAST.flops_per_second, 1e8)
    advice = advise(conversations(10, 5, gap=5), MODEL, slow, PAIR)
    assert advice.verdict is Verdict.DO_NOT
    assert advice.crossover is None


def test_a_lease_is_no_longer_than_decode_s_memory_allows() -> None:
    traffic = conversations(60, 4, gap=100, every=1)
    roomy = advise(traffic, MODEL, FAST, PAIR)
    tight = advise(traffic, MODEL, FAST, Pair(16, decode_blocks=2000))
    assert roomy.lease == 120
    assert tight.verdict is Verdict.DO_NOT
    assert any("too few blocks" in reason for reason in tight.reasons)


def test_without_times_nothing_is_said_of_leases() -> None:
    turns = [Turn("s", 0, 0, 100, 0), Turn("s", 1, 1, 200, 0)]
    advice = advise(ordered(turns, "test", timed=False), MODEL, FAST, PAIR)
    assert advice.verdict is Verdict.UNKNOWN
    assert advice.lease is None


def test_what_decode_computes_itself_costs_its_time_and_no_prefill() -> None:
    """Turn 2 adds 901 tokens, which take 90 ms."""
    traffic = conversations(1, 2, gap=1)
    outcome = play(
        traffic, MODEL, FAST, lease=60, block=16, threshold=64, appends=Appends(tokens=901)
    )
    assert (outcome.appends, outcome.pulls) == (1, 0)
    assert outcome.seconds_with == pytest.approx(0.1)
    assert outcome.append_seconds == outcome.longest_append == pytest.approx(0.0901)
    assert outcome.saved == pytest.approx(0.1099)


@pytest.mark.parametrize(("stall", "appends"), [(0.09, 0), (0.091, 1)])
def test_a_longer_addition_is_decode_s_if_its_streams_wait_little(
    stall: float, appends: int
) -> None:
    traffic = conversations(1, 2, gap=1)
    rule = Appends(tokens=64, stall=stall)
    assert (
        play(traffic, MODEL, FAST, lease=60, block=16, threshold=64, appends=rule).appends
        == appends
    )


def test_beside_a_prefill_cache_that_holds_everything_appends_may_still_pay() -> None:
    """Each turn saves a leg of prefill, and its tokens are computed on decode instead."""
    costs = Costs(FAST.flops_per_second, FAST.bytes_per_second, overhead=0.1, pull_overhead=0.01)
    pair = Pair(16, 100_000, None, PrefillCache(tokens=1e9), appends=Appends(2000))
    traffic = conversations(10, 5, gap=5)
    advice = advise(traffic, MODEL, costs, pair)
    assert advice.verdict is Verdict.ADOPT
    assert advice.chosen is not None
    assert advice.chosen.appends == 40
    assert any("80% of the turns skip prefill" in reason for reason in advice.reasons)
    without = advise(traffic, MODEL, costs, replace(pair, appends=Appends()))
    assert without.verdict is Verdict.DO_NOT


def test_a_link_too_slow_for_pulls_leaves_what_decode_computes_itself() -> None:
    slow = Costs(FAST.flops_per_second, 1e8)
    pair = Pair(16, 100_000, 1000, appends=Appends(2000))
    advice = advise(conversations(10, 5, gap=5), MODEL, slow, pair)
    assert advice.verdict is Verdict.ADOPT
    assert advice.threshold is None
    assert advice.chosen is not None
    assert (advice.chosen.pulls, advice.chosen.appends) == (0, 40)
