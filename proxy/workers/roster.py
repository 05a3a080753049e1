"""[io] Who is in the pool: what the sources name, changed by what operators asked for.

What operators change (admin API) lies in Redis, so that all proxies follow and a restarted one
does too. While Redis does not answer, the last known changes hold.

A worker that its source no longer names gets no new turns but stays while it answers, until what it
keeps for conversations has run out: they are pulled from it to where their next turn goes. One that
an operator removes is gone at once; turns that run on it go on.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from proxy import log
from proxy.errors import TableUnavailable
from proxy.session.table import SessionTable
from proxy.tasks import end
from proxy.workers.health import HealthLoop
from proxy.workers.pool import Pool, Role, Worker
from proxy.workers.sources import Named, Sources


@dataclass(frozen=True, slots=True)
class Change:
    """What operators want of one worker, as stored in Redis."""

    url: str
    role: str
    added: bool = False
    draining: bool = False
    removed: bool = False

    @classmethod
    def read(cls, record: bytes) -> Change | None:
        try:
            return cls(**orjson.loads(record))
        except (orjson.JSONDecodeError, TypeError):
            return None  # written by another version


class Roster:
    """Keeps the pool as the sources and operators want it."""

    def __init__(
        self,
        sources: Sources,
        pool: Pool,
        health: HealthLoop,
        table: SessionTable,
        *,
        interval: float,
        keep_leaving: float,
    ) -> None:
        self._sources = sources
        self._pool = pool
        self._health = health
        self._table = table
        self._interval = interval
        self._keep_leaving = keep_leaving
        self._changes: dict[str, Change] = {}
        self._leaving: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="roster")

    async def stop(self) -> None:
        if self._task is not None:
            await end([self._task])

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.refresh()
            except Exception:
                log.exception("roster_failed")

    async def refresh(self) -> None:
        """Bring the pool up to date."""
        async with self._busy:
            named = await self._sources.read()
            try:
                stored = await self._table.worker_changes()
                found = {name: Change.read(record) for name, record in stored.items()}
                self._changes = {name: change for name, change in found.items() if change}
            except TableUnavailable:
                pass
            self._tell(self._sources.errors)
            self._apply(named)

    def _apply(self, named: dict[str, Named]) -> None:
        wanted = dict(named)
        for name, change in self._changes.items():
            if change.removed:
                wanted.pop(name, None)
            elif change.added and name not in wanted:
                wanted[name] = Named(change.url, Role(change.role), "admin")
        for name, each in wanted.items():
            worker = self._pool.get(name)
            if worker is None:
                worker = Worker(each.url, each.role, name, source=each.source)
                self._pool.add(worker)
                self._health.watch(worker)
                log.event("worker_added", worker=name, role=each.role, source=each.source)
            self._leaving.pop(name, None)
            self._drain(worker, name in self._changes and self._changes[name].draining)
        for worker in self._pool.workers:
            if worker.name not in wanted:
                self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        change = self._changes.get(worker.name)
        since = self._leaving.setdefault(worker.name, time.monotonic())
        over = time.monotonic() - since >= self._keep_leaving
        if over or not worker.healthy or (change is not None and change.removed):
            self._pool.remove(worker.name)
            self._health.forget(worker)
            del self._leaving[worker.name]
            log.event("worker_removed", worker=worker.name, role=worker.role)
        else:
            self._drain(worker, True)

    def _drain(self, worker: Worker, draining: bool) -> None:
        if worker.draining != draining:
            worker.draining = draining
            log.event("worker_draining" if draining else "worker_serving", worker=worker.name)

    def _tell(self, errors: dict[str, str]) -> None:
        for source, error in errors.items():
            if self._said.get(source) != error:
                log.event("worker_source_failed", source=source, error=error)
        self._said = dict(errors)

    @property
    def source_errors(self) -> dict[str, str]:
        return dict(self._sources.errors)

    # What operators ask for. Each raises ``TableUnavailable``, and then nothing has changed.

    async def add(self, url: str, role: Role) -> str:
        """Add a worker in every proxy on this Redis; its name."""
        name = Named(url, role, "admin").name
        await self._store(name, Change(url, role.value, added=True))
        return name

    async def drain(self, name: str, draining: bool) -> bool:
        """Stop, or resume, giving it turns. False: there is no such worker."""
        worker = self._pool.get(name)
        if worker is None:
            return False
        change = self._changes.get(name) or Change(worker.url, worker.role.value)
        await self._store(name, _changed(change, draining=draining))
        return True

    async def remove(self, name: str) -> bool:
        """Take it out at once, until it is added again. False: there is no such worker."""
        worker = self._pool.get(name)
        if worker is None:
            return False
        await self._store(name, Change(worker.url, worker.role.value, removed=True))
        return True

    async def _store(self, name: str, change: Change) -> None:
        idle = not (change.added or change.draining or change.removed)
        record = None if idle else orjson.dumps(asdict(change))
        await self._table.set_worker_change(name, record)
        await self.refresh()


def _changed(change: Change, **fields: Any) -> Change:
    return Change(**{**asdict(change), **fields})
