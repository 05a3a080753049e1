"""``--workers 2``: several processes, one proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy import processes
from proxy.settings import Settings, SettingsError
from tests.fakes.worker import MODEL, Cluster, FakeWorker

ROOT = Path(__file__).parent.parent.parent
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Proxy:
    """The parent process and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = ""
        self.events: list[dict[str, Any]] = []

    async def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th line of this event so far or to come."""
        assert self.process.stderr is not None
        while sum(each["event"] == event for each in self.events) < count:
            line = await self.process.stderr.readline()
            assert line, f"the proxy ended without {event}: {self.events}"
            if line.startswith(b"{"):
                self.events.append(orjson.loads(line))
        return next(each for each in self.events if each["event"] == event)


@asynccontextmanager
async def running(decode: FakeWorker, *more: str) -> AsyncIterator[Proxy]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "--port", "0", "--workers", "2"),
        *("--decode-urls", decode.url, *more),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    proxy = Proxy(process)
    try:
        async with asyncio.timeout(60):
            proxy.url = f"http://127.0.0.1:{(await proxy.until('parent_started'))['port']}"
            await proxy.until("worker_up", 2)
        yield proxy
    finally:
        if process.returncode is None:
            process.kill()
        assert process.stderr is not None
        await process.stderr.read()  # ends when the children have ended too
        await process.wait()


async def turn(url: str) -> int:
    """One turn on a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/chat/completions", json=BODY) as answer,
    ):
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        return answer.status


async def counted(url: str) -> float:
    """Turns that ended well, by the metrics of whichever process answers."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
        page = (await answer.read()).decode().splitlines()
    turns = [line for line in page if line.startswith("kvloop_turns_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in turns if 'outcome="ok"' in line)


@pytest.mark.slow
async def test_two_processes_serve_one_port_through_a_death_and_end_together() -> None:
    """Any shows the metrics of both; a killed one is replaced; SIGTERM lets streams end."""
    decode = await FakeWorker(Cluster(), "decode").start()
    try:
        async with running(decode) as proxy, asyncio.timeout(60):
            pids = children(proxy.process.pid)
            sessions = [each for each in pids if "proxy.child" in _command(each)]
            assert len(sessions) == 2
            assert await asyncio.gather(*(turn(proxy.url) for _ in range(32))) == [200] * 32
            await proxy.until("turn", 32)
            assert {await counted(proxy.url) for _ in range(8)} == {32.0}
            os.kill(sessions[0], signal.SIGKILL)
            died = await proxy.until("process_died")
            assert (died["pid"], died["code"]) == (sessions[0], -signal.SIGKILL)
            # While it is away the other one serves, and what came to it waits for its successor.
            assert await asyncio.gather(*(turn(proxy.url) for _ in range(16))) == [200] * 16
            await proxy.until("worker_up", 3)

            decode.knobs.answer, decode.knobs.chunk_delay = "x" * 20, 0.02
            streams = [asyncio.create_task(turn(proxy.url)) for _ in range(8)]
            while decode.open_requests < 8:
                await asyncio.sleep(0.005)
            proxy.process.send_signal(signal.SIGTERM)
            assert await asyncio.gather(*streams) == [200] * 8
            await proxy.until("draining", 2)
            assert proxy.process.stderr is not None
            await proxy.process.stderr.read()
            assert await proxy.process.wait() == 0
    finally:
        await decode.stop()


@pytest.mark.slow
async def test_children_do_not_outlive_their_parent() -> None:
    decode = await FakeWorker(Cluster(), "decode").start()
    try:
        async with running(decode) as proxy, asyncio.timeout(60):
            pids = [each for each in children(proxy.process.pid) if "proxy.child" in _command(each)]
            proxy.process.kill()
            for pid in pids:
                while "proxy.child" in _command(pid):
                    await asyncio.sleep(0.02)
    finally:
        await decode.stop()


def test_a_taken_port_stops_the_start_with_its_name() -> None:
    """Also when it was taken by a proxy whose sockets would share it."""
    first = processes._listen(Settings(decode_urls=("http://d:1",), port=0, workers=2))
    first[0].listen()
    port = first[0].getsockname()[1]
    try:
        with pytest.raises(SettingsError, match="KVLOOP_PORT"):
            processes._listen(Settings(decode_urls=("http://d:1",), port=port, workers=2))
    finally:
        for each in first:
            each.close()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
