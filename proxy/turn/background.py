"""[io] Work that outlives the turn that began it: releases, mostly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from proxy import log
from proxy.tasks import end

_CLOSE_SECONDS = 5.0


class Background:
    """The background tasks of one conductor."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.event("background_failed", task=task.get_name(), error=repr(error))

    async def carry_through(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Finish ``work`` even if the turn is cancelled meanwhile: half done, it would leak."""
        await asyncio.shield(self.start(work, name))

    @property
    def closing(self) -> bool:
        """From now on nothing pauses."""
        return self._closing.is_set()

    async def pause(self, seconds: float) -> None:
        """Sleep, but not on when the proxy is being closed."""
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._closing.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        """Let what is under way, and what it starts, finish, for a moment."""
        self._closing.set()
        loop = asyncio.get_running_loop()
        until = loop.time() + _CLOSE_SECONDS
        while self.tasks and (left := until - loop.time()) > 0:
            await asyncio.wait(self.tasks, timeout=left)
        await end(list(self.tasks))
