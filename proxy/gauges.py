"""[io] Gauges that mirror the state of this process: workers, places, session table.

They are set when somebody asks for the metrics and every second besides: with several processes
the one that is asked shows what the others wrote last.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

from proxy.errors import TableUnavailable
from proxy.metrics import PAUSES, Metrics
from proxy.session.table import SessionTable
from proxy.tasks import end
from proxy.turn.conductor import Conductor
from proxy.workers.pool import Pool, Role

_EVERY = 1.0
_TABLE_EVERY = 5.0
"""Seconds between two questions to Redis about its size. Prometheus asks about as often."""


class StateGauges:
    """``start`` and ``stop`` with the app; ``refresh`` before a page of metrics is made."""

    def __init__(
        self, metrics: Metrics, pool: Pool, conductor: Conductor, table: SessionTable
    ) -> None:
        self._metrics = metrics
        self._pool = pool
        self._conductor = conductor
        self._table = table
        self._tasks: list[asyncio.Task[None]] = []
        self._shown: set[tuple[str, str]] = set()

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._repeat(), name="gauges"),
            asyncio.create_task(self._watch_table(), name="table gauges"),
        ]

    async def stop(self) -> None:
        await end(self._tasks)

    def refresh(self) -> None:
        """What can be read without asking anybody."""
        metrics, now = self._metrics, time.monotonic()
        metrics.in_flight.set(self._conductor.admission.in_flight)
        metrics.queued.set(self._conductor.admission.queued)
        metrics.background_tasks.set(self._conductor.background_tasks)
        metrics.event_loop_tasks.set(len(asyncio.all_tasks()))
        self._forget_gone()
        for worker in self._pool.workers:
            labels = (worker.name, str(worker.role))
            metrics.worker_healthy.labels(*labels).set(int(worker.healthy))
            metrics.worker_outstanding.labels(*labels).set(worker.outstanding)
            paused = metrics.worker_paused
            paused.labels(*labels, "breaker").set(int(not worker.in_favour(now)))
            if worker.role is Role.PREFILL:
                paused.labels(*labels, "pulls").set(int(not worker.pulls_allowed(now)))
            else:
                paused.labels(*labels, "transfers").set(int(not worker.transfers_allowed(now)))

    def _forget_gone(self) -> None:
        """A worker that left the pool has no state; its series would stay at the last one."""
        present = {(each.name, str(each.role)) for each in self._pool.workers}
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):  # there series cannot be removed
            metrics = self._metrics
            for labels in self._shown - present:
                for gauge in (metrics.worker_healthy, metrics.worker_outstanding):
                    gauge.remove(*labels)
                for kind in PAUSES:
                    metrics.worker_paused.remove(*labels, kind)
        self._shown = present

    async def refresh_table(self) -> None:
        """Ask Redis how large it is. An outage shows as ``kvloop_table_up`` 0."""
        size = None
        with suppress(TableUnavailable):
            size = await self._table.size()
        self._metrics.table_up.set(int(size is not None))
        if size is not None:
            self._metrics.table_keys.set(size.keys)
            self._metrics.table_memory.set(size.memory_bytes)

    async def _repeat(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(_EVERY)

    async def _watch_table(self) -> None:
        while True:
            await self.refresh_table()
            await asyncio.sleep(_TABLE_EVERY)
