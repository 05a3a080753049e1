"""[io] The fleet-wide switch: one Redis key turns reuse off in every proxy within a second.

``kvloop reuse off`` writes the key. While Redis does not answer the last known state holds: without
Redis there is no reuse anyway.
"""

from __future__ import annotations

import asyncio

from proxy import log
from proxy.errors import TableUnavailable
from proxy.metrics import Metrics
from proxy.session.table import SessionTable
from proxy.tasks import end
from proxy.turn.conductor import Conductor

_POLL_SECONDS = 1.0
"""Longest time until a proxy follows. One GET a second and proxy is nothing to Redis."""


class ReuseSwitch:
    """Polls the key and tells the conductor."""

    def __init__(
        self, table: SessionTable, conductor: Conductor, metrics: Metrics, *, allowed: bool
    ) -> None:
        self._table = table
        self._conductor = conductor
        self._metrics = metrics
        self._allowed = allowed
        self._task: asyncio.Task[None] | None = None
        self._set(allowed)

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll(), name="reuse switch")

    async def stop(self) -> None:
        if self._task is not None:
            await end([self._task])

    async def _poll(self) -> None:
        while True:
            try:
                wanted = self._allowed and not await self._table.reuse_is_off()
            except TableUnavailable:
                wanted = self._conductor.reuse_on
            if wanted != self._conductor.reuse_on:
                log.event("reuse_switched", on=wanted)
                self._set(wanted)
            await asyncio.sleep(_POLL_SECONDS)

    def _set(self, on: bool) -> None:
        self._conductor.reuse_on = on
        self._metrics.reuse_enabled.set(int(on))
