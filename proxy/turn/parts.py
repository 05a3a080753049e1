"""[io] What the steps of a turn share."""

from __future__ import annotations

import time
from dataclasses import dataclass

from proxy import log
from proxy.errors import TableUnavailable, WorkerError
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

    def prefill_failed(
        self, request_id: str, worker: Worker, error: WorkerError, *, warm: bool = False
    ) -> None:
        """Log and count a prefill leg that came to nothing, and what it says of the worker."""
        log.event(
            "prefill_failed",
            request=request_id,
            worker=worker.name,
            warm=warm,
            error=str(error),
        )
        leg = "warm_prefill" if warm else "prefill"
        self.metrics.cold_retries.labels(leg, type(error).__name__).inc()
        self.verdicts.call_failed(worker, error)

    def table_operation(self, name: str) -> _TableOperation:
        """Time an operation of the table and count its failure."""
        return _TableOperation(self.metrics, name)


class _TableOperation:
    # A class, as below: a generator costs each turn several times as much.
    __slots__ = ("_metrics", "_name", "_start")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and issubclass(kind, TableUnavailable):
            self._metrics.table_failures.labels(self._name).inc()
        took = time.monotonic() - self._start
        self._metrics.table_seconds.labels(self._name).observe(took)


class busy:  # used as a statement
    """The worker has one more turn, with so many prompt tokens to compute."""

    __slots__ = ("_tokens", "_worker")

    def __init__(self, worker: Worker, tokens: int = 0) -> None:
        self._worker = worker
        self._tokens = tokens

    def __enter__(self) -> None:
        self._worker.given(self._tokens)

    def __exit__(self, *how: object) -> None:
        self._worker.done(self._tokens)
