"""A client may leave at any moment; nothing of its turn stays behind."""

from __future__ import annotations

import asyncio
import socket

import orjson
import pytest

from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, user


async def leave(serving: Serving, *, stream: bool, when: asyncio.Event | None, reads: int) -> None:
    """Send a request and close the socket when ``when`` is set, or after ``reads`` reads."""
    body = orjson.dumps({"model": MODEL, "messages": [user(LONG)], "stream": stream})
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )
    await writer.drain()
    if when is not None:
        await when.wait()
    for _ in range(reads):
        assert await reader.read(200)
    writer.close()
    await writer.wait_closed()


async def settled(serving: Serving, disconnects: int) -> None:
    while await serving.metric("kvloop_client_disconnects_total") < disconnects:
        await asyncio.sleep(0.01)


async def test_leaving_in_mid_stream_stops_decode(serving: Serving) -> None:
    """The worker's request is aborted, so it generates for nobody no longer."""
    serving.decode.knobs.answer = "x" * 5000
    serving.decode.knobs.chunk_delay = 0.01
    await leave(serving, stream=True, when=None, reads=3)
    await settled(serving, 1)
    while serving.decode.open_requests:
        await asyncio.sleep(0.01)
    assert serving.decode.pinned() == 0
    assert all(worker.outstanding == 0 for worker in serving.app.pool.workers)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_prefill_never_reaches_decode(serving: Serving, stream: bool) -> None:
    """Gone before the first byte: prefill is cancelled and decode is not called."""
    serving.prefill.knobs.prefill_delay = 30
    arrived = asyncio.Event()

    async def watch() -> None:
        while not serving.prefill.bodies("/v1/completions"):
            await asyncio.sleep(0.005)
        arrived.set()

    watcher = asyncio.create_task(watch())
    await leave(serving, stream=stream, when=arrived, reads=0)
    await watcher
    await settled(serving, 1)
    assert serving.decode.bodies("/v1/chat/completions") == []
    page = (await serving.get("/metrics")).body.decode()
    assert 'kvloop_client_disconnects_total{stage="prefill"} 1.0' in page


async def test_leaving_a_plain_answer_stops_decode(serving: Serving) -> None:
    """A non-streamed request is watched too."""
    serving.decode.knobs.chunk_delay = 30
    arrived = asyncio.Event()

    async def watch() -> None:
        while not serving.decode.open_requests:
            await asyncio.sleep(0.005)
        arrived.set()

    watcher = asyncio.create_task(watch())
    await leave(serving, stream=False, when=arrived, reads=0)
    await watcher
    await settled(serving, 1)
    while serving.decode.open_requests:
        await asyncio.sleep(0.01)
    assert serving.decode.aborted == 1


async def test_the_proxy_serves_on_after_fifty_departures(serving: Serving) -> None:
    """Fifty clients leave at different moments; the next one is answered and nothing leaks."""
    serving.decode.knobs.answer = "x" * 200
    serving.decode.knobs.chunk_delay = 0.005
    await asyncio.gather(*(leave(serving, stream=True, when=None, reads=n % 5) for n in range(50)))
    await settled(serving, 50)
    while serving.decode.open_requests:
        await asyncio.sleep(0.01)
    serving.decode.knobs.answer = "Fine."
    assert (await serving.chat([user("Hello")])).text == "Fine."
    assert all(worker.outstanding == 0 for worker in serving.app.pool.workers)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "client watcher" not in names


async def test_leaving_during_a_warm_prefill_still_frees_decode(serving: Serving) -> None:
    """The prefill that carries a handle is finished, so that decode's blocks are freed."""
    await serving.chat([user(LONG)], conversation_id="c")
    serving.prefill.knobs.prefill_delay = 0.1
    body = {"messages": [user(LONG), {"role": "assistant", "content": "Fine."}, user("And?")]}
    turn = asyncio.create_task(serving.chat(body["messages"], conversation_id="c"))
    while len(serving.prefill.bodies("/v1/completions")) < 2:
        await asyncio.sleep(0.005)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await settled(serving, 1)
    while serving.app.conductor.background_tasks:
        await asyncio.sleep(0.01)
    assert serving.decode.pinned() == 0
    assert len(serving.decode.bodies("/v1/chat/completions")) == 1


async def test_a_client_that_stops_reading_is_cut_off(serve: Serve) -> None:
    """A stalled client does not hold a decode slot: its stream is aborted after the timeout."""
    serving = await serve(client_write_timeout_seconds=0.2)
    serving.decode.knobs.answer = "x" * 8_000_000
    serving.decode.knobs.letters_per_chunk = 100_000
    body = orjson.dumps({"model": MODEL, "messages": [user(LONG)], "stream": True})
    small = socket.socket()
    # A small window fills in no time, where the kernel's own choice takes megabytes.
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.setblocking(False)
    await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", serving.port))
    _reader, writer = await asyncio.open_connection(sock=small, limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )
    await writer.drain()
    while not serving.decode.open_requests:
        await asyncio.sleep(0.01)
    while serving.decode.open_requests:
        await asyncio.sleep(0.01)
    page = (await serving.get("/metrics")).body.decode()
    assert 'outcome="client_stalled"' in page
    assert serving.app.conductor.admission.in_flight == 0
    writer.transport.abort()
