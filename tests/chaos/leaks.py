"""What a fault left behind, counted from outside: on workers, in Redis, in the kernel, in proxies.

Five things that an ended turn must not leave: a running request, pinned blocks that no record in
the table owns, a claimed handle that was neither pulled nor released, an open connection, a task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Protocol

import aiohttp
import psutil
import redis.asyncio as redis_asyncio

from proxy.session.holding import decode
from proxy.session.table import stored_record
from tests.chaos.worker import ChaosWorker

PinId = tuple[str, str]
"""Engine id and request id: what a handle names."""


@dataclass(frozen=True)
class Leaks:
    """Counts; all zero means that nothing was left."""

    running: int = 0
    """Requests on workers, and turns that proxies still count."""
    pins: int = 0
    """Handles that decode keeps blocks for and that were never in the table."""
    claimed: int = 0
    """Handles that were taken out of the table, and that decode still keeps blocks for."""
    connections: int = 0
    """Between clients and proxies, and between proxies and workers beyond one for the probes."""
    tasks: int = 0
    """In proxies: background work, and event-loop tasks beyond those of an idle proxy."""

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{count} {name}" for name, count in named if count) or "none"


class Served(Protocol):
    """A proxy that can be asked: a process, or one inside the test."""

    @property
    def url(self) -> str: ...

    @property
    def serving(self) -> bool: ...


class TableWatch:
    """Knows which handles are in the table, and which have ever been."""

    def __init__(self, redis_url: str) -> None:
        self._redis = redis_asyncio.Redis.from_url(redis_url)
        self.ever: set[PinId] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_often(), name="table watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._redis.aclose()

    async def owned(self) -> set[PinId]:
        """Handles in the table now; none when Redis does not answer."""
        found: set[PinId] = set()
        async with asyncio.timeout(5):
            async for key in self._redis.scan_iter(match="kvloop:*:h:*", count=1000):
                record = await self._redis.get(key)
                holding = decode("", stored_record(record)) if record else None
                if holding is not None and holding.handle is not None:
                    handle = holding.handle
                    found.add((handle["remote_engine_id"], handle["remote_request_id"]))
        self.ever |= found
        return found

    async def _look_often(self) -> None:
        while True:
            try:
                await self.owned()
            except (redis_asyncio.RedisError, OSError, TimeoutError):
                pass  # Redis is what is being killed
            await asyncio.sleep(0.05)


class LeakCounter:
    """Counts over proxies, scripted workers and the table."""

    def __init__(
        self, proxies: Sequence[Served], workers: Sequence[ChaosWorker], table: TableWatch
    ) -> None:
        self._proxies = proxies
        self._workers = workers
        self._table = table
        self._idle_tasks: dict[str, float] = {}

    async def note_idle(self) -> None:
        """Take the tasks that run now as those of an idle proxy."""
        for each in self._proxies:
            numbers = await gauges(each.url)
            self._idle_tasks[each.url] = numbers["kvloop_event_loop_tasks"]

    async def count(self) -> Leaks:
        """One look; what a turn or a probe holds at this moment is counted too."""
        running = sum(each.open_requests for each in self._workers)
        tasks = 0
        serving = [each for each in self._proxies if each.serving]
        for each in serving:
            numbers = await gauges(each.url)
            running += int(numbers["kvloop_turns_in_flight"] + numbers["kvloop_turns_queued"])
            extra = numbers["kvloop_event_loop_tasks"] - self._idle_tasks[each.url]
            tasks += int(numbers["kvloop_background_tasks"]) + max(0, int(extra))
        owned = await self._table.owned()
        ownerless = {pin for each in self._workers for pin in each.live_pins} - owned
        claimed = ownerless & self._table.ever
        return Leaks(
            running=running,
            pins=len(ownerless - claimed),
            claimed=len(claimed),
            connections=open_connections(
                clients_of={_port(each.url) for each in serving},
                workers={each.port for each in self._workers},
                probes=len(serving),
            ),
            tasks=tasks,
        )


async def settled(count: Callable[[], Awaitable[Leaks]], within: float) -> Leaks:
    """Look until nothing is left or ``within`` seconds are over; the last look."""
    until = time.monotonic() + within
    while (found := await count()).total and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return found


async def gauges(url: str) -> dict[str, float]:
    """The samples without labels of a proxy's ``/metrics``, on a connection that is closed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        async with session.get(url + "/metrics") as answer:
            page = await answer.text()
    pairs = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "{" not in name}


def open_connections(clients_of: set[int], workers: set[int], probes: int) -> int:
    """Connections that proxies hold, as the kernel sees them.

    Each proxy keeps one connection to each worker alive by its probes: ``probes`` proxies may.
    """
    to_worker = dict.fromkeys(workers, 0)
    from_clients = 0
    for link in psutil.net_connections(kind="tcp4"):
        if link.status not in (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT):
            continue
        if link.laddr.port in clients_of:
            from_clients += 1
        if link.raddr and link.raddr.port in to_worker:
            to_worker[link.raddr.port] += 1
    return from_clients + sum(max(0, count - probes) for count in to_worker.values())


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def total(found: Iterable[Leaks]) -> Leaks:
    return Leaks(*(sum(column) for column in zip(*map(astuple, found), strict=True)))
