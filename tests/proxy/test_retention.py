"""What a handle is worth, from observed gaps."""

from __future__ import annotations

from proxy.retention import ReturnTimes, worth


def after(turns: int, gap: float | None) -> ReturnTimes:
    """Sessions whose next turn always came after ``gap`` seconds, or never."""
    times = ReturnTimes()
    for _ in range(turns):
        times.turn_kept()
        if gap is not None:
            times.turn_came(gap)
    return times


def test_agents_before_chats_before_one_shots() -> None:
    """A fresh handle is worth more the sooner its next turn is expected."""
    fresh = [worth(after(100, gap), age_seconds=0, tokens=320, blocks=10) for gap in (3, 50, None)]
    assert fresh == sorted(fresh, reverse=True)
    assert fresh[0] > 10 * fresh[1] > 10 * fresh[2]


def test_an_agent_that_did_not_return_in_time_is_given_up_before_a_chat() -> None:
    """After a minute of silence the agent's handle is worth less than a chat's of that age."""
    agent, chat = after(100, 3), after(100, 100)
    assert agent.index(0) > chat.index(0)
    assert agent.index(60) < chat.index(60)


def test_leases_follow_the_gaps_within_limits() -> None:
    """Long enough for nearly all next turns, never outside the limits."""
    assert after(200, 50).lease(shortest=10, longest=480) == 60
    assert after(200, 1500).lease(shortest=10, longest=480) == 480
    assert after(1000, 0.5).lease(shortest=10, longest=480) == 10
