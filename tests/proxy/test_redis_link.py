"""The one connection of the hot path to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from proxy.session.redis_link import RedisLink

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Handler], Awaitable[RedisLink]]


@pytest.fixture
async def link(valkey_url: str) -> AsyncIterator[RedisLink]:
    link = RedisLink(valkey_url, timeout_seconds=10)
    yield link
    await link.close()


@pytest.fixture
async def scripted() -> AsyncIterator[Serve]:
    """A link to a server that the test plays."""
    open_things: list[object] = []

    async def serve(handler: Handler, *, timeout: float = 5) -> RedisLink:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link = RedisLink(f"redis://127.0.0.1:{port}", timeout_seconds=timeout)
        open_things.extend((server, link))
        return link

    yield serve
    for each in open_things:
        if isinstance(each, RedisLink):
            await each.close()
        else:
            each.close()  # type: ignore[attr-defined]


async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer what redis-py says when it connects, up to the first command of ours (GET)."""
    while (command := await command_of(reader))[0] != b"GET":
        writer.write(b"+OK\r\n")
    assert command


async def command_of(reader: asyncio.StreamReader) -> list[bytes]:
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


async def test_replies_find_their_questions(link: RedisLink) -> None:
    """A thousand commands at once, on one connection, in any mixture of kinds."""

    async def one(number: int) -> None:
        key = f"link:{number}"
        assert await link.command("SET", key, number) == b"OK"
        assert await link.command("GET", key) == str(number).encode()
        with pytest.raises(ResponseError):
            await link.command("LPUSH", key, "x")
        assert await link.together(("DEL", key), ("EXISTS", key)) == [1, 0]

    await asyncio.gather(*(one(number) for number in range(250)))
    clients = (await link.command("CLIENT", "LIST")).decode()
    assert clients.count("cmd=client|list") == 1


async def test_a_script_that_redis_forgot_is_sent_again(link: RedisLink) -> None:
    script = link.register_script("return {KEYS[1], ARGV[1]}")
    for _ in range(2):
        assert await script(keys=["k"], args=[b"\x00\xff"]) == [b"k", b"\x00\xff"]
        await link.command("SCRIPT", "FLUSH")


async def test_a_cancelled_question_leaves_the_others_their_replies(link: RedisLink) -> None:
    await link.command("SET", "link:a", "1")
    questions = [asyncio.create_task(link.command("GET", "link:a")) for _ in range(3)]
    slow = asyncio.create_task(link.command("INCR", "link:a"))
    await asyncio.sleep(0)
    questions[1].cancel()
    await asyncio.gather(questions[1], return_exceptions=True)
    assert [await questions[0], await questions[2], await slow] == [b"1", b"1", 2]
    assert await link.command("GET", "link:a") == b"2"


async def test_no_reply_in_time_ends_the_connection_and_the_next_one_works(scripted: Serve) -> None:
    """Whoever waits on it is told; what comes late can be nobody's reply."""
    connections = 0

    async def silent_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        silent = connections == 1
        await greeted(reader, writer)
        if not silent:
            writer.write(b"$1\r\n2\r\n")
        await reader.read()

    link = await scripted(silent_once, timeout=0.1)  # type: ignore[call-arg]
    waiting = [asyncio.create_task(link.command("GET", "a")) for _ in range(3)]
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, RedisTimeoutError)
    assert await link.command("GET", "a") == b"2"
    assert connections == 2


@pytest.mark.parametrize("reply", [b"", b"?what\r\n", b"$1\r\n1\r\n$1\r\n1\r\n"])
async def test_a_lost_or_senseless_connection_is_replaced(scripted: Serve, reply: bytes) -> None:
    """Closed without a reply, no Redis protocol, or a reply to no question."""
    connections = 0

    async def bad_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        good = connections > 1
        await greeted(reader, writer)
        writer.write(b"$1\r\n2\r\n" if good else reply)
        if good:
            await reader.read()

    link = await scripted(bad_once)
    if reply.startswith(b"$"):
        assert await link.command("GET", "a") == b"1"
    else:
        with pytest.raises(RedisConnectionError):
            await link.command("GET", "a")
    while link._wire is not None and not link._wire.closed:
        await asyncio.sleep(0.001)
    assert await link.command("GET", "a") == b"2"


async def test_nobody_there_is_told_to_all_that_wait() -> None:
    """One attempt for all, and its cause says that no command can have had an effect."""
    link = RedisLink("redis://127.0.0.1:1", timeout_seconds=1)
    errors = await asyncio.gather(
        *(link.command("GET", "a") for _ in range(3)), return_exceptions=True
    )
    for error in errors:
        assert isinstance(error, RedisConnectionError)
        assert isinstance(error.__context__, ConnectionRefusedError)
    await link.close()
