"""Places, the queue before them, and the budget for repeats."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import Overloaded
from proxy.metrics import Metrics
from proxy.turn.admission import Admission, RetryBudget


def admission(places: int, queued: int, wait: float = 5) -> Admission:
    return Admission(Metrics(), max_in_flight=places, max_queued=queued, wait_seconds=wait)


async def test_beyond_places_and_queue_a_turn_is_refused_at_once() -> None:
    """One runs, one waits, the third is told to come back; the waiting one is then served."""
    places = admission(1, 1)
    finish = asyncio.Event()
    served: list[int] = []

    async def turn(number: int) -> None:
        async with places.place():
            served.append(number)
            await finish.wait()

    first, second = asyncio.create_task(turn(1)), asyncio.create_task(turn(2))
    while not places.queued:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await turn(3)
    finish.set()
    await asyncio.gather(first, second)

    assert refused.value.code == "queue_full"
    assert served == [1, 2]
    assert (places.in_flight, places.queued) == (0, 0)


async def test_leaving_the_queue_loses_no_place() -> None:
    """Waiters that time out or are cancelled leave the place to others."""
    places = admission(1, 5, wait=0.02)
    async with places.place():
        waiting = asyncio.create_task(places.place().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(Overloaded, match="in time"):
            async with places.place():
                pass
    assert (places.in_flight, places.queued) == (0, 0)
    async with places.place():
        assert places.in_flight == 1


async def test_draining_refuses_new_turns_and_ends_when_the_last_is_done() -> None:
    """``idle`` returns only after the running turn has left."""
    places = admission(2, 2)
    async with places.place():
        places.drain()
        idle = asyncio.create_task(places.idle())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="being stopped"):
            async with places.place():
                pass
        assert not idle.done()
    await asyncio.wait_for(idle, 1)


def test_repeats_are_bounded_by_turns() -> None:
    """After the reserve is spent, five turns earn one repeat at a share of a fifth."""
    budget = RetryBudget(0.2)
    assert sum(budget.spend() for _ in range(50)) == 10
    for _ in range(6):
        budget.turn()
    assert [budget.spend(), budget.spend()] == [True, False]
