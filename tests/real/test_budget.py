"""The retention budget on real workers: decode frees what is given up and keeps the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.app import App
from proxy.turn import releases
from tests.proxy.conftest import running
from tests.real.conftest import Pair, Workers
from tests.real.test_pair import proxy_settings

ROOM = 24
"""Blocks of 32 tokens: about five of the conversations below."""
PINNED = "vllm:kvloop_pinned_blocks"
WORDS = "Please tell me about a small dog named Rex, the river and the stone bridge. " * 6


async def quiet(app: App) -> None:
    while tasks := list(app.conductor.background.tasks):
        await asyncio.wait(tasks)


async def pinned_at_most(workers: Workers, blocks: float) -> float:
    """What decode reports, once it is that little."""
    async with asyncio.timeout(30):
        while (pinned := await workers.metric(workers.pair.decode, PINNED)) > blocks:
            await asyncio.sleep(0.2)
    return pinned


async def test_decode_frees_what_is_given_up_and_keeps_the_last(
    pair: Pair, workers: Workers
) -> None:
    """Twelve conversations end where there is room for five: the last is pulled when it comes back,
    the first is told that it was given up, and no pin is refused on the way."""
    # Decode says its limit with its first step.
    hello = {"model": pair.model, "prompt": "Hello", "max_tokens": 1}
    await workers.post(f"{pair.decode}/v1/completions", hello)
    async with asyncio.timeout(30):
        while not (limit := await workers.metric(pair.decode, "vllm:kvloop_pin_limit_blocks")):
            await asyncio.sleep(0.2)
    refused = await workers.metric(pair.decode, "vllm:kvloop_pins_refused_total")
    settings = proxy_settings(pair, retention_share=min(1.0, ROOM / limit))
    async with running(App(settings)) as (app, port):
        session = workers.session
        url = f"http://127.0.0.1:{port}/v1"

        async def chat(name: str, messages: list[dict[str, str]]) -> tuple[str, Any]:
            body = {
                "model": pair.model,
                "messages": messages,
                "max_tokens": 4,
                "temperature": 0,
                "conversation_id": name,
            }
            async with session.post(f"{url}/chat/completions", json=body) as response:
                answer = await response.json()
                return answer["choices"][0]["message"]["content"], response.headers

        histories: dict[str, list[dict[str, str]]] = {}
        for number in range(12):
            name = f"budget {number}"
            messages = [{"role": "user", "content": f"Story {number}. {WORDS}"}]
            text, _ = await chat(name, messages)
            histories[name] = [*messages, {"role": "assistant", "content": text}]
            await quiet(app)
        (worker,) = (each for each in app.pool.workers if each.role == "decode")
        await app.conductor.retention.sweep(worker)
        await pinned_at_most(workers, max(ROOM, worker.pinned_blocks or 0))

        question = {"role": "user", "content": "And then?"}
        before = await workers.pulled()
        _, last = await chat("budget 11", [*histories["budget 11"], question])
        assert last["X-KVLoop-Reason"] == "history_grew"
        assert await workers.pulled() - before > 64
        _, first = await chat("budget 0", [*histories["budget 0"], question])
        assert first["X-KVLoop-Reason"] == "evicted"
        assert await workers.metric(pair.decode, "vllm:kvloop_pins_refused_total") == refused

        await quiet(app)
        async with session.get(f"{url}/sessions?limit=500") as response:
            kept = (await response.json())["data"]
        pinned = await workers.metric(pair.decode, PINNED)
        for each in kept:
            async with session.delete(f"{url}/sessions/{each['id']}") as response:
                assert response.status == 200
        await quiet(app)
        # Conversations that begin alike share blocks, so the sum is only an upper bound.
        await pinned_at_most(workers, pinned - max(each["blocks"] for each in kept))


async def test_a_cold_turn_takes_the_release_of_another_conversation_along(
    pair: Pair, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill computes its prompt, has decode free the other's blocks, and reads none of them."""
    monkeypatch.setattr(releases, "RIDE_SECONDS", 60.0)
    hello = {"model": pair.model, "prompt": "Hello", "max_tokens": 1}
    await workers.post(f"{pair.decode}/v1/completions", hello)
    async with asyncio.timeout(30):
        while not (limit := await workers.metric(pair.decode, "vllm:kvloop_pin_limit_blocks")):
            await asyncio.sleep(0.2)
    settings = proxy_settings(pair, retention_share=min(1.0, ROOM / limit))
    async with running(App(settings)) as (app, port):
        metrics = app.metrics.releases.labels

        async def chat(name: str, messages: list[dict[str, str]]) -> tuple[str, Any]:
            body = {"model": pair.model, "messages": messages, "max_tokens": 4, "temperature": 0}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answering = workers.session.post(url, json={**body, "conversation_id": name})
            async with answering as response:
                answer = await response.json()
                return answer["choices"][0]["message"]["content"], response.headers

        # The two have exchanged blocks once before a turn is trusted with another's handle.
        first = [{"role": "user", "content": f"A ride. {WORDS}"}]
        text, _ = await chat("ride", first)
        grown = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "So?"}]
        _, came = await chat("ride", grown)
        assert came["X-KVLoop-Reason"] == "history_grew"

        released = await workers.metric(pair.decode, "vllm:kvloop_pins_released_total")
        pulled = await workers.pulled()
        for number in range(12):
            message = {"role": "user", "content": f"Ride {number}. {WORDS}"}
            _, headers = await chat(f"ride {number}", [message])
            assert headers["X-KVLoop-Route"] == "cold-prefill"
            await app.conductor.retention.told()
            while app.conductor.retention._telling:
                await asyncio.sleep(0.01)
            if metrics("with_prefill")._value.get() >= 3:
                break
        assert metrics("with_prefill")._value.get() >= 3
        assert await workers.pulled() == pulled
        async with asyncio.timeout(30):
            while (
                await workers.metric(pair.decode, "vllm:kvloop_pins_released_total") < released + 3
            ):
                await asyncio.sleep(0.2)
