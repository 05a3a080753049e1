"""[io] Clients that stop reading: while one stalls, decode holds a slot and KV blocks for it.

One sweep over all answers under way, instead of a timer for every chunk of every stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.api.http import Response

_SWEEPS_PER_TIMEOUT = 4
"""A stall is noticed at most a quarter of the timeout late."""


class ClientStalled(Exception):
    """The client took no byte for the time allowed."""


class StallWatch:
    """``start`` and ``stop`` with the proxy; ``watching`` around each answer."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._under_way: dict[Response, asyncio.Task[object]] = {}
        self._stalled: set[Response] = set()
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="stall watch")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    @contextmanager
    def watching(self, response: Response) -> Iterator[None]:
        """Raises ``ClientStalled`` out of the block, which is cancelled, when the client stalls."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way[response] = task
        try:
            yield
        except asyncio.CancelledError:
            if response in self._stalled and task.uncancel() == 0:
                raise ClientStalled from None
            raise
        finally:
            del self._under_way[response]
            self._stalled.discard(response)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / _SWEEPS_PER_TIMEOUT)
            now = time.monotonic()
            for response, task in self._under_way.items():
                since = response.writing_since
                if since and now - since > self._timeout and response not in self._stalled:
                    self._stalled.add(response)
                    task.cancel()
