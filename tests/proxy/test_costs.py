"""What legs are expected to cost, and which route follows from it."""

from __future__ import annotations

import random

import pytest

from proxy.session.fingerprint import PromptTokens
from proxy.turn.expectation import Expected, Situation, append_work, expect, pull_work
from proxy.turn.plan import ColdPrefill, DecodeLocalAppend, PrefillWithPull, TurnPlan
from proxy.turn.planner import Append, HolderState, Limits, plan_turn
from proxy.turn.reasons import Reason
from proxy.workers.costs import LegCosts, Work
from proxy.workers.prefixes import PrefixGuess
from tests.proxy.test_planner import best_match, holding


def truth(work: Work) -> float:
    """A worker: 20 ms, 0.1 ms a token, attention, 10 ms and 0.02 ms a token for a pull."""
    attention = 2e-8 * work.computed * (work.context + work.computed / 2)
    moved = 0.01 + 2e-5 * work.moved if work.moved else 0
    return 0.02 + 1e-4 * (work.computed + work.ahead) + attention + moved


def taught(legs: int = 60, *, noise: float = 0.0, seed: int = 1) -> LegCosts:
    dice = random.Random(seed)
    costs = LegCosts()
    for number in range(legs):
        context = dice.randrange(0, 4000)
        moved = context if number % 2 else 0
        work = Work(dice.randrange(20, 1000), context, moved)
        costs.observe(work, truth(work) * dice.uniform(1 - noise, 1 + noise), float(number))
    return costs


@pytest.mark.parametrize(
    "work",
    [Work(20, 3000), Work(900), Work(2000), Work(100, 3000, 3000), Work(400, 1000, 1000)],
)
def test_costs_are_learnt_from_legs(work: Work) -> None:
    """After sixty noisy legs the expectation is within a tenth, or a few milliseconds."""
    expected = taught(noise=0.1).expect(work, 60.0)
    assert expected == pytest.approx(truth(work), rel=0.1, abs=0.006)


def test_nothing_is_expected_of_what_was_not_seen() -> None:
    """No legs, no legs with a transfer, far larger ones, or only old ones: unknown."""
    costs = LegCosts()
    assert costs.expect(Work(10), 0.0) is None
    for number in range(20):
        costs.observe(Work(100, 100), truth(Work(100, 100)), float(number))
    assert costs.expect(Work(100), 20.0) is not None
    assert costs.expect(Work(100, 0, 50), 20.0) is None
    assert costs.expect(Work(4000), 20.0) is None
    assert costs.expect(Work(100), 1000.0) is None


def test_one_stall_does_not_bend_what_is_known() -> None:
    """A leg a hundred times too long changes the expectation by less than half."""
    costs = taught()
    before = costs.expect(Work(200, 1000), 60.0)
    assert before is not None
    costs.observe(Work(200, 1000), before * 100, 60.0)
    after = costs.expect(Work(200, 1000), 60.0)
    assert after is not None
    assert after < before * 1.5


def test_a_lasting_change_is_followed() -> None:
    """A worker that became three times slower is known to be so after thirty legs."""
    costs = taught()
    dice = random.Random(3)
    for number in range(30):
        work = Work(dice.randrange(20, 1000), 500)
        costs.observe(work, 3 * truth(work), 60.0 + number)
    assert costs.expect(Work(500, 500), 90.0) == pytest.approx(3 * truth(Work(500, 500)), rel=0.25)


def test_hundreds_of_legs_a_second_are_followed_with_few_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The route of each turn asks; a fit for each would cost more than all else of a turn."""
    costs = taught()
    fits = 0
    fit = LegCosts._fit

    def counted(self: LegCosts, now: float) -> None:
        nonlocal fits
        fits += 1
        fit(self, now)

    monkeypatch.setattr(LegCosts, "_fit", counted)
    dice = random.Random(4)
    for number in range(1000):
        work = Work(dice.randrange(20, 1000), 500)
        costs.observe(work, 3 * truth(work), 60.0 + number / 500)
        costs.expect(work, 60.0 + number / 500)
    assert fits <= 25
    assert costs.expect(Work(500, 500), 62.0) == pytest.approx(3 * truth(Work(500, 500)), rel=0.25)


def test_a_queue_counts_as_work_before_the_turns_own() -> None:
    costs = taught()
    alone, behind = costs.expect(Work(100, 500), 60.0), costs.expect(Work(100, 500, 0, 2000), 60.0)
    assert alone is not None
    assert behind is not None
    assert behind - alone == pytest.approx(0.2, rel=0.2)


def words(count: int, first: int = 1000) -> list[int]:
    return [first + number % 5000 for number in range(count)]


def test_the_prefix_guess_keeps_beginnings() -> None:
    """What was sent is found again as far as it is equal; beginnings are given up last."""
    guess = PrefixGuess()
    prompt = PromptTokens(b"n", words(640))
    guess.sent(prompt.fingerprint)
    assert guess.cached(prompt.fingerprint) == pytest.approx(640, abs=80)
    half = PromptTokens(b"n", [*words(320), 1, *words(400)])
    assert guess.cached(half.fingerprint) == pytest.approx(320, abs=80)
    assert guess.cached(PromptTokens(b"m", words(640)).fingerprint) == 0
    guess.sized(64 * 12)
    other = PromptTokens(b"n", words(320, first=7000))
    guess.sent(other.fingerprint)
    assert guess.cached(other.fingerprint) == pytest.approx(320, abs=80)
    assert 320 <= guess.cached(prompt.fingerprint) <= 640
    more = PromptTokens(b"n", words(640, first=3000))
    guess.sent(more.fingerprint)
    assert guess.cached(prompt.fingerprint) == 0
    guess.clear()
    assert guess.cached(more.fingerprint) == 0


def test_the_prefix_guess_of_long_prompts_is_right_to_a_thirtieth() -> None:
    """And takes few entries, though the limit counts all spans."""
    guess = PrefixGuess()
    long = words(80_000)
    guess.sent(PromptTokens(b"n", long).fingerprint)
    assert len(guess._spans) < 250
    for length in (2_000, 10_000, 60_000):
        prompt = PromptTokens(b"n", [*long[:length], 1, *long])
        assert length * 0.93 - 100 < guess.cached(prompt.fingerprint) <= length * 1.01
    guess.sized(40_000)
    guess.sent(PromptTokens(b"n", long).fingerprint)
    assert guess.cached(PromptTokens(b"n", long).fingerprint) <= 40_000 * 1.25


def test_a_pull_is_only_expected_of_what_prefill_has_not() -> None:
    """With most of the history in prefill's own cache there is nothing worth reading."""
    turn = Situation(prompt=1000, pullable=900, prefill_cached=640, decode_cached=0)
    assert pull_work(turn) == Work(100, 900, 260)
    turn = Situation(prompt=1000, pullable=900, prefill_cached=896, decode_cached=0)
    assert pull_work(turn) == Work(104, 896)
    assert append_work(turn) is None


def test_routes_without_known_legs_have_no_expected_cost() -> None:
    turn = Situation(prompt=1000, pullable=900, prefill_cached=0, decode_cached=900, append=104)
    costs = taught()

    def known(work: Work) -> float | None:
        return costs.expect(work, 60.0)

    found = expect(turn, prefill=known, decode=known, decode_compute=lambda _: None)
    assert found.cold is not None
    assert found.pull is not None
    assert found.pull < found.cold
    assert found.append is not None
    assert found.append_stall is None
    nothing = expect(turn, prefill=lambda _: None, decode=known, decode_compute=known)
    assert (nothing.cold, nothing.pull) == (None, None)


def planned(
    *,
    tokens: int,
    others: int = 0,
    expected: Expected | None = None,
    limits: Limits | None = None,
    groups: int = 1,
    grown: int = 300,
) -> TurnPlan:
    match = best_match(PromptTokens(b"n", [1000] * grown), [holding([1000] * 200, groups=groups)])
    assert match is not None
    return plan_turn(
        match=match,
        holder=HolderState(True, "1", 16),
        limits=limits or Limits(append_tokens=64, append_stall_seconds=0.1),
        append=Append(tokens, others),
        expected=expected,
    )


def test_fixed_rules_hold_until_costs_are_known() -> None:
    """A short new part is appended, a long one pulled, even if the other's cost is known."""
    assert planned(tokens=64).reason == Reason.SHORT_APPEND
    assert isinstance(planned(tokens=65), PrefillWithPull)
    assert planned(tokens=64, expected=Expected(cold=0.1, pull=0.01)).reason == Reason.SHORT_APPEND
    assert isinstance(planned(tokens=65, expected=Expected(append=0.01)), PrefillWithPull)
    fixed = Limits(append_tokens=64, by_cost=False)
    dear = Expected(cold=1, pull=0.1, append=9, append_stall=0)
    assert isinstance(planned(tokens=64, expected=dear, limits=fixed), DecodeLocalAppend)
    assert isinstance(planned(tokens=5, limits=Limits(append_tokens=0)), PrefillWithPull)


def test_the_cheapest_known_route_is_taken() -> None:
    """Whatever the fixed rules say, and the plan says that costs decided."""
    plan = planned(tokens=500, expected=Expected(cold=1, pull=0.5, append=0.2, append_stall=0.1))
    assert plan.reason == Reason.APPEND_CHEAPEST
    plan = planned(tokens=20, expected=Expected(cold=1, pull=0.2, append=0.5, append_stall=0.1))
    assert isinstance(plan, PrefillWithPull)
    plan = planned(tokens=500, expected=Expected(cold=0.1, pull=0.5))
    assert isinstance(plan, ColdPrefill)
    assert plan.reason == Reason.COLD_CHEAPEST
    assert plan.release is not None


def test_two_routes_that_cost_the_same_do_not_take_turns() -> None:
    """The fixed rules' route stays until another one is clearly cheaper."""
    near = Expected(cold=1, pull=0.5, append=0.49, append_stall=0.0)
    assert isinstance(planned(tokens=500, expected=near), PrefillWithPull)


def test_running_streams_are_not_held_up_for_longer_than_allowed() -> None:
    """The bound counts only beside other requests; unknown, the fixed length is the bound."""
    costs = Expected(cold=1, pull=0.5, append=0.2, append_stall=0.15)
    assert isinstance(planned(tokens=500, expected=costs), DecodeLocalAppend)
    assert isinstance(planned(tokens=500, others=1, expected=costs), PrefillWithPull)
    assert isinstance(planned(tokens=64, others=9), DecodeLocalAppend)
    unknown = Expected(cold=1, pull=0.5)
    assert isinstance(planned(tokens=65, others=1, expected=unknown), PrefillWithPull)


def test_an_append_needs_no_cut() -> None:
    """Several cache groups cannot be cut, but decode's own cache needs no cutting."""
    plan = planned(tokens=10, groups=2, grown=150)
    assert isinstance(plan, DecodeLocalAppend)
    assert planned(tokens=100, groups=2, grown=150).reason == Reason.UNCUTTABLE
