"""[io] What the steps of a turn share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.errors import TableUnavailable
from proxy.metrics import Metrics
from proxy.session.table import SessionTable
from proxy.settings import Settings
from proxy.turn.admission import RetryBudget
from proxy.turn.background import Background
from proxy.turn.releases import Releases
from proxy.turn.retaining import Retention
from proxy.workers.client import WorkerClient
from proxy.workers.pool import Pool, Worker
from proxy.workers.verdicts import Verdicts


@dataclass(slots=True)
class Parts:
    """The parts of one proxy that a turn passes through."""

    settings: Settings
    pool: Pool
    client: WorkerClient
    table: SessionTable
    metrics: Metrics
    background: Background
    verdicts: Verdicts
    releases: Releases
    retention: Retention
    retries: RetryBudget
    reuse_on: bool
    """May change at any time (``proxy/switch.py``)."""

    def keeps(self, decode: Worker) -> bool:
        """May a turn's blocks stay on this decode worker? Not if nobody could read or release
        them."""
        return self.reuse_on and self.pool.pullable(decode)

    @contextmanager
    def table_operation(self, name: str) -> Iterator[None]:
        """Time an operation of the table and count its failure."""
        start = time.monotonic()
        try:
            yield
        except TableUnavailable:
            self.metrics.table_failures.labels(name).inc()
            raise
        finally:
            self.metrics.table_seconds.labels(name).observe(time.monotonic() - start)


@contextmanager
def busy(worker: Worker, tokens: int = 0) -> Iterator[None]:
    """The worker has one more turn, with so many prompt tokens to compute."""
    worker.given(tokens)
    try:
        yield
    finally:
        worker.done(tokens)
