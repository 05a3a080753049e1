"""[io] What a failed call says about its worker, with the limits that the settings give."""

from __future__ import annotations

import time

from proxy import log
from proxy.errors import WorkerError, WorkerFailed
from proxy.settings import Settings
from proxy.workers.pool import Worker


class Verdicts:
    """Counts failures towards the breaker of a worker or of one of its transfer directions."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def call_failed(self, worker: Worker, error: WorkerError) -> None:
        """Any call of a turn failed. A full queue (503) is not a fault."""
        if isinstance(error, WorkerFailed) and error.status == 503:
            return
        if worker.turn_failed(
            time.monotonic(),
            limit=self._settings.breaker_failures,
            pause=self._settings.breaker_pause_seconds,
        ):
            log.event("breaker_open", worker=worker.name, error=str(error))

    def pull_failed(self, worker: Worker) -> None:
        """Prefill failed while it carried a handle of decode's."""
        worker.pull_failed(
            time.monotonic(),
            limit=self._settings.pull_failures,
            pause=self._settings.pull_pause_seconds,
        )

    def left_waiting(self, worker: Worker) -> None:
        """A prefill worker that pushes has left decode waiting: once is enough for a pause.

        It pulls nothing, so the pause of its pulls is free to be that of sending both legs at once.
        """
        worker.pull_failed(time.monotonic(), limit=1, pause=self._settings.pull_pause_seconds)

    def read_failed(self, worker: Worker, error: WorkerError) -> None:
        """Decode failed while it carried a handle of prefill's."""
        if isinstance(error, WorkerFailed) and error.status != 503:
            worker.transfer_failed(
                time.monotonic(),
                limit=self._settings.pull_failures,
                pause=self._settings.pull_pause_seconds,
            )
