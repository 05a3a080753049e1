"""Short turns on real workers: decode goes on from its own cache, and nothing is lost by it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from proxy.app import App
from tests.proxy.conftest import running
from tests.real.conftest import Pair, Workers
from tests.real.test_pair import BLOCK, QUESTIONS, STORY, ask, proxy_settings, release_all

TURNS = (
    ("Appended. " + STORY + "What is the name of the dog?", "cold-prefill"),
    ("Where does he live?", "decode-local-append"),
    (STORY + "And what is the dog's colour?", "prefill-with-pull"),
    ("And what happened to his boat?", "decode-local-append"),
    ("Who built a new one?", "decode-local-append"),
)


async def test_appended_turns_equal_a_cold_run_and_can_be_pulled_later(
    pair: Pair, workers: Workers
) -> None:
    """Appends and pulls in turn: tokens as computed from nothing, history reused in full."""
    pinned_before = await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks")
    settings = proxy_settings(pair, decode_local_append=True, health_interval_seconds=0.2)
    messages: list[dict[str, str]] = []
    history = 0
    async with (
        running(App(settings)) as (app, port),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        decode = app.pool.get(pair.decode.removeprefix("http://"))
        assert decode is not None
        for turn, (question, route) in enumerate(TURNS):
            messages.append({"role": "user", "content": question})
            body: dict[str, Any] = {
                "model": pair.model,
                "messages": messages,
                "temperature": 0,
                "max_tokens": 24,
                "conversation_id": "appended",
            }
            expected = await workers.cold(body)
            before = await workers.pulled()
            text, ids, headers = await ask(client, body, stream=turn % 2 == 1)
            pulled = await workers.pulled() - before

            assert ids == expected, f"turn {turn}"
            assert headers["X-KVLoop-Route"] == route
            if route == "decode-local-append":
                assert pulled == 0
                reused = int(headers["X-KVLoop-Reused-Tokens"])
                assert history - BLOCK <= reused <= history
            if route == "prefill-with-pull":
                assert history - BLOCK <= pulled <= history
            history = int(headers["X-KVLoop-Prompt-Tokens"]) + len(ids) - 1
            messages.append({"role": "assistant", "content": text})
            # The connector shows its limit with its first step, and the proxy reads it in its next
            # probe.
            async with asyncio.timeout(30):
                while not decode.retains:
                    await asyncio.sleep(0.1)

    await release_all(workers, body)
    async with asyncio.timeout(30):
        while await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks") > pinned_before:
            await asyncio.sleep(0.2)


async def test_an_append_computes_only_what_is_new(pair: Pair, workers: Workers) -> None:
    """Decode's own count of computed prompt tokens grows by the new part, not by the history."""
    settings = proxy_settings(pair, decode_local_append=True, health_interval_seconds=0.2)
    async with (
        running(App(settings)) as (app, port),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        body: dict[str, Any] = {
            "model": pair.model,
            "messages": [{"role": "user", "content": "Counted. " + QUESTIONS[0]}],
            "temperature": 0,
            "max_tokens": 8,
            "conversation_id": "counted",
        }
        text, _, _ = await ask(client, body, stream=True)
        decode = app.pool.get(pair.decode.removeprefix("http://"))
        assert decode is not None
        async with asyncio.timeout(30):
            while not decode.retains:
                await asyncio.sleep(0.1)
        body["messages"] += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": QUESTIONS[1]},
        ]
        name, source = "vllm:prompt_tokens_by_source_total", "local_compute"
        before = await workers.metric(pair.decode, name, source=source)
        _, _, headers = await ask(client, body, stream=True)
        computed = await workers.metric(pair.decode, name, source=source) - before
    assert headers["X-KVLoop-Route"] == "decode-local-append"
    assert 0 < computed <= 64
    await release_all(workers, body)
