"""HTTP as clients of the hot route see it, byte by byte."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import user

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


def body(**fields: object) -> bytes:
    return orjson.dumps({"model": MODEL, "messages": [user("Hello")], **fields})


def request(data: bytes, head: bytes = CHAT, more: bytes = b"") -> bytes:
    return head + more + b"content-length: %d\r\n\r\n" % len(data) + data


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """Read one answer: status, headers, body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
    if b"content-length" in headers:
        assert b"transfer-encoding" not in headers
        data = await reader.readexactly(int(headers[b"content-length"]))
    elif headers.get(b"transfer-encoding") == b"chunked":
        data = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data += (await reader.readexactly(size + 2))[:-2]
        assert await reader.readexactly(2) == b"\r\n"
    else:
        data = await reader.read()
    return int(first.split()[1]), headers, data


async def test_a_connection_serves_one_request_after_the_other(serving: Serving) -> None:
    """Streamed, plain, refused, and a route that is not hot: all on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    for _ in range(2):
        writer.write(request(body(stream=True)))
        status, headers, data = await answer_of(reader)
        assert (status, headers[b"transfer-encoding"]) == (200, b"chunked")
        assert data.endswith(b"data: [DONE]\n\n")
        writer.write(request(body()))
        status, headers, data = await answer_of(reader)
        assert (status, orjson.loads(data)["object"]) == (200, "chat.completion")
        assert b"content-length" in headers
        writer.write(request(b"{}"))
        assert (await answer_of(reader))[0] == 400
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer_of(reader))[2] == b'{"status":"ok"}'
    writer.close()


async def test_requests_sent_in_a_row_are_answered_in_their_order(serving: Serving) -> None:
    """A client need not wait for an answer before it sends the next request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    chats = [request(body(), more=b"x-request-id: %d\r\n" % number) for number in range(3)]
    writer.write(chats[0] + health + chats[1] + chats[2] + health)
    seen = [await answer_of(reader) for _ in range(5)]
    assert [headers.get(b"x-request-id") for _, headers, _ in seen] == [
        b"0",
        None,
        b"1",
        b"2",
        None,
    ]
    assert {status for status, _, _ in seen} == {200}
    writer.close()


@pytest.mark.parametrize("cut", range(1, 400, 19))
async def test_a_request_may_come_in_any_pieces(serving: Serving, cut: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    data = request(body())
    writer.write(data[:cut])
    await asyncio.sleep(0.001)
    writer.write(data[cut:])
    assert (await answer_of(reader))[0] == 200
    writer.close()


async def test_a_chunked_request_is_read(serving: Serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    data = body()
    writer.write(CHAT + b"transfer-encoding: chunked\r\n\r\n")
    for part in (data[:10], data[10:]):
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await asyncio.sleep(0.001)
    writer.write(b"0\r\n\r\n")
    assert (await answer_of(reader))[0] == 200
    writer.close()


async def test_a_client_that_asks_first_is_told_to_go_on(serving: Serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    data = body()
    writer.write(CHAT + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(data))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(data)
    assert (await answer_of(reader))[0] == 200
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_gets_no_chunks_and_an_end(serving: Serving, stream: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    old = b"POST /v1/chat/completions HTTP/1.0\r\n"
    writer.write(request(body(stream=stream), old))
    status, headers, data = await answer_of(reader)
    assert (status, headers[b"connection"]) == (200, b"close")
    assert b"transfer-encoding" not in headers
    assert data.startswith(b"data: {" if stream else b"{")
    assert await reader.read() == b""
    writer.close()


async def test_connection_close_is_obeyed(serving: Serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(request(body(stream=True), more=b"connection: close\r\n"))
    status, headers, _ = await answer_of(reader)
    assert (status, headers[b"connection"]) == (200, b"close")
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("told", [True, False])
async def test_a_body_over_the_limit_is_refused_and_not_kept(serve: Serve, told: bool) -> None:
    """Said in advance or found out, it is a 413, and the rest is no second request."""
    serving = await serve(max_body_bytes=10_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    if told:
        writer.write(CHAT + b"content-length: 10001\r\n\r\nPOST ")
    else:
        writer.write(CHAT + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    status, headers, data = await answer_of(reader)
    assert (status, headers[b"connection"]) == (413, b"close")
    assert orjson.loads(data)["error"]["code"] == "request_too_large"
    assert await reader.read() == b""
    writer.close()


async def test_a_body_that_does_not_come_is_a_408(serve: Serve) -> None:
    serving = await serve(client_read_timeout_seconds=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(CHAT + b"content-length: 10\r\n\r\n{")
    status, headers, data = await answer_of(reader)
    assert (status, headers[b"connection"]) == (408, b"close")
    assert orjson.loads(data)["error"]["code"] == "request_timeout"
    assert await reader.read() == b""
    writer.close()


async def test_only_post_is_a_turn(serving: Serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await answer_of(reader))[0] in (404, 405)
    writer.write(request(body(), CHAT.replace(b" HTTP", b"?api-version=1 HTTP")))
    assert (await answer_of(reader))[0] == 200
    writer.close()
