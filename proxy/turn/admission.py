"""[io] Places for turns: how many run at once, how many wait, and none while draining.

Overload is answered, not suffered: beyond the places a turn waits in a short queue, beyond that it
is refused at once. FIFO: a newcomer never overtakes one that waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from proxy.errors import Overloaded
from proxy.metrics import Metrics

_DRAINING_RETRY_SECONDS = 5
"""Time for a load balancer to notice that this replica is leaving."""


class Admission:
    """``async with admission.place():`` around a turn."""

    def __init__(
        self, metrics: Metrics, *, max_in_flight: int, max_queued: int, wait_seconds: float
    ) -> None:
        self._metrics = metrics
        self._places = max_in_flight
        self._max_queued = max_queued
        self._wait = wait_seconds
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.draining = False

    @property
    def queued(self) -> int:
        return sum(not each.done() for each in self._waiting)

    def drain(self) -> None:
        """From now on every new turn is refused; those that wait or run are served."""
        self.draining = True

    async def idle(self) -> None:
        """Return when no turn runs or waits."""
        await self._idle.wait()

    def place(self) -> Place:
        """Entering raises ``Overloaded``. Leaving the block gives the place to the next in line."""
        return Place(self)

    async def enter(self) -> None:
        if self.draining:
            self._metrics.refused_turns.labels("draining").inc()
            raise Overloaded(
                "This proxy is being stopped; please try again.",
                code="draining",
                retry_after=_DRAINING_RETRY_SECONDS,
            )
        if self.in_flight < self._places:
            self.in_flight += 1
            self._idle.clear()
        else:
            await self._queue()

    async def _queue(self) -> None:
        if self.queued >= self._max_queued:
            self._metrics.refused_turns.labels("queue_full").inc()
            raise Overloaded(
                "Too many requests; please try again.", code="queue_full", retry_after=1
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._wait):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.leave()  # the place came in the same moment: pass it on
            else:
                place.cancel()
                self._waiting.remove(place)
            if isinstance(error, TimeoutError):
                self._metrics.refused_turns.labels("queue_timeout").inc()
                raise Overloaded(
                    "No place became free in time; please try again.",
                    code="queue_timeout",
                    retry_after=1,
                ) from None
            raise

    def leave(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)  # in_flight stays: the place changes hands
                return
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()


class Place:
    """``async with``: a turn's place."""

    __slots__ = ("_admission",)

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __aenter__(self) -> None:
        await self._admission.enter()

    async def __aexit__(self, *how: object) -> None:
        self._admission.leave()


class RetryBudget:
    """Repeats per turn, in the long run at most ``share``, with a reserve for single mishaps."""

    RESERVE = 10.0
    """Repeats a quiet proxy may make at once; fewer would fail turns when one worker dies."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = self.RESERVE

    def turn(self) -> None:
        self._saved = min(self.RESERVE, self._saved + self._share)

    def spend(self) -> bool:
        """May a leg be repeated?"""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
