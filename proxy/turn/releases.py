"""[io] Giving decode's blocks back when nobody will pull them.

A release is a prefill request with a handle of which nothing is read. A turn that prefill computes
cold anyway can be that request: what is given up for the budget waits a moment for such turns, so
that under pressure prefill gets no extra requests. Only between workers that have exchanged blocks
before: a handle that prefill cannot handle may hang there, and that must not be a client's turn.
"""

from __future__ import annotations

import time
from itertools import islice

from proxy import log
from proxy.errors import WorkerError, WorkerFailed
from proxy.metrics import Metrics
from proxy.session.holding import Holding
from proxy.settings import Settings
from proxy.turn import wire
from proxy.turn.background import Background
from proxy.workers.client import WorkerClient, refused_connection
from proxy.workers.pairs import why_no_pull
from proxy.workers.pool import Pool, Role, Worker
from proxy.workers.verdicts import Verdicts

_TIMEOUT = 30.0
_NOBODY = "no_prefill_worker"
ABORT_SETTLES = 1.0
"""Seconds between closing a prefill leg's connection and releasing its handle: vLLM must have
aborted the request, or it could still be reading the blocks that decode frees."""
RIDE_SECONDS = 0.2
"""How long a release waits for a turn that takes it along. Longer, and decode keeps what nobody can
use; much shorter than the time between two turns, and none comes."""
_APART = 0.005
"""Seconds between releases that no turn took along: prefill is to compute prompts meanwhile."""
_LOOKED_AT = 4
"""Waiting releases among which a turn looks for one that its prefill worker can send."""
_MOST_PAIRS = 4096


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
        self._waiting: dict[str, tuple[str, Holding]] = {}
        self._sending = False
        self._proven: set[tuple[str, str, str, str]] = set()
        """Pairs of processes, prefill's and decode's name and epoch, that have exchanged blocks."""

    def soon(self, model: str, holding: Holding) -> None:
        """Release with a turn that takes it along, or a moment later without."""
        self._waiting[holding.id] = model, holding
        if not self._sending:
            self._sending = True
            self._background.start(self._send_waiting(), "release")

    def waiting_blocks(self, worker: str, epoch: str) -> int:
        """Blocks that decode still keeps for what waits here."""
        return sum(
            holding.block_count
            for _, holding in self._waiting.values()
            if (holding.worker, holding.epoch) == (worker, epoch)
        )

    def take_along(self, prefill: Worker) -> Holding | None:
        """What a cold prefill on this worker is to release; from now on its turn answers for it."""
        for id, (_, holding) in islice(self._waiting.items(), _LOOKED_AT):
            if self._can_send(prefill, holding):
                del self._waiting[id]
                return holding
        return None

    def _can_send(self, prefill: Worker, holding: Holding) -> bool:
        decode = self._pool.get(holding.worker)
        return (
            decode is not None
            and decode.healthy
            and decode.epoch == holding.epoch
            and _pair(prefill, holding) in self._proven
            and prefill.pulls_allowed(time.monotonic())
            and why_no_pull(prefill, decode) is None
        )

    def proved(self, prefill: Worker, holding: Holding) -> None:
        """Prefill has answered with this handle."""
        if len(self._proven) >= _MOST_PAIRS:
            self._proven.clear()  # of processes that are long gone, mostly
        self._proven.add(_pair(prefill, holding))

    def failed_along(
        self, model: str, prefill: Worker, holding: Holding, error: BaseException, pause: float
    ) -> None:
        """A cold prefill failed that was to release this. It is told again only if the first time
        certainly came to nothing."""
        self._proven.discard(_pair(prefill, holding))
        if isinstance(error, WorkerFailed) or refused_connection(error):
            self.later(model, holding, avoid=prefill.name, pause=pause)
        else:
            log.event("release_failed", holding=holding.id, error=str(error))
            self._metrics.releases.labels("failed").inc()

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                overdue = list(self._waiting)
                await self.wait_for_rides()
                for id in overdue:
                    if (found := self._waiting.pop(id, None)) is not None:
                        self.later(*found)
                        await self._background.pause(_APART)
        finally:
            self._sending = False

    async def wait_for_rides(self) -> None:
        """The moment after which what waits is sent alone."""
        await self._background.pause(RIDE_SECONDS)

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
                self.proved(worker, holding)
                return "sent"


def _pair(prefill: Worker, holding: Holding) -> tuple[str, str, str, str]:
    return prefill.name, prefill.epoch, holding.worker, holding.epoch
