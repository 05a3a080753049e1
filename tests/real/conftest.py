"""The real pair: two vLLM workers with NIXL between them, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

REPOSITORY = Path(__file__).parent.parent.parent
MODELS = Path(os.environ.get("KVLOOP_MODELS_DIR", REPOSITORY / ".kvloop" / "models"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


PULL_ALWAYS = {"KVLOOP_DECODE_LOCAL_APPEND": "false", "KVLOOP_PLAN_BY_COST": "false"}


@dataclass(frozen=True)
class Pair:
    """A running stack: the proxy's address, and those of both workers."""

    proxy: str
    prefill: str
    decode: str
    model: str
    redis_url: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_stack(directory: Path, *, model: str, environment: dict[str, str]) -> Pair:
    """``kvloop up --detach``; raises with its output when a part does not become ready.

    Its proxy pulls whatever it can: what is tested and measured here is the pull. Other routes are
    tested with proxies of their own beside it.
    """
    environment = {**PULL_ALWAYS, **environment}
    port = free_port()
    command = [sys.executable, "-m", "kvloop", "up", "--detach", "--model", model]
    command += ["--port", str(port), "--state-dir", str(directory), "--models-dir", str(MODELS)]
    outcome = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=directory,
        check=False,
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"kvloop up failed\n{outcome.stdout}\n{outcome.stderr}")
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        page = b"".join(iter(lambda: link.recv(65536), b""))
    workers = {
        w["role"]: "http://" + w["name"] for w in json.loads(page.split(b"\r\n\r\n")[1])["workers"]
    }
    return Pair(
        f"http://127.0.0.1:{port}",
        workers["prefill"],
        workers["decode"],
        model,
        environment["KVLOOP_REDIS_URL"],
    )


def stop_stack(directory: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "kvloop", "down", "--state-dir", str(directory)],
        check=True,
        capture_output=True,
        cwd=directory,
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, valkey_url: str) -> Iterator[Pair]:
    """One stack with the small chat model for all real tests."""
    directory = tmp_path_factory.mktemp("stack")
    try:
        yield start_stack(directory, model="smollm2", environment={"KVLOOP_REDIS_URL": valkey_url})
    finally:
        stop_stack(directory)


class Workers:
    """Calls past the proxy, and what the workers say of themselves."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession) -> None:
        self.pair = pair
        self.session = session

    async def post(self, url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        async with self.session.post(url, json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def cold(self, body: dict[str, Any]) -> list[int]:
        """Token ids of the answer computed from nothing.

        On the prefill worker, whose prefix cache is off in this profile, without any transfer.
        """
        fields = {k: v for k, v in body.items() if k not in ("stream", "conversation_id")}
        answer = await self.post(
            self.pair.prefill + "/v1/chat/completions", {**fields, "return_token_ids": True}
        )
        return list(answer["choices"][0]["token_ids"])

    async def metric(self, url: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        async with self.session.get(url + "/metrics") as response:
            page = await response.text()
        total = 0.0
        for line in page.splitlines():
            match = re.match(r"([\w:]+)(\{.*\})? (\S+)$", line)
            if not match or match[1] != name:
                continue
            if all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
                total += float(match[3])
        return total

    async def pulled(self) -> float:
        """Prompt tokens that prefill has read from decode, by vLLM's own count."""
        return await self.metric(
            self.pair.prefill, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"
        )


@pytest_asyncio.fixture
async def workers(pair: Pair) -> AsyncIterator[Workers]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Workers(pair, session)
