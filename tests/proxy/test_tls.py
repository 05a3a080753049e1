"""TLS on all three sides: to clients, to workers, to Redis."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import httpx2 as httpx
import pytest
import redis.asyncio
import uvicorn

from proxy.api.protocol import limited_http
from proxy.app import App
from proxy.settings import Settings
from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import running

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed one for localhost: (certificate, key)."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def tls_front(
    certificate: tuple[Path, Path], connect: Callable[[], Awaitable[Streams]]
) -> AsyncIterator[int]:
    """A TLS port before something that speaks none."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await connect()
        for pair in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(_copy(*pair))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_clients_speak_tls(certificate: tuple[Path, Path], valkey_url: str) -> None:
    """With a certificate the port speaks TLS and nothing else."""
    decode = await FakeWorker(Cluster(), "decode").start()
    settings = Settings(
        decode_urls=(decode.url,),
        redis_url=valkey_url,
        health_interval_seconds=0.05,
        tls_cert_file=str(certificate[0]),
        tls_key_file=str(certificate[1]),
    )
    config = uvicorn.Config(
        App(settings),
        host="localhost",
        port=0,
        http=limited_http(settings),
        log_config=None,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with httpx.AsyncClient(verify=trusting) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        url = f"https://localhost:{port}/v1/chat/completions"
        while (answer := await client.post(url, json=body)).status_code == 503:
            await asyncio.sleep(0.02)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            await client.get(f"http://localhost:{port}/health")
    server.should_exit = True
    await task
    await decode.stop()


async def test_workers_certificates_are_checked(
    certificate: tuple[Path, Path], valkey_url: str
) -> None:
    """An https worker is served with the authority that signed it, and out of service without."""
    decode = await FakeWorker(Cluster(), "decode").start()

    async def connect() -> Streams:
        return await asyncio.open_connection("127.0.0.1", decode.port)

    async with tls_front(certificate, connect) as port:
        values = {
            "decode_urls": (f"https://localhost:{port}",),
            "redis_url": valkey_url,
            "health_interval_seconds": 0.05,
        }
        trusting = App(Settings(**values, worker_ca_file=str(certificate[0])))
        async with running(trusting) as (_, own), httpx.AsyncClient() as client:
            body = {"model": MODEL, "prompt": "Hello"}
            answer = await client.post(f"http://127.0.0.1:{own}/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "Fine."
        doubting = App(Settings(**values))
        await doubting.start()
        worker = doubting.pool.workers[0]
        while not worker.last_error:
            await asyncio.sleep(0.01)
        assert not worker.healthy
        await doubting.stop()
    await decode.stop()


async def test_redis_with_password_and_tls(certificate: tuple[Path, Path], valkey_url: str) -> None:
    """``rediss://user:password@host``, with the authority as a parameter of the URL."""
    admin = redis.asyncio.Redis.from_url(valkey_url)
    await admin.execute_command("ACL", "SETUSER", "proxy", "on", ">s3cret", "~*", "&*", "+@all")

    async def connect() -> Streams:
        return await asyncio.open_unix_connection(valkey_url.removeprefix("unix://"))

    async with tls_front(certificate, connect) as port:
        for password, works in (("s3cret", True), ("wrong", False)):
            app = App(
                Settings(
                    decode_urls=("http://127.0.0.1:9",),
                    redis_url=f"rediss://proxy:{password}@localhost:{port}"
                    f"?ssl_ca_certs={certificate[0]}",
                    table_timeout_seconds=10,
                )
            )
            await app.start()
            assert await app.table.ping() is works
            await app.stop()
    await admin.execute_command("ACL", "DELUSER", "proxy")
    await admin.aclose()
