"""[io] Giving decode's blocks back when nobody will pull them."""

from __future__ import annotations

import time

from proxy import log
from proxy.errors import WorkerError, WorkerFailed
from proxy.metrics import Metrics
from proxy.session.holding import Holding
from proxy.settings import Settings
from proxy.turn import wire
from proxy.turn.background import Background
from proxy.workers.client import WorkerClient, refused_connection
from proxy.workers.pool import Pool, Role
from proxy.workers.verdicts import Verdicts

_TIMEOUT = 30.0
_NOBODY = "no_prefill_worker"
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
        """Have a prefill worker tell decode that the blocks are free.

        While nobody can carry it, it is tried again until the lease is about to end.
        """
        ends = time.monotonic() + self._pinned_for(holding)
        await self._background.pause(pause)
        result = await self._sent(model, holding, avoid)
        again = self._settings.pull_pause_seconds
        while result == _NOBODY and time.monotonic() + again < ends and self._pinned(holding):
            last = self._background.closing
            await self._background.pause(again)
            result = await self._sent(model, holding, avoid)
            if last:
                break
        self._metrics.releases.labels(result).inc()

    def _pinned_for(self, holding: Holding) -> float:
        """Seconds for which the blocks are certainly still this holding's."""
        lease = (holding.handle or {}).get("kvloop_lease_seconds")
        if not isinstance(lease, (int, float)):
            lease = self._settings.decode_kv_ttl_seconds
        age = max(0.0, time.time() - holding.kept_at) if holding.kept_at else 0.0
        return float(lease) - age - self._settings.expiry_margin_seconds

    def _pinned(self, holding: Holding) -> bool:
        """False when the process that pinned them is gone."""
        holder = self._pool.get(holding.worker)
        return holder is not None and holder.epoch == holding.epoch

    async def _sent(self, model: str, holding: Holding, avoid: str) -> str:
        """Ask one prefill worker after the other until one has taken it; what came of it.

        Only a worker that certainly did nothing is followed by another: to decode a second
        notification for the same blocks looks like a read of blocks that it has freed.
        """
        tried: list[str] = []
        holder = self._pool.get(holding.worker)
        while True:
            now = time.monotonic()
            paused = [each.name for each in self._pool.workers if not each.pulls_allowed(now)]
            worker = self._pool.choose(Role.PREFILL, avoid=[avoid, *paused, *tried], beside=holder)
            if worker is None or worker.name in paused or worker.name in tried:
                return _NOBODY
            try:
                await self._client.call(
                    worker,
                    wire.COMPLETIONS_PATH,
                    wire.release_body(model, holding),
                    timeout=_TIMEOUT,
                )
            except WorkerError as error:
                self._verdicts.pull_failed(worker)
                log.event("release_failed", holding=holding.id, error=str(error))
                if not isinstance(error, WorkerFailed) and not refused_connection(error):
                    return "failed"
                tried.append(worker.name)
            else:
                worker.pull_succeeded()
                return "sent"
