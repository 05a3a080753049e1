"""[io] The hot path's connection to Redis: one for all turns, commands of a moment in one write.

redis-py connects (address, TLS, password, database: all that a URL can say); then its socket is
taken over, because a pool with a task switch, a timer and a write for each command costs more here
than everything Redis does. Replies come in the order of the commands, so a queue is all it takes.

A command whose turn was cancelled has been sent: its reply is read and dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, cast

import hiredis
import redis.asyncio as redis_asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Argument = bytes | str | int


class Script:
    """A Lua script; called like those of redis-py. Redis is sent its text only if it must be."""

    def __init__(self, link: RedisLink, text: str) -> None:
        self._link = link
        self._text = text
        self._digest = sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, *, keys: Sequence[Argument], args: Sequence[Argument] = ()) -> Any:
        rest = (len(keys), *keys, *args)
        try:
            return await self._link.command("EVALSHA", self._digest, *rest)
        except NoScriptError:
            return await self._link.command("EVAL", self._text, *rest)


class RedisLink:
    """Commands and scripts; both raise redis-py's errors. Connects when first used."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self._pool: Any = redis_asyncio.ConnectionPool.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            protocol=2,  # version 3 may send what nobody asked for
        )
        self._timeout = timeout_seconds
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None

    def register_script(self, text: str) -> Script:
        return Script(self, text)

    async def command(self, *words: Argument) -> Any:
        """The reply, in bytes, integers and lists."""
        wire = self._wire
        if wire is None or wire.closed:
            wire = await self._connect()
        return await wire.ask(words)

    async def together(self, *commands: tuple[Argument, ...]) -> list[Any]:
        """The replies to several commands, sent in one write and done in their order."""
        wire = self._wire
        if wire is None or wire.closed:
            wire = await self._connect()
        return await asyncio.gather(*(wire.ask(words) for words in commands))

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None:
            self._wire.abort(RedisConnectionError("closed"))

    async def _connect(self) -> _Wire:
        """One attempt for all that wait; a turn that is cancelled does not end it."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._attempt(), name="connect to Redis")
            self._connecting.add_done_callback(self._attempted)
        return await asyncio.shield(self._connecting)

    def _attempted(self, attempt: asyncio.Task[_Wire]) -> None:
        self._connecting = None
        if not attempt.cancelled() and attempt.exception() is None:
            self._wire = attempt.result()

    async def _attempt(self) -> _Wire:
        connection = self._pool.make_connection()
        await connection.connect()
        return _Wire(connection, self._timeout)


class _Wire(asyncio.Protocol):
    """A connection that is up."""

    def __init__(self, connection: Any, timeout: float) -> None:
        # The stream objects close the socket when they go: they are kept, and redis-py lets go.
        self._streams = connection._reader, connection._writer
        connection._reader = connection._writer = None
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=_error)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False
        self._transport = cast(asyncio.Transport, self._streams[1].transport)
        self._transport.set_protocol(self)
        self._transport.resume_reading()

    def ask(self, words: tuple[Argument, ...]) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = self._loop.create_future()
        if not self._unsent:
            # What other turns ask in this turn of the loop goes along.
            self._loop.call_soon(self._send)
        self._unsent.append(hiredis.pack_command(cast(Any, words)))
        due = self._loop.time() + self._timeout
        self._waiting.append((reply, due))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._tick)
        return reply

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self.closed:
            self._transport.write(b"".join(unsent))

    def _tick(self) -> None:
        """The oldest command is due first: one timer for all."""
        self._timer = None
        if not self._waiting or self.closed:
            return
        due = self._waiting[0][1]
        if self._loop.time() + 0.001 >= due:
            self.abort(RedisTimeoutError("no reply in time"))
        else:
            self._timer = self._loop.call_at(due, self._tick)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                waiter, _ = self._waiting.popleft()
                if waiter.done():
                    continue
                if isinstance(reply, Exception):
                    waiter.set_exception(reply)
                else:
                    waiter.set_result(reply)
        except (InvalidResponse, IndexError) as error:
            self.abort(RedisConnectionError(f"not understood: {type(error).__name__}"))

    def eof_received(self) -> None:
        self.closed = True

    def connection_lost(self, error: Exception | None) -> None:
        self.abort(RedisConnectionError("connection lost"))

    def abort(self, error: Exception) -> None:
        """Give up the connection. What was asked may or may not have had its effect."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()
        waiting, self._waiting = self._waiting, deque()
        for waiter, _ in waiting:
            if not waiter.done():
                waiter.set_exception(error)


def _error(message: str) -> ResponseError:
    if message.startswith("NOSCRIPT"):
        return NoScriptError(message)
    return ResponseError(message)
