"""[io] HTTP/1.1 to workers: kept connections, one request at a time on each, no task anywhere.

What a relay needs and a general client does not give: one write a request, bytes handed on as they
were read (however many chunks that is), one lazy timer a connection instead of one a read, and a
connection that stops reading when its reader is behind, so that a slow client slows its worker and
fills no memory here.

    HttpError
    ├── ConnectFailed   no connection; ``refused``: nobody listens there
    ├── Broken          the connection ended or the answer is no HTTP; ``unanswered``: no byte came
    └── Late            no progress within the time allowed; ``connecting``: not even a connection
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

import httptools

_KEEPALIVE_SECONDS = 3.0
"""Below vLLM's 5 (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``): the side that closes first must be ours, or a
request meets a socket the worker is just closing."""
_REAP_SECONDS = 0.5
"""Between two looks for idle connections that are over that age."""
_HEAD_LIMIT = 64 * 1024
"""Bytes of status line and headers; uvicorn sends some 200."""
_BUFFER_LIMIT = 64 * 1024
"""Unread bytes of a stream above which its connection stops reading. One read of the event loop
(256 KiB with uvloop) may come on top."""
_WHOLE_LIMIT = 256 * 2**20
"""Bytes of an answer that is read whole: a million token ids are 8 MB."""
_ADDRESS_SECONDS = 10.0
"""How long a resolved name is trusted: a burst of new connections asks once."""
_JOIN_LIMIT = 16 * 1024
"""Up to this size one copy of a body is cheaper than a second buffer in the write."""


Through = Callable[[bytes], bool]
"""Takes a piece of a body, or not."""


class HttpError(Exception):
    """Root of what goes wrong between here and a worker."""


class ConnectFailed(HttpError):
    """No connection could be made."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


_HEADS = 64
"""Request lines kept ready for each worker. Some paths hold ids: there is no end of them."""


class Broken(HttpError):
    """The connection ended before the answer did, or what came is no HTTP answer.

    ``unanswered``: not one byte of an answer came.
    """

    def __init__(self, message: str, *, unanswered: bool) -> None:
        super().__init__(message)
        self.unanswered = unanswered


class Late(HttpError):
    """No connection, or no (further) part of the answer, within the time allowed."""

    def __init__(self, message: str, *, connecting: bool = False) -> None:
        super().__init__(message)
        self.connecting = connecting


class Response:
    """The answer to one request, as it arrives. Read by one task."""

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_parts",
        "_size",
        "_through",
        "_waiter",
        "_whole",
        "answered",
        "content_type",
        "status",
    )

    def __init__(self, connection: _Connection, *, whole: bool) -> None:
        self.status = 0
        """0 until the head is complete."""
        self.content_type = ""
        self.answered = False
        """Has any byte of the answer come?"""
        self._connection: _Connection | None = connection
        self._whole = whole
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: HttpError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._through: Through | None = None

    @property
    def ended(self) -> bool:
        """Has the whole answer arrived?"""
        return self._ended

    @property
    def unread(self) -> bool:
        """Has anything arrived that was not taken yet?"""
        return bool(self._parts)

    async def head(self, timeout: float) -> None:
        """Return when ``status`` and ``content_type`` are known."""
        if not self.status:
            await self._wait(timeout)

    async def some(self, timeout: float, through: Through | None = None) -> bytes:
        """Whatever has arrived, at least one byte; empty at the end. ``timeout``: for silence.

        ``through`` is offered each piece as it comes. What it takes (True) is done with: nobody is
        woken for it, which is most of what a chunk costs otherwise.
        """
        while not self._parts and not self._ended:  # a chunk's size alone is no news
            self._through = through
            try:
                await self._wait(timeout)
            finally:
                self._through = None
        return self.arrived()

    async def whole(self, timeout: float) -> bytes:
        """The body, all of it. ``timeout``: until its end."""
        if not self._ended:
            self._whole = True
            if self._connection is not None:
                self._connection.read_on()
            await self._wait(timeout)
        return self.arrived()

    def arrived(self) -> bytes:
        """What has arrived and was not taken yet; the connection reads on."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._size = 0
        if self._connection is not None:
            self._connection.read_on()
        return data

    def close(self) -> None:
        """Abort the request unless its answer is complete. May be called again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    async def _wait(self, timeout: float) -> None:
        if self._error is not None:
            raise self._error
        connection = self._connection
        if connection is None:
            raise Broken("the response was closed", unanswered=False)
        waiter = self._waiter = connection.loop.create_future()
        connection.allow(timeout)
        try:
            await waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    # The connection's side.

    def progress(self) -> None:
        """Something came: the reader goes on, unless it wants all or nothing."""
        through = self._through
        if through is not None and self._parts:
            parts = self._parts
            if through(parts[0] if len(parts) == 1 else b"".join(parts)):
                self._parts, self._size = [], 0
                connection = self._connection
                if connection is not None:
                    connection.heard()
                    return
            else:
                self._through = None  # pieces keep their order: what follows waits for the reader
        if self._ended or not self._whole:
            self._wake()

    def fail(self, error: HttpError) -> None:
        """No more will come. What came before can still be taken."""
        if self._error is None and not self._ended:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def waiting(self) -> bool:
        return self._waiter is not None

    def take(self, data: bytes) -> bool:
        """Keep a piece of the body. True when the connection should stop reading for now."""
        self._parts.append(data)
        self._size += len(data)
        return not self._whole and self._size > _BUFFER_LIMIT

    @property
    def too_large(self) -> bool:
        return self._whole and self._size > _WHOLE_LIMIT

    def complete(self) -> None:
        self._ended = True
        self._connection = None


class Origin:
    """Where a worker's requests go: read once from its URL. Holds its idle connections."""

    def __init__(self, url: str, fields: str = "") -> None:
        """``fields``: more header lines for every request."""
        parts = urlsplit(url)
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.idle: dict[_Connection, None] = {}
        """Newest last."""
        self.addresses: list[str] = []
        self.resolved_at = float("-inf")
        host = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        self._fields = f"host: {host}\r\n{fields or _authorization(parts)}"
        self._heads: dict[str, bytes] = {}

    def head(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        """Request line and headers; JSON unless ``headers`` has a ``Content-Type``."""
        key = method + path
        start = self._heads.get(key)
        if start is None:
            start = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}".encode("latin-1")
            if len(self._heads) < _HEADS:
                self._heads[key] = start
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if more.count("\n") != len(headers) or more.count("\r") != len(headers):
            raise ValueError("a header's name or value holds a line break")
        if body is None:
            return b"%b%b\r\n" % (start, more.encode("latin-1"))
        kind = b"" if "Content-Type" in headers else b"content-type: application/json\r\n"
        return b"%b%b%bcontent-length: %d\r\n\r\n" % (
            start,
            more.encode("latin-1"),
            kind,
            len(body),
        )


def _authorization(parts: SplitResult) -> str:
    """Credentials in a URL, as any HTTP client sends them."""
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"authorization: Basic {b64encode(pair.encode()).decode()}\r\n"


class _Connection(asyncio.Protocol):
    """One connection, and the request that is on it."""

    __slots__ = (
        "_allowed",
        "_closed",
        "_deadline",
        "_head_bytes",
        "_interim",
        "_origin",
        "_parser",
        "_paused",
        "_response",
        "_timer",
        "_timer_at",
        "_transport",
        "_unframed",
        "idle_since",
        "keep",
        "loop",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin) -> None:
        self.loop = loop
        self.idle_since = 0.0
        self.keep = True
        """May it wait for another request when this one is answered?"""
        self._origin = origin
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._closed = False
        self._paused = False
        self._head_bytes = 0
        self._interim = False
        self._unframed = True
        self._allowed = 0.0
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # The pool's and the response's side.

    def send(self, head: bytes, body: bytes | None, *, whole: bool) -> Response:
        """Put a request on the wire."""
        assert self._transport is not None
        response = self._response = Response(self, whole=whole)
        self._head_bytes = 0
        self._unframed = True
        if body is None:
            self._transport.write(head)
        elif len(body) <= _JOIN_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return response

    def heard(self) -> None:
        """Something came and was taken at once: the reader's time begins anew."""
        self._deadline = self.loop.time() + self._allowed
        self.read_on()

    def allow(self, seconds: float) -> None:
        """The response's reader waits from now on, for so long. One timer serves many waits."""
        self._allowed = seconds
        self._deadline = self.loop.time() + seconds
        if self._timer is None:
            self._timer_at = self._deadline
            self._timer = self.loop.call_at(self._deadline, self._tick)
        elif self._timer_at > self._deadline:
            self._timer.cancel()
            self._timer_at = self._deadline
            self._timer = self.loop.call_at(self._deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        response = self._response
        if response is None or not response.waiting:
            return
        if self.loop.time() + 0.001 >= self._deadline:
            response.fail(Late("no answer in time"))
        else:
            self._timer_at = self._deadline
            self._timer = self.loop.call_at(self._deadline, self._tick)

    def read_on(self) -> None:
        """The reader has caught up."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    @property
    def usable(self) -> bool:
        return not self._closed and self._transport is not None

    def abort(self) -> None:
        """Close at once: on vLLM this is how a request is aborted."""
        self._closed = True
        self._origin.idle.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    # The event loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        link = transport.get_extra_info("socket")
        if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
            # A worker's host may vanish in the middle of a long silence.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.abort()  # an answer that nobody asked for: what comes next is anybody's guess
            return
        if not response.status:
            if self._head_bytes > _HEAD_LIMIT:
                self._break("its answer's head is too large")
                return
            self._head_bytes += len(data)
        response.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if response.ended:
                self.abort()  # garbage behind a whole answer
            else:
                self._break(f"answered no HTTP ({type(error).__name__})")
        if response.too_large:
            self._break("its answer is too large")
        if response.status:
            response.progress()

    def eof_received(self) -> None:
        self._closed = True  # the transport closes itself; until then nobody may take it
        self._origin.idle.pop(self, None)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._origin.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._parser = None  # it holds this object: let both go
        self._transport = None
        response, self._response = self._response, None
        if response is None:
            return
        if response.status and self._unframed and error is None:
            response.complete()  # an answer without a length ends with its connection
            response.progress()
            return
        kind = type(error).__name__ if error is not None else "connection closed"
        response.fail(Broken(kind, unanswered=not response.answered))

    def _break(self, message: str) -> None:
        response, self._response = self._response, None
        self.abort()
        if response is not None:
            response.fail(Broken(message, unanswered=False))

    # The parser's side.

    def on_message_begin(self) -> None:
        if self._response is None or self._response.ended:
            self.abort()  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        if response is None:
            return
        name = name.lower()
        if name == b"content-type":
            response.content_type = value.decode("latin-1")
        elif name == b"content-length" or (
            name == b"transfer-encoding" and value.lower().endswith(b"chunked")
        ):
            self._unframed = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._interim = True
            self._unframed = True
        elif self._response is not None:
            self._response.status = status

    def on_body(self, data: bytes) -> None:
        response = self._response
        if (
            response is not None
            and response.take(data)
            and not self._paused
            and self._transport is not None
        ):
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        response, self._response = self._response, None
        if response is None:
            return
        response.complete()
        transport = self._transport
        if (
            transport is None
            or self._closed
            or not self.keep
            or not self._parser.should_keep_alive()
            or transport.get_write_buffer_size()  # answered before it had read the request
        ):
            self.abort()
        else:
            self.read_on()
            self.idle_since = self.loop.time()
            self._origin.idle[self] = None


class Connections:
    """Connections to all workers."""

    def __init__(
        self, *, connect_timeout: float, fields: str = "", ca_file: str | None = None
    ) -> None:
        """``fields``: header lines for every request. ``ca_file``: whom to trust for https; by
        default whom the system trusts."""
        self._connect_timeout = connect_timeout
        self._fields = fields
        self._ca_file = ca_file
        self._origins: dict[str, Origin] = {}
        self._tls: ssl.SSLContext | None = None
        self._reaper: asyncio.TimerHandle | None = None
        self._closed = False

    def origin(self, url: str) -> Origin:
        found = self._origins.get(url)
        if found is None:
            found = self._origins[url] = Origin(url, self._fields)
        return found

    @property
    def idle(self) -> int:
        """Connections kept for the next request."""
        return sum(len(each.idle) for each in self._origins.values())

    async def request(
        self,
        origin: Origin,
        head: bytes,
        body: bytes | None,
        *,
        whole: bool,
        timeout: float,
        fresh: bool = False,
        keep: bool = True,
    ) -> Response:
        """Send a request; its answer is still to come. ``whole``: its reader wants all or nothing.

        ``fresh``: on a connection that no worker can be closing. ``keep``: that connection may
        serve other requests later. Raises ``HttpError``.
        """
        connection = None if fresh else self._idle_connection(origin)
        if connection is None:
            connection = await self._connect(origin, min(timeout, self._connect_timeout))
            connection.keep = keep
        return connection.send(head, body, whole=whole)

    def close(self) -> None:
        """Close what is idle; requests under way belong to their readers."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        for origin in self._origins.values():
            for connection in list(origin.idle):
                connection.abort()

    def _idle_connection(self, origin: Origin) -> _Connection | None:
        idle = origin.idle
        while idle:
            connection, _ = idle.popitem()
            if connection.loop.time() - connection.idle_since > _KEEPALIVE_SECONDS:
                connection.abort()
            elif connection.usable:
                return connection
        return None

    def _reap(self) -> None:
        self._reaper = None
        for origin in self._origins.values():
            for connection in list(origin.idle):
                if connection.loop.time() - connection.idle_since <= _KEEPALIVE_SECONDS:
                    break  # oldest first: the rest is younger
                connection.abort()
        self._reap_later()

    def _reap_later(self) -> None:
        if self._reaper is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._reaper = loop.call_later(_REAP_SECONDS, self._reap)

    async def _connect(self, origin: Origin, limit: float) -> _Connection:
        self._reap_later()
        loop = asyncio.get_running_loop()
        errors: list[OSError] = []
        try:
            async with asyncio.timeout(limit):
                addresses = await _resolve(loop, origin)
                for address in addresses:
                    try:
                        # Each address has its share: the first may be one that nobody routes.
                        async with asyncio.timeout(limit / len(addresses)):
                            return await self._connect_to(loop, origin, address)
                    except TimeoutError:
                        if len(addresses) == 1:
                            raise
                        errors.append(TimeoutError())
                    except OSError as error:
                        errors.append(error)
        except TimeoutError as error:
            raise Late("no connection in time", connecting=True) from error
        except OSError as error:  # the name does not resolve
            raise ConnectFailed(type(error).__name__, refused=False) from error
        refused = all(isinstance(each, ConnectionRefusedError) for each in errors)
        raise ConnectFailed(type(errors[-1]).__name__, refused=refused) from errors[-1]

    async def _connect_to(
        self, loop: asyncio.AbstractEventLoop, origin: Origin, address: str
    ) -> _Connection:
        make = partial(_Connection, loop, origin)
        if origin.tls:
            if self._tls is None:
                self._tls = ssl.create_default_context(cafile=self._ca_file)
            _, connection = await loop.create_connection(
                make, address, origin.port, ssl=self._tls, server_hostname=origin.host
            )
        else:
            _, connection = await loop.create_connection(make, address, origin.port)
        return connection


async def _resolve(loop: asyncio.AbstractEventLoop, origin: Origin) -> list[str]:
    if loop.time() - origin.resolved_at > _ADDRESS_SECONDS:
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        origin.addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        origin.resolved_at = loop.time()
    return origin.addresses
