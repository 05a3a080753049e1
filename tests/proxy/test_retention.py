"""What a handle is worth, from observed gaps."""

from __future__ import annotations

from typing import Any

from proxy.retention import (
    Entry,
    Groups,
    ReturnTimes,
    budget_blocks,
    by_worth,
    group_of,
    to_give_up,
    worth,
)
from proxy.session.identity import identity_of


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


def entry(id: str, group: str, **more: Any) -> Entry:
    values = {"blocks": 10, "tokens": 160, "usable_seconds": 450.0, **more}
    return Entry(id, group=group, **values)


def taught(**gaps: float | None) -> Groups:
    """Groups whose next turns came after these gaps."""
    groups = Groups()
    for group, gap in gaps.items():
        for _ in range(100):
            groups.learn(group).turn_kept()
            if gap is not None:
                groups.learn(group).turn_came(gap)
    return groups


def test_the_least_valuable_goes_first() -> None:
    """One-shot requests and the agent that has not come back, then chats, then fresh agents."""
    groups = taught(agent=3, chat=50, once=None)
    entries = [
        entry("fresh agent", "agent", since=99),
        entry("chat", "chat", since=90),
        entry("late agent", "agent", since=40),
        entry("one-shot", "once", since=99),
    ]
    ranked = [each.id for each in by_worth(entries, groups, now=100)]
    assert set(ranked[:2]) == {"one-shot", "late agent"}
    assert ranked[2:] == ["chat", "fresh agent"]


def test_before_anything_is_known_the_oldest_goes_first() -> None:
    """And of ages that are told apart by nothing, too."""
    ages = [300, 0.9, 0.1, 20, 3, 0.5, 90]
    ranked = by_worth([entry(str(age), "new", since=-age) for age in ages], Groups(), now=0)
    assert [each.id for each in ranked] == [str(age) for age in sorted(ages, reverse=True)]


def test_what_nobody_can_release_is_not_given_up() -> None:
    """Reservations, and holdings that can be claimed no more: only decode's lease ends those."""
    entries = [entry("reserved", "a", reserved=True), entry("late", "a", usable_seconds=10.0)]
    assert by_worth(entries, Groups(), now=20) == []


def test_a_newcomer_takes_room_only_from_what_is_worth_less() -> None:
    """A one-shot request drives out no agent; an agent drives out one-shot requests."""
    groups = taught(agent=3, once=None)
    entries = [entry("agent", "agent", since=99), entry("one-shot", "once", since=99)]
    for group, expected in (("agent", ["one-shot", "agent"]), ("once", ["one-shot"])):
        newcomer = entry("new", group)
        found = to_give_up(entries, groups, now=99.5, excess=20, must=0, newcomers=[newcomer])
        assert found == expected


def test_as_much_is_given_up_as_is_needed_and_the_rest_of_it_only_for_better() -> None:
    """What exceeds the budget without newcomers goes whatever it is worth."""
    groups = taught(agent=3, once=None)
    entries = [entry(f"agent {n}", "agent", since=90 + n) for n in range(4)]
    assert len(to_give_up(entries, groups, now=99, excess=11, must=0)) == 2
    newcomer = entry("new", "once")
    assert to_give_up(entries, groups, now=99, excess=30, must=-5, newcomers=[newcomer]) == []
    found = to_give_up(entries, groups, now=99, excess=30, must=5, newcomers=[newcomer])
    assert found == [by_worth(entries, groups, now=99)[0].id]
    assert len(to_give_up(entries, groups, now=99, excess=1000, must=0)) == 4


def test_groups_are_bounded_and_forget_the_one_unused_for_longest() -> None:
    groups = Groups(most=3)
    for name in ("a", "b", "c", "a", "d"):
        groups.learn(name).turn_kept()
    assert len(groups) == 3
    untouched = ReturnTimes().kept
    assert groups.of("b").kept == untouched
    assert groups.of("a").kept > untouched


def test_groups_part_tenants_named_and_later_turns() -> None:
    """Nothing in a group's name tells who the tenant is."""
    named = identity_of("m", tenant="acme", conversation="c")
    found = identity_of("m", tenant="acme")
    other = identity_of("m", tenant="other", conversation="c")
    names = {group_of(each, continues=later) for each in (named, found, other) for later in (0, 1)}
    assert len(names) == 6
    assert "acme" not in "".join(names)


def test_the_budget_is_a_share_of_what_decode_would_pin() -> None:
    """Its own limit; without one half of its blocks; unknown as long as nothing is known."""
    assert budget_blocks(share=0.8, pin_limit_blocks=100, kv_blocks=1000) == 80
    assert budget_blocks(share=0.8, pin_limit_blocks=None, kv_blocks=1000) == 400
    assert budget_blocks(share=0.8, pin_limit_blocks=None, kv_blocks=None) is None


def test_leases_follow_the_gaps_within_limits() -> None:
    """Long enough for nearly all next turns, never outside the limits."""
    assert after(200, 50).lease(shortest=10, longest=480) == 60
    assert after(200, 1500).lease(shortest=10, longest=480) == 480
    assert after(1000, 0.5).lease(shortest=10, longest=480) == 10
