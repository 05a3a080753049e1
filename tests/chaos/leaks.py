"""What a fault left behind, counted from outside: on workers, in Redis, in the kernel, in proxies.

Five things that an ended turn must not leave: a running request, pinned blocks that no record in
the table owns, a claimed handle that was neither pulled nor released, an open connection, a task.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

import aiohttp
import psutil
import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from proxy.session.holding import decode
from proxy.session.table import stored_record
from tests.chaos.worker import ChaosWorker

_ANSWERS_WITHIN = 30.0
"""Seconds beyond its time for which a count waits for Redis and the proxies on a busy machine."""

_FAILED = re.compile(r'^kvloop_table_failures_total\{operation="(\w+)"\} (\S+)$', re.M)

_OPEN = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)

Link = tuple[Any, Any]
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
    """Between clients and proxies, and between proxies and workers."""
    tasks: int = 0
    """In proxies: background work, and event-loop tasks beyond those of an idle proxy."""

    @property
    def all(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{count} {name}" for name, count in named if count) or "none"


class Served(Protocol):
    """A proxy that can be asked: a process, or one inside the test."""

    @property
    def url(self) -> str: ...

    @property
    def metrics_url(self) -> str: ...

    @property
    def serving(self) -> bool: ...


class TableWatch:
    """Knows which handles are in the table, and which have ever been."""

    def __init__(self, redis_url: str) -> None:
        # Redis is what may be killed: a look must not wait for it for ever.
        self._redis = redis_asyncio.Redis.from_url(redis_url, socket_timeout=10)
        self.ever: set[PinId] = set()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_often(), name="table watch")

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is not None:
            await self._task
        await self._redis.aclose()

    async def owned(self) -> set[PinId]:
        """Handles in the table now. Raises ``RedisError`` or ``OSError``."""
        found: set[PinId] = set()
        keys = [key async for key in self._redis.scan_iter(match="kvloop:*:h:*", count=1000)]
        for record in await self._redis.mget(keys) if keys else ():
            holding = decode("", stored_record(record)) if record else None
            if holding is not None and holding.handle is not None:
                handle = holding.handle
                found.add((handle["remote_engine_id"], handle["remote_request_id"]))
        self.ever |= found
        return found

    async def _look_often(self) -> None:
        while not self._stopping.is_set():
            with suppress(RedisError, OSError):
                await self.owned()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._stopping.wait()


class LeakCounter:
    """Counts over proxies, scripted workers and the table."""

    def __init__(
        self,
        proxies: Sequence[Served],
        workers: Sequence[ChaosWorker],
        table: TableWatch,
        *,
        margin: float,
        probe_seconds: float,
    ) -> None:
        """``margin``: seconds before its end from which a pin needs no owner, as records expire.

        ``probe_seconds``: a connection open for less may be a health probe's.
        """
        self.proxies = proxies
        self._workers = workers
        self._table = table
        self._margin = margin
        self._probe_seconds = probe_seconds
        self._idle_tasks: dict[str, float] = {}
        self.open: set[Link] = set()
        """The connections that the last look counted."""
        self.ownerless: set[PinId] = set()
        """The pins that the last look counted."""

    async def note_idle(self) -> None:
        """Take the tasks that run now as those of an idle proxy."""
        for each in self.proxies:
            numbers = await gauges(each.metrics_url)
            self._idle_tasks[each.url] = numbers["kvloop_event_loop_tasks"]

    def told(self) -> list[str]:
        """What the last look counted, by name: pins, and connections that are still open."""
        names = {_port(each.url): "proxy" for each in self.proxies}
        names |= {each.port: f"{each.role} {each.engine_id}" for each in self._workers}
        pinned_for = self._workers[0].cluster.pinned_for
        pins = (f"pin of {pinned_for.get(pin)}" for pin in sorted(self.ownerless))
        return [*pins, *named(self.open, names)]

    def extra_tasks(self, proxy: Served, numbers: dict[str, float]) -> int:
        """Tasks in the event loop beyond those of the idle proxy."""
        idle = self._idle_tasks[proxy.url]
        return max(0, int(numbers["kvloop_event_loop_tasks"] - idle))

    async def count(self) -> Leaks:
        """One look. Raises ``RedisError`` or ``OSError`` when Redis or a proxy does not answer."""
        running = sum(each.open_requests for each in self._workers)
        tasks = 0
        serving = [each for each in self.proxies if each.serving]
        for each in serving:
            numbers = await gauges(each.metrics_url)
            running += int(numbers["kvloop_turns_in_flight"] + numbers["kvloop_turns_queued"])
            tasks += int(numbers["kvloop_background_tasks"]) + self.extra_tasks(each, numbers)
        clients_of = {_port(each.url) for each in serving}
        workers = {each.port for each in self._workers}
        self.open = open_connections(clients_of, workers)
        if self.open and self._probe_seconds:
            await asyncio.sleep(self._probe_seconds)
            self.open &= open_connections(clients_of, workers)
        owned = await self._table.owned()
        pins = {pin for each in self._workers for pin in each.pins_beyond(self._margin)}
        self.ownerless = pins - owned
        claimed = self.ownerless & self._table.ever
        pins = self.ownerless - claimed
        return Leaks(running, len(pins), len(claimed), len(self.open), tasks)


async def settled(count: Callable[[], Awaitable[Leaks]], within: float) -> Leaks:
    """Look until nothing is left or ``within`` seconds are over; the last look."""
    until = time.monotonic() + within
    while True:
        try:
            if (found := await count()).all == 0 or time.monotonic() > until:
                return found
        except (RedisError, aiohttp.ClientError, OSError):
            if time.monotonic() > until + _ANSWERS_WITHIN:
                raise
        await asyncio.sleep(0.1)


async def gauges(url: str) -> dict[str, float]:
    """The samples without labels of a metrics page, asked on a connection that is closed."""
    pairs = (line.rsplit(" ", 1) for line in (await _page(url)).splitlines())
    return {name: float(value) for name, value in pairs if "{" not in name and name[0] != "#"}


async def uncertain(proxies: Sequence[Served]) -> int:
    """How often Redis was too late for a proxy that took or stored a handle.

    It may have obeyed or not: each may have cost a pin that nobody can speak for.
    """
    found = 0
    for each in proxies:
        if each.serving:
            for operation, count in _FAILED.findall(await _page(each.metrics_url)):
                found += int(float(count)) if operation in ("claim", "commit", "evict") else 0
    return found


async def _page(url: str) -> str:
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=10),
        ) as session,
        session.get(url) as answer,
    ):
        return await answer.text()


def open_connections(clients_of: set[int], workers: set[int]) -> set[Link]:
    """Connections that proxies hold, as the kernel sees them: (our address, the other's)."""
    found: set[Link] = set()
    for link in psutil.net_connections(kind="tcp4"):
        if not link.raddr or link.status not in _OPEN:
            continue
        if link.laddr.port in clients_of or link.raddr.port in workers:
            found.add((link.laddr, link.raddr))
    return found


def named(links: set[Link], names: dict[int, str]) -> list[str]:
    """Connections with the ports' owners, the state and the process of the end that is ours."""
    told = []
    for link in psutil.net_connections(kind="tcp4"):
        if link.raddr and (link.laddr, link.raddr) in links:
            ends = (f"{names.get(end.port, end.port)}" for end in (link.laddr, link.raddr))
            told.append("open " + " -> ".join(ends) + f" {link.status} pid {link.pid}")
    return sorted(told)


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
