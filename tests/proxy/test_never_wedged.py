"""Rare moments in which a worker, Redis or a client is neither quite there nor quite gone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
import redis.exceptions
from aiohttp import web
from aiohttp.typedefs import Handler

from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, assistant, user

CHAT = "/v1/chat/completions"
NEXT = [user(LONG), assistant("Fine."), user("And then?")]


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


async def test_a_dead_engine_behind_a_living_server_gets_one_trial_a_pause(serve: Serve) -> None:
    """Turns fail and probes pass: the breaker leaves the worker out, tries it, takes it back."""
    serving = await serve(decodes=2, breaker_failures=2, breaker_pause_seconds=3600)
    dead = serving.decodes[0]
    worker = next(each for each in serving.app.pool.workers if each.name == dead.name)

    numbers = itertools.count()

    async def turns_it_got(count: int) -> int:
        before = len(dead.bodies(CHAT))
        for _ in range(count):
            # A conversation of its own: others would stay on the worker that has their history.
            answer = await serving.chat([user(LONG)], conversation_id=str(next(numbers)))
            assert answer.status == 200
        return len(dead.bodies(CHAT)) - before

    dead.knobs.fail_next[CHAT] = 1000
    assert await turns_it_got(20) == 2
    worker._left_out_until = 1.0  # the pause is over
    assert await turns_it_got(20) == 1
    dead.knobs.fail_next.clear()
    worker._left_out_until = 1.0
    # Its reads from prefill are paused too by now: another worker is preferred meanwhile.
    assert not worker.transfers_allowed(time.monotonic())
    worker._transfers_paused_until = 0.0
    assert await turns_it_got(20) >= 4
    assert worker.healthy


async def test_a_plain_answer_that_comes_as_its_client_leaves_gives_its_blocks_back(
    serve: Serve,
) -> None:
    """Decode has pinned and its answer is on the way: these last words are heard and released."""
    pinned, say = asyncio.Event(), asyncio.Event()

    @web.middleware
    async def slow_to_say(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if request.path == CHAT:
            pinned.set()
            await say.wait()
        return response

    cluster = Cluster()
    prefill = await FakeWorker(cluster, "prefill").start()
    decode = FakeWorker(cluster, "decode")
    decode.middlewares = (slow_to_say,)
    await decode.start()
    serving = await serve(cluster=cluster, workers=([prefill], [decode]))
    turn = asyncio.create_task(serving.chat([user(LONG)]))
    await pinned.wait()
    assert decode.pinned() == 1
    turn.cancel()
    await until(lambda: serving.app.conductor.background_tasks > 0)
    say.set()
    await until(lambda: serving.app.conductor.background_tasks == 0)
    assert decode.pinned() == 0
    assert cluster.releases == 1
    for each in (prefill, decode):
        await each.stop()


async def test_a_stream_whose_end_lies_unread_when_its_client_leaves_gives_its_blocks_back(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn's event has arrived, the proxy has not come to read it: the pin is not forgotten."""
    waiting = asyncio.Event()
    read_some = serving.app.client.read_some
    reads = 0

    async def late(*arguments: Any, **options: Any) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 1:
            return await read_some(*arguments, **options)
        waiting.set()
        return await asyncio.Event().wait() and b""

    monkeypatch.setattr(serving.app.client, "read_some", late)
    serving.decode.knobs.chunk_delay = 0.01
    turn = asyncio.create_task(serving.chat([user(LONG)], stream=True))
    await waiting.wait()
    await until(lambda: serving.decode.pinned() == 1)
    await until(lambda: serving.decode.open_requests == 0)
    turn.cancel()
    await until(lambda: serving.cluster.releases == 1)
    assert serving.decode.pinned() == 0


async def test_a_commit_that_may_have_been_carried_out_is_not_released(serving: Serving) -> None:
    """Redis obeyed and its reply got lost: the record is there, so the blocks must be too."""
    table = serving.app.table
    commit = table._commit

    async def obeys_silently(**arguments: Any) -> Awaitable[Any]:
        await commit(**arguments)
        raise redis.exceptions.TimeoutError

    table._commit = obeys_silently
    assert (await serving.chat([user(LONG)], conversation_id="c")).status == 200
    table._commit = commit
    table._paused_until = 0.0
    await until(lambda: serving.app.conductor.background_tasks == 0)
    assert (serving.decode.pinned(), serving.cluster.releases) == (1, 0)
    answer = await serving.chat(NEXT, conversation_id="c")
    assert (answer.status, answer.reason) == (200, "history_grew")
    assert serving.cluster.faults == []


async def test_a_release_that_one_prefill_worker_refuses_is_carried_by_another(
    serve: Serve,
) -> None:
    """No Redis, so each turn's blocks are given back; the worker that answers 500 changes nothing.

    It stays in service: its probes pass and its breaker never opens.
    """
    serving = await serve(
        prefills=2,
        redis_url="redis://127.0.0.1:1",
        table_timeout_seconds=0.1,
        breaker_failures=1000,
        pull_failures=1000,
    )
    serving.prefills[0].knobs.fail_next["/v1/completions"] = 1000
    for _ in range(4):
        assert (await serving.chat([user(LONG)])).status == 200
    await until(lambda: serving.app.conductor.background_tasks == 0)
    assert serving.decode.pinned() == 0
    assert serving.cluster.releases == 4


async def test_a_body_that_trickles_in_too_slowly_gets_a_408(serve: Serve) -> None:
    """The socket is given back with an error in the API's form, and no worker was touched."""
    serving = await serve(client_read_timeout_seconds=0.1)
    body = orjson.dumps({"model": MODEL, "messages": [user(LONG)]})
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body[:20]
    )
    page = await reader.read()  # to the end of the connection
    writer.close()
    head, _, text = page.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"x-request-id: " in head
    assert b'"code":"request_timeout"' in text
    assert serving.prefill.requests == serving.decode.requests == []
