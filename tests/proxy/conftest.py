"""A running proxy between fake workers, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
import redis.asyncio
import uvicorn
import uvloop

from proxy.api import http
from proxy.app import App
from proxy.settings import Settings
from proxy.turn import retaining
from tests.fakes.worker import MODEL, Cluster, FakeWorker


@dataclass
class Answer:
    """A proxy's answer: status, headers, body; ``text`` is the assistant's words."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def chunks(self) -> list[Any]:
        events = self.body.decode().split("\n\n")
        return [orjson.loads(e[6:]) for e in events if e.startswith("data: {")]

    @property
    def streamed(self) -> bool:
        return bool(self.headers["content-type"].startswith("text/event-stream"))

    @property
    def text(self) -> str:
        if self.streamed:
            return "".join(
                choice["delta"].get("content") or ""
                for chunk in self.chunks
                for choice in chunk.get("choices", ())
            )
        return str(self.json["choices"][0]["message"]["content"])

    @property
    def reason(self) -> str:
        return str(self.headers["X-KVLoop-Reason"])

    @property
    def route(self) -> str:
        return str(self.headers["X-KVLoop-Route"])

    @property
    def reused(self) -> int:
        return int(self.headers["X-KVLoop-Reused-Tokens"])


class Serving:
    """The proxy, its fakes and a client."""

    def __init__(
        self, app: App, port: int, cluster: Cluster, p: list[FakeWorker], d: list[FakeWorker]
    ) -> None:
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.cluster = cluster
        self.prefills = p
        self.decodes = d
        self.prefill = p[0] if p else None
        self.decode = d[0]
        self.session = aiohttp.ClientSession()

    async def chat(
        self,
        messages: Any,
        *,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        return await self.post({"model": MODEL, "messages": messages, **fields}, headers=headers)

    async def post(
        self,
        body: Any,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
        path: str = "/v1/chat/completions",
    ) -> Answer:
        data = orjson.dumps(body) if raw is None else raw
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> Answer:
        async with self.session.get(self.url + path, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def metric(self, line_start: str) -> float:
        """The sum of the samples whose line starts so."""
        page = (await self.get("/metrics")).body.decode()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith(line_start)
        )


class _PromptServer(uvicorn.Server):
    """Stops at once. uvicorn looks ten times a second whether it should, and then waits as long:
    a fifth of a second in each of hundreds of tests."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host="127.0.0.1",
                port=0,
                http=http.protocol,
                log_config=None,
                lifespan="on",
                date_header=False,
            )
        )
        self.leave = asyncio.Event()

    capture_signals = staticmethod(nullcontext)  # type: ignore[assignment]  # pytest keeps its own

    async def main_loop(self) -> None:
        await self.leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.001)
        await self.lifespan.shutdown()


@asynccontextmanager
async def running(app: App) -> AsyncIterator[tuple[App, int]]:
    """Serve the proxy on a free port, with all its workers seen healthy; gives app and port."""
    server = _PromptServer(app)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
            raise RuntimeError("the proxy did not start")
        await asyncio.sleep(0.005)
    while not all(worker.healthy for worker in app.pool.workers):
        await asyncio.sleep(0.005)
    try:
        yield app, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.leave.set()
        await task


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The proxy runs on uvloop; the client to workers is tested there and on asyncio's loop."""
    if item.path.name == "test_http1.py":
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


Serve = Callable[..., Awaitable[Serving]]


@pytest.fixture(autouse=True)
def _little_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers are told soon: tests wait for it after each turn."""
    monkeypatch.setattr(retaining, "GATHER_SECONDS", 0.002)


@pytest.fixture
async def serve(valkey_url: str) -> AsyncIterator[Serve]:
    """Start a proxy with fakes: ``await serve(prefills=1, decodes=1, **settings)``."""
    stop: list[Callable[[], Awaitable[None]]] = []
    redis_client = redis.asyncio.Redis.from_url(valkey_url)
    await redis_client.flushall()
    await redis_client.aclose()

    async def start(
        prefills: int = 1,
        decodes: int = 1,
        *,
        cluster: Cluster | None = None,
        workers: tuple[list[FakeWorker], list[FakeWorker]] | None = None,
        fake: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Serving:
        cluster = cluster or Cluster()
        if workers is None:
            kind = fake or {}
            p = [await FakeWorker(cluster, "prefill", **kind).start() for _ in range(prefills)]
            d = [await FakeWorker(cluster, "decode", **kind).start() for _ in range(decodes)]
            stop.extend(each.stop for each in (*p, *d))
        else:
            p, d = workers
        values: dict[str, Any] = {
            "prefill_urls": tuple(each.url for each in p),
            "decode_urls": tuple(each.url for each in d),
            "redis_url": valkey_url,
            "health_interval_seconds": 0.05,
            # A busy test machine must not look like a dead Redis or worker.
            "table_timeout_seconds": 10,
            "health_timeout_seconds": 30,
            # Fakes take no time worth comparing; tests of costs say what legs cost.
            "plan_by_cost": False,
            **settings,
        }
        app = App(Settings(**values))
        exit_stack = AsyncExitStack()
        _, port = await exit_stack.enter_async_context(running(app))
        serving = Serving(app, port, cluster, p, d)

        async def shut() -> None:
            await serving.session.close()
            await exit_stack.aclose()

        stop.insert(0, shut)
        return serving

    yield start
    for each in stop:
        await each()


@pytest.fixture
async def serving(serve: Serve) -> Serving:
    """One prefill, one decode, defaults."""
    return await serve()
