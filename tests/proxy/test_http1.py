"""The HTTP/1.1 client to workers: what it makes of good, slow, broken and hostile servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.errors import WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.workers import http1
from proxy.workers.client import WorkerClient, refused_connection
from proxy.workers.http1 import Broken, Late, Origin, Response
from proxy.workers.pool import Role, Worker

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\nb;name=value\r\n, every one\r\n0\r\nX-Trailer: t\r\n\r\n"
)
MEASURED = b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\nhello, every one"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello, every one"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
JSON = b'HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{"a": 1}'


class Pipe:
    """A transport in memory."""

    def __init__(self) -> None:
        self.sent = b""
        self.unsent = 0
        self.paused = self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: Any) -> None:
        self.sent += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True


def asked(*, whole: bool = True) -> tuple[Any, Pipe, Response, Origin]:
    """A connection with a request on it."""
    origin = Origin("http://worker:8000")
    connection = http1._Connection(asyncio.get_running_loop(), origin)
    pipe = Pipe()
    connection.connection_made(pipe)  # type: ignore[arg-type]
    return connection, pipe, connection.send(b"POST", b"{}", whole=whole), origin


@pytest.mark.parametrize("interim", [b"", INTERIM])
@pytest.mark.parametrize("wire", [CHUNKED, MEASURED, UNTIL_CLOSE])
async def test_an_answer_cut_anywhere_is_the_same_answer(wire: bytes, interim: bytes) -> None:
    """Packets have no meaning: every cut in two, and one byte a packet, give the same body."""
    wire = interim + wire
    cuts = [(wire[:at], wire[at:]) for at in range(1, len(wire))]
    for pieces in (*cuts, [bytes([byte]) for byte in wire]):
        connection, _, response, origin = asked()
        for piece in pieces:
            connection.data_received(piece)
        if UNTIL_CLOSE in wire:
            assert not response.ended
            connection.connection_lost(None)
        assert await response.whole(1) == b"hello, every one"
        assert response.status == 200
        assert len(origin.idle) == (UNTIL_CLOSE not in wire)


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n\x00\x01",
    ],
)
async def test_what_is_no_http_answer_breaks_the_request(wire: bytes) -> None:
    connection, pipe, response, origin = asked()
    connection.data_received(wire)
    with pytest.raises(Broken) as caught:
        await response.whole(1)
    assert not caught.value.unanswered
    assert pipe.aborted
    assert not origin.idle


@pytest.mark.parametrize("more", [JSON, b"garbage", b"\x00"])
async def test_bytes_behind_an_answer_end_the_connection_not_the_answer(more: bytes) -> None:
    """A second answer to one request would be taken for the answer to the next."""
    connection, pipe, response, origin = asked()
    connection.data_received(JSON + more)
    assert await response.whole(1) == b'{"a": 1}'
    assert pipe.aborted
    assert not origin.idle


async def test_an_answer_that_nobody_asked_for_ends_an_idle_connection() -> None:
    connection, pipe, response, origin = asked()
    connection.data_received(JSON)
    await response.whole(1)
    assert list(origin.idle) == [connection]
    connection.data_received(JSON)
    assert pipe.aborted
    assert not origin.idle


async def test_an_endless_head_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one header or in many, a head beyond the limit breaks the request."""
    for piece in (b"x" * 4096, b"x: y\r\n" * 700):
        connection, pipe, response, _ = asked()
        connection.data_received(b"HTTP/1.1 200 OK\r\nx: ")
        for _ in range(20):
            connection.data_received(piece)
        with pytest.raises(Broken, match="head"):
            await response.whole(1)
        assert pipe.aborted


async def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "_WHOLE_LIMIT", 100_000)
    connection, pipe, response, _ = asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(4):
        connection.data_received(b"x" * 30_000)
    with pytest.raises(Broken, match="too large"):
        await response.whole(1)
    assert pipe.aborted


async def test_a_reader_that_is_behind_stops_the_connection() -> None:
    """Beyond the buffer's limit nothing more is read until the reader has taken what is there."""
    connection, pipe, response, _ = asked(whole=False)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    await response.head(1)
    connection.data_received(b"x" * http1._BUFFER_LIMIT)
    assert not pipe.paused
    connection.data_received(b"x")
    assert pipe.paused
    assert len(await response.some(1)) == http1._BUFFER_LIMIT + 1
    assert not pipe.paused


async def test_a_connection_that_was_stopped_is_read_again_when_kept() -> None:
    connection, pipe, response, origin = asked(whole=False)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (http1._BUFFER_LIMIT + 2)
    connection.data_received(head + b"x" * (http1._BUFFER_LIMIT + 1))
    assert pipe.paused
    connection.data_received(b"x")  # was on its way
    assert origin.idle
    assert not pipe.paused
    assert len(await response.some(1)) == http1._BUFFER_LIMIT + 2
    assert await response.some(1) == b""


async def test_content_before_a_break_is_delivered_first() -> None:
    connection, _, response, _ = asked(whole=False)
    connection.data_received(CHUNKED[:-20])
    connection.connection_lost(ConnectionResetError())
    assert await response.some(1) == b"hello, every one"
    with pytest.raises(Broken):
        await response.some(1)


async def test_a_chunk_size_alone_is_not_the_end_of_the_stream() -> None:
    """A packet without content must not look like the empty read that means the end."""
    connection, _, response, _ = asked(whole=False)
    at = CHUNKED.index(b"5\r\nhello")
    reading = asyncio.create_task(response.some(1))
    for piece in (CHUNKED[:at], CHUNKED[at : at + 3]):
        connection.data_received(piece)
        await asyncio.sleep(0)
        assert not reading.done()
    connection.data_received(CHUNKED[at + 3 :])
    assert await reading == b"hello, every one"


async def test_pieces_go_through_until_one_is_not_taken() -> None:
    """What is taken wakes nobody; the first that is not, and all behind it, wait for the reader."""
    connection, _, response, _ = asked(whole=False)
    connection.data_received(CHUNKED[: CHUNKED.index(b"5\r\n")])
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        if data == b"no":
            return False
        taken.append(data)
        return True

    reading = asyncio.create_task(response.some(0.05, take))
    await asyncio.sleep(0)
    for piece in (b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n"):
        await asyncio.sleep(0.03)  # each piece gives the reader its whole time again
        connection.data_received(piece)
    assert taken == [b"ab", b"c"]
    assert not reading.done()
    connection.data_received(b"2\r\nno\r\n")
    connection.data_received(b"1\r\nd\r\n")
    assert await reading == b"nod"
    assert taken == [b"ab", b"c"]
    reading = asyncio.create_task(response.some(1, take))
    await asyncio.sleep(0)
    connection.data_received(b"1\r\ne\r\n0\r\n\r\n")
    assert await reading == b""
    assert taken[-1] == b"e"


async def test_silence_behind_what_went_through_is_late() -> None:
    connection, _, response, _ = asked(whole=False)
    connection.data_received(CHUNKED[: CHUNKED.index(b"5\r\n")])
    reading = asyncio.create_task(response.some(0.03, lambda data: True))
    await asyncio.sleep(0)
    connection.data_received(b"1\r\na\r\n")
    with pytest.raises(Late):
        await reading


async def test_an_answer_before_the_request_was_read_ends_the_connection() -> None:
    """What is left of the request would meet the next one."""
    connection, pipe, response, origin = asked()
    pipe.unsent = 1
    connection.data_received(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
    assert await response.whole(1) == b""
    assert pipe.aborted
    assert not origin.idle


async def test_silence_is_late_and_a_drip_is_not() -> None:
    """The time allowed counts from the last piece, and one timer serves all waits."""
    connection, _, response, _ = asked(whole=False)
    connection.data_received(CHUNKED[: CHUNKED.index(b"5\r\n")])
    await response.head(1)
    for _ in range(5):
        reading = asyncio.create_task(response.some(0.05))
        await asyncio.sleep(0.03)
        connection.data_received(b"1\r\nx\r\n")
        assert await reading == b"x"
    with pytest.raises(Late):
        await response.some(0.02)
    connection.connection_lost(None)
    assert connection._timer is None


def test_a_header_cannot_smuggle_a_line() -> None:
    origin = Origin("http://worker")
    for headers in ({"a": "b\r\nc: d"}, {"a": "b\nc: d"}, {"a\r\nb": "c"}):
        with pytest.raises(ValueError, match="line break"):
            origin.head("GET", "/", None, headers)


def test_the_url_decides_host_path_and_credentials() -> None:
    origin = Origin("http://me:p%40ss@[::1]:8000/base/")
    head = origin.head("POST", "/v1/x", b"{}", {"X-Request-Id": "r"})
    assert head == (
        b"POST /base/v1/x HTTP/1.1\r\nhost: [::1]:8000\r\nauthorization: Basic bWU6cEBzcw==\r\n"
        b"X-Request-Id: r\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"
    )
    assert (origin.host, origin.port, origin.tls) == ("::1", 8000, False)
    assert (Origin("https://w").port, Origin("https://w").tls) == (443, True)


# With sockets.

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """Read one request; its body. Raises ``IncompleteReadError`` at the end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length: "):
            length = int(line[16:])
    return await reader.readexactly(length)


class Server:
    """A scripted worker; counts its connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.closed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, handler: Handler, **more: Any) -> Worker:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await handler(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                self.closed.set()
                writer.close()

        host = more.pop("host", "127.0.0.1")
        self._server = await asyncio.start_server(serve, host, 0, **more)
        port = self._server.sockets[0].getsockname()[1]
        scheme = "https" if "ssl" in more else "http"
        shown = f"[{host}]" if ":" in host else host
        return Worker(f"{scheme}://{shown}:{port}", Role.PREFILL, f"{shown}:{port}")

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    await server.stop()


@pytest.fixture
async def client() -> AsyncIterator[WorkerClient]:
    client = WorkerClient(connect_timeout_seconds=5)
    yield client
    await client.close()
    await asyncio.sleep(0)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One JSON answer for each request."""
    while True:
        await request_of(reader)
        writer.write(JSON)


async def test_a_connection_is_used_again(server: Server, client: WorkerClient) -> None:
    worker = await server.start(answers)
    for size in (2, 200_000, 2):
        body = b'"' + b"x" * size + b'"'
        assert await client.call(worker, "/x", body, timeout=5) == {"a": 1}
    assert server.connections == 1


async def test_many_requests_at_once_have_a_connection_each(
    server: Server, client: WorkerClient
) -> None:
    """No limit of connections caps the concurrent streams."""
    together = asyncio.Barrier(150)

    async def all_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        await together.wait()
        writer.write(JSON)

    worker = await server.start(all_at_once, backlog=200)
    calls = (client.call(worker, "/x", b"{}", timeout=20) for _ in range(150))
    assert await asyncio.gather(*calls) == [{"a": 1}] * 150
    assert server.connections == 150


async def test_an_answer_that_says_close_is_the_last_one(
    server: Server, client: WorkerClient
) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(JSON.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

    worker = await server.start(once)
    for _ in range(2):
        assert await client.call(worker, "/x", b"{}", timeout=5) == {"a": 1}
    assert server.connections == 2


async def test_a_connection_that_its_worker_closed_is_not_used_again(
    server: Server, client: WorkerClient
) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(JSON)

    worker = await server.start(once)
    for count in (1, 2):
        assert await client.call(worker, "/x", b"{}", timeout=5) == {"a": 1}
        while client._connections.idle:
            await asyncio.sleep(0.001)
        assert server.connections == count


async def test_an_idle_connection_is_closed_before_its_worker_would(
    server: Server, client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sees our end close, and the next request has a connection of its own."""
    monkeypatch.setattr(http1, "_KEEPALIVE_SECONDS", 0.01)
    monkeypatch.setattr(http1, "_REAP_SECONDS", 0.01)
    worker = await server.start(answers)
    await client.call(worker, "/x", b"{}", timeout=5)
    await server.closed.wait()
    assert client._connections.idle == 0
    monkeypatch.setattr(http1, "_REAP_SECONDS", 60)
    await client.call(worker, "/x", b"{}", timeout=5)
    await asyncio.sleep(0.03)
    await client.call(worker, "/x", b"{}", timeout=5)
    assert server.connections == 3


async def test_a_closing_race_is_repeated_only_where_it_does_no_harm(
    server: Server, client: WorkerClient
) -> None:
    """The worker closes a kept connection just as a request arrives on it, without an answer."""
    requests = 0

    async def second_dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        for number in range(2):
            await request_of(reader)
            requests += 1
            if number == 0:
                writer.write(JSON)

    worker = await server.start(second_dies)
    await client.call(worker, "/x", b"{}", timeout=5)
    assert await client.call(worker, "/x", b"{}", timeout=5, repeatable=True) == {"a": 1}
    assert (server.connections, requests) == (2, 3)
    with pytest.raises(WorkerUnreachable):
        await client.call(worker, "/x", b"{}", timeout=5)
    assert (server.connections, requests) == (2, 4)


async def test_a_break_in_the_answer_is_never_repeated(
    server: Server, client: WorkerClient
) -> None:
    """A byte came back: the worker may have done the work."""

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(JSON[:30])

    worker = await server.start(dies)
    with pytest.raises(WorkerUnreachable) as caught:
        await client.call(worker, "/x", b"{}", timeout=5, repeatable=True)
    assert not caught.value.timed_out
    assert server.connections == 1


async def test_status_decides_who_is_to_blame(server: Server, client: WorkerClient) -> None:
    status = 200
    body = b"[]"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            head = f"HTTP/1.1 {status} X\r\ncontent-type: text/x\r\ncontent-length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)

    worker = await server.start(answer)
    with pytest.raises(WorkerFailed, match="no JSON object"):
        await client.call(worker, "/x", b"{}", timeout=5)
    status = 422

    async def streamed() -> None:
        async with client.stream(worker, "/x", b"{}", first_byte_timeout=5):
            pass

    for asking in (client.call(worker, "/x", b"{}", timeout=5), streamed()):
        with pytest.raises(WorkerRefused) as refused:
            await asking
        assert (refused.value.body, refused.value.content_type) == (b"[]", "text/x")
    status = 503
    assert server.connections == 1
    with pytest.raises(WorkerFailed) as failed:
        await client.get(worker, "/x", timeout=5)
    assert failed.value.status == 503


async def test_a_probe_has_a_connection_of_its_own(server: Server, client: WorkerClient) -> None:
    """Whether a connection is to be had is part of its question, and it keeps none."""
    worker = await server.start(answers)
    await client.call(worker, "/x", b"{}", timeout=5)
    for count in (2, 3):
        assert await client.get(worker, "/health", timeout=5) == b'{"a": 1}'
        assert (server.connections, client._connections.idle) == (count, 1)


async def test_what_is_forwarded_comes_back_with_its_status(server: Server) -> None:
    """Any status below 500 is an answer; the proxy's key goes along."""
    seen = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 X\r\ncontent-type: text/x\r\ncontent-length: 2\r\n\r\nno")

    client = WorkerClient(connect_timeout_seconds=5, api_key=SecretStr("k"))
    worker = await server.start(answer)
    async with client.forward(worker, "GET", "/x", None, headers={}, first_byte_timeout=5) as (
        status,
        kind,
        pieces,
    ):
        assert (status, kind) == (404, "text/x")
        assert b"".join([piece async for piece in pieces(5)]) == b"no"
    assert b"authorization: Bearer k\r\n" in seen
    await client.close()


async def test_no_answer_in_time_says_so_and_closes(server: Server, client: WorkerClient) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        await reader.read()

    worker = await server.start(silent)
    with pytest.raises(WorkerUnreachable, match=r"0\.05 s") as caught:
        await client.call(worker, "/x", b"{}", timeout=0.05)
    assert caught.value.timed_out
    await server.closed.wait()
    server.closed.clear()
    with pytest.raises(WorkerUnreachable) as caught:
        async with client.stream(worker, "/x", b"{}", first_byte_timeout=0.05):
            pass
    assert caught.value.timed_out
    await server.closed.wait()


async def test_cancelling_a_call_closes_its_connection(
    server: Server, client: WorkerClient
) -> None:
    """On vLLM a closed connection is how a request is aborted."""
    arrived = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        arrived.set()
        await reader.read()

    worker = await server.start(silent)
    call = asyncio.create_task(client.call(worker, "/x", b"{}", timeout=60))
    await arrived.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await server.closed.wait()
    assert client._connections.idle == 0


async def test_leaving_a_stream_early_closes_it_and_reading_it_whole_keeps_it(
    server: Server, client: WorkerClient
) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            writer.write(CHUNKED)

    worker = await server.start(stream)
    async with client.stream(worker, "/x", b"{}", first_byte_timeout=5) as response:
        assert response.content_type == "text/event-stream"
        body = b""
        while data := await client.read_some(worker, response, timeout=5):
            body += data
        assert body == b"hello, every one"
    assert client._connections.idle == 1

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED[:-20])
        await reader.read()

    other = Server()
    worker = await other.start(half)
    async with client.stream(worker, "/x", b"{}", first_byte_timeout=5) as response:
        assert await client.read_some(worker, response, timeout=5)
    await other.closed.wait()
    assert client._connections.idle == 1
    await other.stop()


async def test_a_slow_reader_holds_the_worker_back(server: Server, client: WorkerClient) -> None:
    """A worker that could send 64 MB at once is stopped after little more than the sockets hold."""
    piece, count = b"x" * 65536, 1024
    sent = 0
    blocked = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(piece) * count))
        for _ in range(count):
            writer.write(piece)
            sent += len(piece)
            draining = asyncio.ensure_future(writer.drain())
            done, _ = await asyncio.wait([draining], timeout=0.2)
            if not done:
                blocked.set()
            await draining

    worker = await server.start(flood)
    async with client.stream(worker, "/x", b"{}", first_byte_timeout=5) as response:
        await blocked.wait()
        assert response._size < 2 * 2**20
        assert sent < 32 * 2**20
        received = 0
        while data := await client.read_some(worker, response, timeout=5):
            received += len(data)
            assert len(data) < 2 * 2**20
    assert received == sent == len(piece) * count


async def test_a_refused_connection_is_told_from_other_failures(client: WorkerClient) -> None:
    """By one address or by all that a name has."""
    server = Server()
    worker = await server.start(answers)
    await server.stop()
    for host in ("127.0.0.1", "localhost"):
        url = worker.url.replace("127.0.0.1", host)
        with pytest.raises(WorkerUnreachable) as caught:
            await client.call(Worker(url, Role.PREFILL, url), "/x", b"{}", timeout=5)
        assert refused_connection(caught.value)
    nowhere = Worker("http://no-such-host.invalid", Role.PREFILL, "no-such-host.invalid")
    with pytest.raises(WorkerUnreachable) as caught:
        await client.call(nowhere, "/x", b"{}", timeout=5)
    assert not refused_connection(caught.value)


async def test_ipv6(server: Server, client: WorkerClient) -> None:
    try:
        worker = await server.start(answers, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert await client.call(worker, "/x", b"{}", timeout=5) == {"a": 1}


async def test_tls_checks_whom_it_talks_to(
    server: Server, client: WorkerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the worker's certificate trusted it works; without, no byte of the request leaves."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        f"-keyout {key} -out {certificate} -subj /CN=127.0.0.1 "
        "-addext subjectAltName=IP:127.0.0.1"
    )
    making = await asyncio.create_subprocess_exec(
        *command.split(), stderr=asyncio.subprocess.DEVNULL
    )
    assert await making.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    worker = await server.start(answers, ssl=context)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the refused handshake
    with pytest.raises(WorkerUnreachable):
        await client.call(worker, "/x", b"{}", timeout=5)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    client._connections._tls = None
    assert await client.call(worker, "/x", b"{}", timeout=5) == {"a": 1}
    assert await client.call(worker, "/x", b"{}", timeout=5) == {"a": 1}
    assert server.connections == 1


def test_heads_are_remembered_up_to_a_limit() -> None:
    """Paths of stored responses hold ids: the worker's record of them must not grow for ever."""
    connections = http1.Connections(connect_timeout=1)
    origin = connections.origin("http://127.0.0.1:9")
    for number in range(1000):
        head = origin.head("GET", f"/v1/responses/{number}", None, {})
        assert head.startswith(b"GET /v1/responses/%d HTTP/1.1\r\n" % number)
    assert len(origin._heads) < 100
    connections.close()


def test_a_given_content_type_is_the_only_one() -> None:
    """Forms are not JSON, and two content types are refused by workers."""
    origin = http1.Connections(connect_timeout=1).origin("http://127.0.0.1:9")
    form = origin.head("POST", "/x", b"", {"Content-Type": "multipart/form-data; boundary=b"})
    assert form.lower().count(b"content-type") == 1
    assert b"content-type: application/json" in origin.head("POST", "/x", b"", {})
