"""Sizes and times that a client may not exceed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
import uvicorn

from proxy.api.protocol import limited_http
from proxy.api.validate import MAX_DEPTH, parse_object
from proxy.errors import ClientError
from proxy.settings import Settings
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serving


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of body bytes."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    headers = [(b"content-length", str(len(str(size))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": str(size).encode()})


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[int]:
    protocol = limited_http(Settings(decode_urls=("http://x:1",), **settings))
    config = uvicorn.Config(echo, port=0, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send, and read to the end or until an answer is whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(65536), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_head_without_end_is_cut_off() -> None:
    """One endless header, or endlessly many: 431 instead of memory."""
    async with listening(max_header_bytes=2048) as port:
        start = b"POST / HTTP/1.1\r\nHost: x\r\n"
        assert b"431" in await exchange(port, start + b"a: " + b"x" * 5000)
        assert b"431" in await exchange(port, start, *[b"a: b\r\n" * 100] * 5)
        assert b"431" in await exchange(port, b"GET /" + b"x" * 5000)


async def test_large_bodies_are_not_taken_for_heads() -> None:
    """Together with the head or after it, and again on the same connection."""
    async with listening(max_header_bytes=1024) as port:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
        assert b"200 OK" in await exchange(port, head + b"x" * 5000)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(head)
            writer.write(b"x" * 2500)
            await writer.drain()
            writer.write(b"x" * 2500)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(4) == b"5000"
        writer.close()


async def test_a_silent_connection_is_closed() -> None:
    """No head in time, or half of one: 408."""
    async with listening(client_read_timeout_seconds=0.05) as port:
        assert b"408" in await exchange(port)
        assert b"408" in await exchange(port, b"POST / HTTP/1.1\r\nHo")


async def test_a_whole_head_that_is_too_large_is_refused_in_shape(serving: Serving) -> None:
    headers = {"X-Padding": "x" * 7000, "X-More": "x" * 7000}
    limit = serving.app.settings.max_header_bytes
    headers |= {f"X-{n}": "x" * 7000 for n in range(limit // 7000)}
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await serving.post({"model": MODEL}, headers=headers, path=path)
        assert answer.status == 431
    assert answer.json["type"] == "error"
    assert serving.decode.requests == []


def test_nesting_has_an_end() -> None:
    """64 levels pass, one more does not, wherever it is; wide bodies are no deeper for that."""

    def nested(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
        return b'{"a":' + opening * (levels - 1) + b"1" + closing * (levels - 1) + b"}"

    parse_object(nested(MAX_DEPTH))
    parse_object(b'{"a":[' + b",".join([b"{}"] * 1000) + b"]}")
    for body in (nested(MAX_DEPTH + 1), nested(MAX_DEPTH + 1, b'{"x":', b"}")):
        with pytest.raises(ClientError, match="nested deeper"):
            parse_object(body)
