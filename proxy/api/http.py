"""[io] The little of HTTP that the hot path needs, directly on ASGI, and below it where possible.

No framework stands between a worker's bytes and a client's socket: no middleware that buffers, no
task per chunk, and a client that leaves is noticed at every stage. On our own server (``protocol``)
a POST is an ``Exchange``: still an ASGI request for whoever wants one, but the functions here speak
to it directly. That saves the message dictionaries, the task that waits for the client to leave,
and two writes of each answer: the head goes with the first bytes and the end with the last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy import log
from proxy.errors import ClientError
from proxy.session.identity import NOBODY, Caller

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_STATUS = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}


def caller_of(scope: Scope) -> Caller:
    """Whose request it is. The app puts it there before any route sees the request; routes that
    FastAPI serves find it as ``request.state.caller``."""
    caller = scope.get("state", {}).get("caller", NOBODY)
    assert isinstance(caller, Caller)
    return caller


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole request body. Raises ``ClientError`` (413) over ``limit`` bytes, ``ClientGone``."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    if (exchange := _exchange(receive)) is not None:
        return await exchange.body(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> ClientError:
    return ClientError(
        f"The request body is larger than {limit} bytes.", status=413, code="request_too_large"
    )


class Response:
    """An answer in the making: ``begin`` once, ``write`` until ``last``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._exchange = _exchange(send)
        self.begun = False
        self.writing_since = 0.0
        """Monotonic time at which the write now under way began to wait; 0 between writes."""

    async def begin(self, content_type: str, headers: dict[str, str], status: int = 200) -> None:
        self.begun = True
        fields = [(b"content-type", content_type.encode())]
        fields += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        if content_type.startswith("text/event-stream"):
            # Middle boxes that buffer would undo streaming (nginx reads this header).
            fields += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        if self._exchange is not None:
            self._exchange.start(status, fields)
        else:
            await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        exchange = self._exchange
        if exchange is not None:
            if exchange.blocked:
                # A stamp for ``stalls``: a timer for each chunk would cost more than the chunk.
                self.writing_since = time.monotonic()
                await exchange.unblocked()
                self.writing_since = 0.0
            exchange.put(data, last=last)
            return
        self.writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.writing_since = 0.0

    def offer(self, data: bytes) -> bool:
        """Write at once if that needs no waiting; was it written?"""
        exchange = self._exchange
        if exchange is None or exchange.blocked:
            return False
        exchange.put(data, last=False)
        return True

    def cut(self) -> None:
        """Drop the connection at once: a polite end waits for what the client never takes.

        ASGI has no such call; on another server the connection is left to it.
        """
        if self._exchange is not None:
            self._exchange.cut()


def body_is_there(receive: Receive) -> bool:
    """Has the whole request arrived? Then reading it takes no time."""
    exchange = _exchange(receive)
    return exchange is not None and exchange.whole


async def until_client_leaves(work: Awaitable[None], receive: Receive) -> None:
    """Run ``work``; cancel it when the client disconnects, and then raise ``ClientGone``.

    The request body must have been read: what ``receive`` gives next can only be a disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    if (exchange := _exchange(receive)) is not None:
        await exchange.while_connected(work, task)
        return
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="client watcher")
    try:
        await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


def _exchange(method: Receive | Send) -> Exchange | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, Exchange) else None


class Exchange:
    """A request and its answer on one connection of our server.

    Takes the place of uvicorn's ``RequestResponseCycle``; the fields in the first block are those
    that its protocol reads and writes.
    """

    def __init__(
        self,
        protocol: _Protocol,
        scope: Scope,
        *,
        expects: bool,
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = keep_alive

        self._scope = scope
        self._protocol = protocol
        self._transport = protocol.transport
        self._flow = protocol.flow
        self._expects = expects
        self._chunked = chunked
        self._parts: list[bytes] = []
        self._size = 0
        self._received = False
        self._limit: int | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._working: asyncio.Task[Any] | None = None
        self._started = self._streamed = False
        self._head: list[bytes] = []

    # For the functions above.

    @property
    def whole(self) -> bool:
        return self._received

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises ``ClientError`` (413), ``ClientGone``."""
        self._limit = limit
        if not self._received and self._size <= limit:
            await self._arrived_or_gone()
        if self.disconnected:
            raise ClientGone
        if self._size > limit:
            raise _too_large(limit)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def while_connected(self, work: Awaitable[None], task: asyncio.Task[Any]) -> None:
        self._working = task
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

    def start(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Status and headers. They leave with the first bytes that are written."""
        self._started = True
        head = [_STATUS[status]]
        head += [b"%b: %b\r\n" % field for field in fields]
        if b"".join(head).count(b"\n") != len(head):
            raise ValueError("a header's name or value holds a line break")
        for name, value in fields:
            if name == b"content-length":
                self._chunked = False
            elif name == b"content-type":
                self._streamed = value.startswith(b"text/event-stream")
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
        self._head = head

    @property
    def blocked(self) -> bool:
        """Does the client take no bytes at the moment?"""
        return self._flow.write_paused and not self.disconnected

    async def unblocked(self) -> None:
        await self._flow.drain()

    def put(self, data: bytes, *, last: bool) -> None:
        """Send bytes of the answer. Nothing happens when the client has gone."""
        if self.disconnected:
            return
        head = self._whole_head(len(data) if last else None) if self._head else b""
        if not self._chunked:
            if head or data:
                self._transport.write(head + data)
        elif data:
            end = b"\r\n0\r\n\r\n" if last else b"\r\n"
            self._transport.write(b"%b%x\r\n%b%b" % (head, len(data), data, end))
        elif last:
            self._transport.write(head + b"0\r\n\r\n")
        if last:
            self.response_complete = True
            if not self.keep_alive:
                self._transport.close()
            self._protocol.answered(self)

    def _whole_head(self, length: int | None) -> bytes:
        head, self._head = self._head, []
        if not self._received:
            self.keep_alive = False  # the rest of the request would be taken for the next one
        if self._chunked and length is not None and not self._streamed:
            self._chunked = False
            head.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            head.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            head.append(b"connection: close\r\n")
        head.append(b"\r\n")
        return b"".join(head)

    def cut(self) -> None:
        self._transport.abort()

    # As an ASGI request.

    async def receive(self) -> Message:
        if not self._received or self.response_complete:
            await self._arrived_or_gone()
        if self._parts or (self._received and self._limit is None):
            self._limit = self._size  # given away: what comes next is a disconnect
            parts, self._parts = self._parts, []
            return {"type": "http.request", "body": b"".join(parts), "more_body": False}
        if not self.disconnected and not self.response_complete:
            await self._arrived_or_gone()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start(message["status"], list(message.get("headers", ())))
        else:
            if self.blocked:
                await self.unblocked()
            self.put(message.get("body", b""), last=not message.get("more_body", False))

    # The protocol's side.

    def take(self, data: bytes) -> None:
        """A piece of the request's body."""
        if self._limit is not None and self._size > self._limit:
            return  # it will be refused: nothing more of it is kept
        self._parts.append(data)
        self._size += len(data)
        if self._limit is not None and self._size > self._limit:
            self._wake()

    def received(self) -> None:
        """That was the last piece."""
        self._received = True
        self._wake()

    def gone(self) -> None:
        """The client closed its connection."""
        if not self.response_complete:
            self.disconnected = True
            self._wake()
            if self._working is not None:
                self._working.cancel()

    async def _arrived_or_gone(self) -> None:
        if self.disconnected:
            return
        if self._expects and not self._received:
            self._expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def run_asgi(self, app: Any) -> None:
        """Called by uvicorn in a task of its own."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            log.exception("request_crashed", path=self._scope["path"])
            if not self._started:
                self.start(500, [(b"connection", b"close")])
                self.put(b"", last=True)
        finally:
            if not self.response_complete and not self.disconnected:
                self._transport.close()  # a truncated answer must not look whole


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection, on which each POST is an ``Exchange``."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._exchange: Exchange | None = None
        """The one whose request is being received."""
        self._open: set[Exchange] = set()
        """Not yet answered: one, or more when a client sends several requests in a row."""

    def on_headers_complete(self) -> None:
        self._exchange = None
        if self.parser.get_method() != b"POST" or self.parser.should_upgrade():
            super().on_headers_complete()
            return
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        modern = self.parser.get_http_version() != "1.0"
        scope: dict[str, Any] = cast(Any, self.scope)
        scope["method"] = "POST"
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + url.path
        scope["query_string"] = url.query or b""
        if not modern:
            scope["http_version"] = "1.0"
        before = self.cycle
        exchange = self._exchange = Exchange(
            self,
            scope,
            expects=self.expect_100_continue,
            keep_alive=modern and self.parser.should_keep_alive(),
            chunked=modern,
        )
        self._open.add(exchange)
        self.cycle = cast(RequestResponseCycle, exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            # As uvicorn does: what waits stays small. Until its turn comes nobody reads, so that a
            # client which sends in a row and leaves is noticed when it is written to.
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

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


protocol: Any = _Protocol
"""What uvicorn takes as ``http``."""
