"""The way to Redis, as a TCP relay that can fail.

The proxies connect to ``Link.port`` and the link to the server. A server that dies shows as a
refused or broken connection, a failover as a new server behind the same address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.chaos.steps import Step, Steps


@dataclass
class Manners:
    """How the link behaves."""

    delay: float = 0.0
    """Seconds added to every piece of data, each way."""
    silent: bool = False
    """Connections are taken, nothing is passed on."""
    swallow_replies: bool = False
    """Commands get through, replies do not: executed, and the caller cannot know."""


class Link:
    """``await open(target_port)``; then ``port``."""

    def __init__(self, steps: Steps | None = None) -> None:
        self.manners = Manners()
        self._steps = steps or Steps()
        self.target = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._holed: set[asyncio.StreamWriter] = set()
        """Ends of connections that have lost data: no byte may follow a lost one, as with TCP."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, target: int) -> None:
        self.target = target
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse new connections and break those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    async def cut(self) -> None:
        """Break every open connection."""
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def behaving(self, **manners: object) -> Iterator[None]:
        self.manners = Manners(**manners)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.manners = Manners()
            for each in self._holed:
                each.transport.abort()
            self._holed.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        self._open.add(there)
        port = writer.get_extra_info("peername")[1]
        try:
            await asyncio.gather(
                self._pass_on(reader, there, port, replies=False),
                self._pass_on(there_reader, writer, port, replies=True),
            )
        finally:
            for each in (writer, there):
                each.transport.abort()
                self._open.discard(each)
                self._holed.discard(each)

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        port: int,
        *,
        replies: bool,
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                manners = self.manners
                if manners.silent or (manners.swallow_replies and replies):
                    self._holed.add(sink)
                    continue
                if self._steps.awaited:
                    self._steps.reached(Step.TABLE_DONE if replies else Step.TABLE, "", port)
                if manners.delay:
                    await asyncio.sleep(manners.delay)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
