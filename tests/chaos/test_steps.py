"""Whoever waits for a step of a turn acts at it, once."""

from __future__ import annotations

from tests.chaos.steps import Step, Steps


def test_a_turn_s_own_step_is_nobody_else_s() -> None:
    steps, seen = Steps(), []

    def act(port: int) -> bool:
        seen.append(port)
        return True

    steps.at(Step.DECODE, "mine", act)
    assert not steps.reached(Step.DECODE, "other", 1)
    assert not steps.reached(Step.PREFILL, "mine", 2)
    assert steps.reached(Step.DECODE, "mine", 3)
    assert not steps.reached(Step.DECODE, "mine", 4)
    assert seen == [3]
    assert not steps.awaited


def test_the_next_of_a_step_is_waited_for_until_somebody_acts() -> None:
    """The count of leaks asks Redis too: it is passed over, and the next one taken."""
    steps = Steps()
    steps.at_next(Step.TABLE, lambda port: port == 7)
    assert not steps.reached(Step.TABLE, "", 6)
    assert steps.awaited
    assert steps.reached(Step.TABLE, "", 7)
    assert not steps.awaited
    steps.at_next(Step.TABLE, lambda port: True)
    steps.forget(Step.TABLE)
    assert not steps.reached(Step.TABLE, "", 7)
