"""Push mode on real workers: prefill writes into decode, and both legs start together."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from proxy.app import App
from proxy.settings import Settings
from proxy.workers.client import WorkerClient
from proxy.workers.worker import Worker
from tests.proxy.conftest import running
from tests.real.conftest import MODELS, Pair, Workers, free_port
from tests.real.test_pair import STORY
from worker_launch.models import ensure_tiny_model

MODEL = "tiny"
TOKENS = 12
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def pushing(tmp_path_factory: pytest.TempPathFactory, valkey_url: str) -> Iterator[Pair]:
    """Two workers as ``kvloop worker ... --transfer-mode push`` starts them."""
    model = ensure_tiny_model(MODELS / "tiny")
    folder = tmp_path_factory.mktemp("push")
    started: list[subprocess.Popen[bytes]] = []
    urls: dict[str, str] = {}

    def start(role: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "worker_launch", role, "--transfer-mode", "push"]
        command += ["--model", str(model), "--served-model-name", MODEL, "--port", str(port)]
        command += ["--side-channel-port", str(free_port())]
        command += ["--set", "env.VLLM_CPU_KVCACHE_SPACE=1"]
        with (folder / f"{role}.log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        urls[role] = f"http://127.0.0.1:{port}"

    try:
        start("prefill")
        start("decode")
        yield Pair("", urls["prefill"], urls["decode"], MODEL, valkey_url)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


@pytest_asyncio.fixture
async def workers(pushing: Pair) -> AsyncIterator[Workers]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        found = Workers(pushing, session)
        async with asyncio.timeout(180):
            for url in (pushing.prefill, pushing.decode):
                while not await _is_up(session, url):
                    await asyncio.sleep(0.5)
        yield found


async def _is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


@dataclass
class Call:
    """A leg as the proxy sent it. Times are monotonic seconds."""

    worker: str
    path: str
    sent: float
    answered: float = 0.0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call of the proxy to a worker, in the order in which they were sent."""
    seen: list[Call] = []
    call, stream = WorkerClient.call, WorkerClient.stream

    async def timed(self: WorkerClient, worker: Worker, path: str, *args: Any, **more: Any) -> Any:
        seen.append(leg := Call(worker.name, path, time.monotonic()))
        answer = await call(self, worker, path, *args, **more)
        leg.answered = time.monotonic()
        return answer

    @asynccontextmanager
    async def noted(
        self: WorkerClient, worker: Worker, path: str, *args: Any, **more: Any
    ) -> AsyncIterator[Any]:
        seen.append(Call(worker.name, path, time.monotonic()))
        async with stream(self, worker, path, *args, **more) as response:
            yield response

    monkeypatch.setattr(WorkerClient, "call", timed)
    monkeypatch.setattr(WorkerClient, "stream", noted)
    return seen


def prompt_of(path: str, name: str) -> dict[str, Any]:
    """A prompt whose first block nobody has seen: decode's own cache must have nothing of it."""
    text = f"{name} {path}. {STORY}"
    if path == COMPLETIONS:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


async def computed(workers: Workers, path: str, body: dict[str, Any]) -> list[int]:
    """Token ids of the answer computed by one worker without any transfer."""
    answer = await workers.post(
        workers.pair.prefill + path, {**body, "stream": False, "return_token_ids": True}
    )
    return list(answer["choices"][0]["token_ids"])


async def through(
    workers: Workers, url: str, body: dict[str, Any]
) -> tuple[list[int], Mapping[str, str]]:
    """Token ids and headers of the proxy's answer."""
    body = {**body, "return_token_ids": True}
    async with workers.session.post(url, json=body) as response:
        page = await response.read()
        assert response.status == 200, page
        headers = response.headers
    if not body["stream"]:
        return orjson.loads(page)["choices"][0]["token_ids"], headers
    events = [orjson.loads(e[6:]) for e in page.split(b"\n\n") if e.startswith(b"data: {")]
    ids = [i for e in events for c in e["choices"] for i in c.get("token_ids") or ()]
    return ids, headers


async def written(workers: Workers) -> float:
    """Prompt tokens that decode has had from prefill, by vLLM's own count."""
    return await workers.metric(
        workers.pair.decode, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"
    )


async def nothing_left(workers: Workers) -> None:
    """Return when decode has no block in use."""
    async with asyncio.timeout(20):
        while await workers.metric(workers.pair.decode, "vllm:kv_cache_usage_perc"):
            await asyncio.sleep(0.2)


def settings(pair: Pair) -> Settings:
    return Settings(
        prefill_urls=(pair.prefill,), decode_urls=(pair.decode,), redis_url=pair.redis_url
    )


async def test_pushed_turns_equal_a_plain_run_and_both_legs_overlap(
    pushing: Pair, workers: Workers, calls: list[Call]
) -> None:
    """Chat and completions, whole and streamed: right tokens, all of the prompt from prefill, and
    decode's leg sent before prefill answered."""
    async with running(App(settings(pushing))) as (app, port):
        prefill = app.pool.get(pushing.prefill.removeprefix("http://"))
        assert prefill is not None

        async def turn(path: str, name: str, *, stream: bool) -> tuple[str, float]:
            body: dict[str, Any] = {
                "model": MODEL,
                **prompt_of(path, name),
                "temperature": 0,
                "max_tokens": TOKENS,
                "stream": stream,
            }
            expected = await computed(workers, path, body)
            before = await written(workers)
            calls.clear()
            ids, headers = await through(workers, f"http://127.0.0.1:{port}{path}", body)
            assert ids == expected, (path, name)
            assert len(ids) == TOKENS
            moved = await written(workers) - before
            if headers["X-KVLoop-Route"] == "push":
                assert moved == int(headers["X-KVLoop-Prompt-Tokens"]) > 100
            else:
                assert moved == 0
            while app.conductor.background_tasks:  # prefill's answer may come last
                await asyncio.sleep(0.005)
            legs = {call.worker: call for call in calls if call.path == path}
            return headers["X-KVLoop-Reason"], (
                legs[prefill.name].answered - legs[app.pool.workers[1].name].sent
                if prefill.name in legs
                else 0.0
            )

        # Production workers do not serve /server_info: the first answer says what they are.
        assert (await turn(CHAT, "first", stream=False))[0] == "push_found"
        for path in (CHAT, COMPLETIONS):
            for stream in (False, True):
                name = "streamed" if stream else "whole"
                reason, overlap = await turn(path, f"together {name}", stream=stream)
                assert reason == "push_one_way"
                assert overlap > 0
                prefill.push_place = {}
                reason, overlap = await turn(path, f"in turn {name}", stream=stream)
                assert reason == "push_in_turn"
                assert overlap < 0
    await nothing_left(workers)


@pytest.mark.parametrize(
    ("path", "length"), [("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens")]
)
async def test_other_routes_are_paired_too(
    pushing: Pair, workers: Workers, path: str, length: str
) -> None:
    """Anthropic's messages and OpenAI's responses: the whole prompt comes from prefill."""
    field = "input" if path == "/v1/responses" else "messages"
    async with running(App(settings(pushing))) as (_, port):
        for turn, route in enumerate(("decode-only", "push", "push")):
            message = {"role": "user", "content": f"{turn} {path}. {STORY}"}
            body = {"model": MODEL, field: [message], length: TOKENS, "temperature": 0}
            plain = await workers.post(pushing.prefill + path, body)
            before = await written(workers)
            async with workers.session.post(f"http://127.0.0.1:{port}{path}", json=body) as answer:
                assert answer.status == 200
                assert answer.headers["X-KVLoop-Route"] == route
                moved = await written(workers) - before
                expected = int(answer.headers["X-KVLoop-Prompt-Tokens"]) if turn else 0
                assert moved == expected
                assert _text(await answer.json()) == _text(plain)


def _text(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    return "".join(block["text"] for block in answer["content"])


async def test_a_client_that_leaves_leaves_no_blocks_on_decode(
    pushing: Pair, workers: Workers, calls: list[Call]
) -> None:
    """vLLM frees the blocks of an aborted request only when prefill has written them."""
    async with running(App(settings(pushing))) as (app, port):
        url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "stream": True}
        await through(workers, url, {**body, **prompt_of(COMPLETIONS, "leaving")})
        for number in range(3):
            calls.clear()
            body["prompt"] = f"Gone {number}. " + STORY * 4
            leaving = asyncio.create_task(through(workers, url, body))
            while app.pool.workers[1].name not in {call.worker for call in calls}:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)  # until decode has read it, and prefill has not done
            leaving.cancel()
            await asyncio.wait({leaving})
        await nothing_left(workers)
        assert app.metrics.client_disconnects.labels("decode")._value.get() > 0
