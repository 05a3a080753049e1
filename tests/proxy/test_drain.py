"""SIGTERM with a stream running, on a real proxy process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.worker import MODEL, Cluster, FakeWorker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


async def test_sigterm_finishes_streams_refuses_new_turns_and_exits_0(valkey_url: str) -> None:
    """The running stream is whole, a new turn gets 503 with Retry-After, the exit code is 0."""
    cluster = Cluster()
    prefill = await FakeWorker(cluster, "prefill").start()
    decode = await FakeWorker(cluster, "decode").start()
    decode.knobs.answer, decode.knobs.chunk_delay = "x" * 40, 0.05
    # The port after a free one is often taken: both are looked for.
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        url = f"http://127.0.0.1:{one.getsockname()[1]}"
        admin_port = other.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "--port", url.rsplit(":", 1)[1]),
        *("--prefill-urls", prefill.url, "--decode-urls", decode.url),
        *("--redis-url", valkey_url, "--admin-port", str(admin_port)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    path = url + "/v1/chat/completions"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(40):
            while True:
                try:
                    async with session.get(url + "/ready") as ready:
                        if ready.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
            async with session.get(f"http://127.0.0.1:{admin_port}/health") as admin:
                assert admin.status == 200
            async with session.post(path, json=body) as stream:
                await stream.content.readany()
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                async with session.post(path, json=body) as refused:
                    assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
                    assert (await refused.json())["error"]["code"] == "draining"
                rest = await stream.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await prefill.stop()
        await decode.stop()
