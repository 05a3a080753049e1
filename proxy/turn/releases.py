"""[io] Giving decode's blocks back when nobody will pull them."""

from __future__ import annotations

import time

from proxy import log
from proxy.errors import WorkerError
from proxy.metrics import Metrics
from proxy.session.holding import Holding
from proxy.settings import Settings
from proxy.turn import wire
from proxy.turn.background import Background
from proxy.workers.client import WorkerClient
from proxy.workers.pool import Pool, Role
from proxy.workers.verdicts import Verdicts

_TIMEOUT = 30.0
ABORT_SETTLES = 1.0
"""Seconds between closing a prefill leg's connection and releasing its handle: vLLM must have
aborted the request, or it could still be reading the blocks that decode frees."""


class Releases:
    """Has prefill workers tell decode that blocks are free."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        client: WorkerClient,
        metrics: Metrics,
        background: Background,
        verdicts: Verdicts,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._client = client
        self._metrics = metrics
        self._background = background
        self._verdicts = verdicts

    def later(self, model: str, holding: Holding, *, avoid: str = "", pause: float = 0) -> None:
        """Release in the background, after ``pause`` seconds, not through the worker ``avoid``."""
        work = self.send(model, holding, avoid=avoid, pause=pause)
        self._background.start(work, "release")

    async def send(
        self, model: str, holding: Holding, *, avoid: str = "", pause: float = 0
    ) -> None:
        """Have a prefill worker tell decode that the blocks are free."""
        await self._background.pause(pause)
        result = "no_prefill_worker"
        holder = self._pool.get(holding.worker)
        worker = self._pool.choose(Role.PREFILL, avoid=[avoid], beside=holder)
        if worker is None or not worker.pulls_allowed(time.monotonic()):
            # Nobody can carry it now; the pin outlives most pauses.
            await self._background.pause(self._settings.pull_pause_seconds)
            worker = self._pool.choose(Role.PREFILL, avoid=[avoid], beside=holder)
        if worker is not None and worker.pulls_allowed(time.monotonic()):
            try:
                await self._client.call(
                    worker,
                    wire.COMPLETIONS_PATH,
                    wire.release_body(model, holding),
                    timeout=_TIMEOUT,
                )
                result = "sent"
                worker.pull_succeeded()
            except WorkerError as error:
                result = "failed"
                self._verdicts.pull_failed(worker)
                log.event("release_failed", holding=holding.id, error=str(error))
        self._metrics.releases.labels(result).inc()
