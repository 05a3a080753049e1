"""[io] The little of HTTP that the hot path needs, on uvicorn's connection but not through ASGI.

uvicorn parses requests and keeps the connections; what stands between a worker's bytes and a
client's socket is one object. No message dictionaries, no task that waits for the client to leave,
the head in one write with the first bytes of the answer and the last bytes with its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.errors import ClientError

_STATUS = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n" for each in HTTPStatus}


class ClientGone(Exception):
    """The client closed its connection."""


class Exchange:
    """A request and its answer: ``body`` once, ``begin`` once, ``write`` until ``last``.

    Takes the place of uvicorn's ``RequestResponseCycle``; the fields in the first block are those
    that its protocol reads and writes.
    """

    def __init__(
        self,
        protocol: _Protocol,
        headers: list[tuple[bytes, bytes]],
        *,
        expects: bool,
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = keep_alive

        self.headers = headers
        """Names in lower case."""
        self.begun = False
        self.writing_since = 0.0
        """Monotonic time at which a write began to wait for the client; 0 while none waits."""
        self._protocol = protocol
        self._transport = protocol.transport
        self._flow: FlowControl = protocol.flow
        self._expects = expects
        self._chunked = chunked
        self._parts: list[bytes] = []
        self._size = 0
        self._received = False
        self._limit: int | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._working: asyncio.Task[Any] | None = None
        self._head: list[str] = []

    # The route's side.

    async def body(self, *, limit: int, timeout: float) -> bytes:
        """The whole request body, of at most ``limit`` bytes, within ``timeout`` seconds.

        Raises ``ClientError`` (413, 408), ``ClientGone``.
        """
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
        self._limit = limit
        if not self._received and self._size <= limit and not self.disconnected:
            if self._expects:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._arrival
            except TimeoutError:
                raise ClientError(
                    "The request body did not arrive in time.", status=408, code="request_timeout"
                ) from None
            finally:
                self._arrival = None
        if self.disconnected:
            raise ClientGone
        if self._size > limit:
            raise _too_large(limit)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Do ``work``; when the client disconnects it is cancelled and ``ClientGone`` raised."""
        task = self._working = asyncio.current_task()
        assert task is not None
        if self.disconnected:
            task.cancel()
        try:
            await work
        except asyncio.CancelledError:
            if self.disconnected and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            self._working = None

    async def begin(self, content_type: str, headers: dict[str, str], status: int = 200) -> None:
        """Status and headers. They leave with the first bytes that are written."""
        self.begun = True
        head = [_STATUS[status], f"content-type: {content_type}\r\n"]
        head += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if content_type.startswith("text/event-stream"):
            # Middle boxes that buffer would undo streaming (nginx reads this header).
            head.append("cache-control: no-cache\r\nx-accel-buffering: no\r\n")
        if any(line.count("\n") != 1 for line in head[1 : 2 + len(headers)]):
            raise ValueError("a header's name or value holds a line break")
        self._head = head

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes of the answer; waits while the client takes none."""
        if self._flow.write_paused and not self.disconnected:
            # A stamp for ``stalls``: a timer for each chunk would cost more than the chunk.
            self.writing_since = time.monotonic()
            await self._flow.drain()
            self.writing_since = 0.0
        if self.disconnected:
            return
        head = b""
        if self._head:
            head = self._finished_head(len(data) if last else None)
        if self._chunked:
            end = b"\r\n0\r\n\r\n" if last else b"\r\n"
            if data:
                self._transport.write(b"%b%x\r\n%b%b" % (head, len(data), data, end))
            elif last:
                self._transport.write(head + end[2:])
            elif head:
                self._transport.write(head)
        elif head or data:
            self._transport.write(head + data)
        if last:
            self._complete()

    def _finished_head(self, length: int | None) -> bytes:
        head, self._head = self._head, []
        if not self._received:
            self.keep_alive = False  # the rest of the request would be taken for the next one
        if length is not None:
            self._chunked = False
            head.append(f"content-length: {length}\r\n")
        elif self._chunked:
            head.append("transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            head.append("connection: close\r\n")
        head.append("\r\n")
        return "".join(head).encode("latin-1")

    def cut(self) -> None:
        """Drop the connection at once: a polite end waits for what the client never takes."""
        self._transport.abort()

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._protocol.answered(self)

    # The protocol's side.

    def take(self, data: bytes) -> None:
        """A piece of the request's body."""
        if self._limit is not None and self._size > self._limit:
            return  # it will be refused: nothing more of it is kept
        self._parts.append(data)
        self._size += len(data)
        if self._limit is not None and self._size > self._limit:
            self._arrived()

    def received(self) -> None:
        """That was the last piece."""
        self._received = True
        self._arrived()

    def gone(self) -> None:
        """The client closed its connection."""
        if not self.response_complete:
            self.disconnected = True
            self._arrived()
            if self._working is not None:
                self._working.cancel()

    def _arrived(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def run_asgi(self, route: Route) -> None:
        """Called by uvicorn in a task of its own."""
        try:
            await route(self)
        finally:
            if not self.response_complete and not self.disconnected:
                self._transport.close()  # a truncated answer must not look whole


Route = Callable[[Exchange], Awaitable[None]]


def _too_large(limit: int) -> ClientError:
    return ClientError(
        f"The request body is larger than {limit} bytes.", status=413, code="request_too_large"
    )


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection, with some paths that lead to a ``Route`` instead of the ASGI app."""

    def __init__(self, routes: dict[bytes, Route], **more: Any) -> None:
        super().__init__(**more)
        self._routes = routes
        self._exchange: Exchange | None = None
        """The one whose request is being received."""
        self._open: set[Exchange] = set()
        """Not yet answered: one, or more when a client sends several requests in a row."""

    def on_headers_complete(self) -> None:
        self._exchange = None
        route = self._routes.get(self.url.partition(b"?")[0])
        if route is None or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        modern = self.parser.get_http_version() != "1.0"
        before = self.cycle
        exchange = self._exchange = Exchange(
            self,
            self.headers,
            expects=self.expect_100_continue,
            keep_alive=modern and self.parser.should_keep_alive(),
            chunked=modern,
        )
        self._open.add(exchange)
        # For uvicorn an exchange is a cycle, and a route the application that it runs.
        self.cycle = cast(RequestResponseCycle, exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, cast(Any, route))
        else:
            # As uvicorn does: what waits stays small. Until its turn comes nobody reads, so that a
            # client which sends in a row and leaves is noticed when it is written to.
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, cast(Any, route)))

    def on_body(self, body: bytes) -> None:
        if self._exchange is None:
            super().on_body(body)
        else:
            self._exchange.take(body)

    def on_message_complete(self) -> None:
        if self._exchange is None:
            super().on_message_complete()
        else:
            self._exchange.received()

    def answered(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self.on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for each in self._open:
            each.gone()
        if isinstance(self.cycle, Exchange):
            # uvicorn's own way of telling a cycle; an exchange was told.
            self.cycle = None
        super().connection_lost(exc)
        self._open.clear()
        self._exchange = None


def protocol(routes: dict[bytes, Route]) -> Any:
    """What uvicorn takes as ``http``: POSTs to these paths go to their route, the rest to ASGI."""

    def make(**more: Any) -> _Protocol:
        return _Protocol(routes, **more)

    return make
