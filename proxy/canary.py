"""[io] Canary: replays a small part of the warm turns cold, in the background, and compares.

Both are prefill's own greedy first token over the same ids: once over KV pulled from decode, once
computed under a cache salt used nowhere else, so that no cached block, poisoned or not, can help.
A difference means wrong KV, or two tokens of practically equal probability (a sum taken in another
order): the log line has both ids, to tell which.
"""

from __future__ import annotations

import random

from proxy import log
from proxy.errors import WorkerError
from proxy.metrics import Metrics
from proxy.turn import wire
from proxy.workers.client import WorkerClient
from proxy.workers.pool import Worker

_AT_ONCE = 1
"""A replay is a whole cold prefill: more than one at a time would be felt by turns."""
_TIMEOUT = 600.0


class Canary:
    """``chosen()`` before a warm prefill, ``compare()`` after it, as a background task."""

    def __init__(self, fraction: float, client: WorkerClient, metrics: Metrics) -> None:
        self._fraction = fraction
        self._client = client
        self._metrics = metrics
        self._running = 0

    def chosen(self) -> bool:
        """Shall this turn be checked?"""
        return self._running < _AT_ONCE and random.random() < self._fraction

    async def compare(self, worker: Worker, cold_body: bytes, warm: int, request_id: str) -> None:
        """Compute the first token again, from nothing."""
        if self._running >= _AT_ONCE:
            return
        self._running += 1
        cold = None
        try:
            answer = await self._client.call(
                worker, wire.COMPLETIONS_PATH, cold_body, timeout=_TIMEOUT
            )
            cold = wire.first_token(answer)
        except WorkerError as error:
            log.event("canary_failed", request=request_id, error=str(error))
        finally:
            self._running -= 1
        result = "failed" if cold is None else "equal" if cold == warm else "different"
        self._metrics.canary_checks.labels(result).inc()
        if result == "different":
            log.event("canary_different", request=request_id, warm=warm, cold=cold)
