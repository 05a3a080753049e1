"""The main job on real workers: history flows back from decode, and answers are right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest_asyncio

from proxy.app import App
from proxy.session.fingerprint import PromptTokens
from proxy.session.identity import identify
from proxy.settings import Settings
from tests.proxy.conftest import running
from tests.real.conftest import Pair, Workers

BLOCK = 32
STORY = (
    "A fisherman called Tomas lived with his grey dog Rex in a small house by the sea. Every "
    "morning he rowed out before the sun was up, and every evening he sold his fish at the harbour "
    "market. One day a storm took his boat, and the village came together to build him a new one. "
) * 4
QUESTIONS = (
    STORY + "What is the name of the dog?",
    "Where does the fisherman live?",
    "What happened to his boat?",
    "Who built him a new one?",
    "What does he do every evening?",
)


@pytest_asyncio.fixture
async def client(pair: Pair) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=pair.proxy + "/v1", api_key="none") as client:
        yield client


async def ask(
    client: openai.AsyncOpenAI, body: dict[str, Any], *, stream: bool
) -> tuple[str, list[int], Any]:
    """One turn through the SDK: text, token ids, response headers."""
    extra = {"return_token_ids": True}
    if "conversation_id" in body:
        extra["conversation_id"] = body["conversation_id"]
    fields = {k: v for k, v in body.items() if k != "conversation_id"}
    if not stream:
        raw = await client.chat.completions.with_raw_response.create(**fields, extra_body=extra)
        answer = raw.parse()
        ids = answer.choices[0].model_extra["token_ids"]
        return answer.choices[0].message.content, ids, raw.headers
    text, ids = "", []
    raw = await client.chat.completions.with_raw_response.create(
        **fields, stream=True, extra_body=extra
    )
    async for chunk in raw.parse():
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += (choice.model_extra or {}).get("token_ids") or []
    return text, ids, raw.headers


async def release_all(workers: Workers, body: dict[str, Any]) -> None:
    """Claim what is stored for a conversation and have decode free it, as the proxy does."""
    settings = proxy_settings(workers.pair)
    async with running(App(settings)) as (app, _):
        identity = identify(body, {})
        nothing = PromptTokens(identity.namespace, [])
        for holding in await app.table.find(identity, nothing):
            if holding.handle is None:
                continue  # a mark of what was there before
            assert await app.table.claim(identity, holding)
            await app.conductor.releases.send(body["model"], holding)


def proxy_settings(pair: Pair, **more: Any) -> Settings:
    return Settings(
        **{
            "prefill_urls": (pair.prefill,),
            "decode_urls": (pair.decode,),
            "redis_url": pair.redis_url,
            "decode_local_append": False,
            "plan_by_cost": False,
            **more,
        }
    )


async def test_five_turns_equal_a_cold_run_and_come_back_from_decode(
    pair: Pair, workers: Workers, client: openai.AsyncOpenAI
) -> None:
    """Each turn's tokens are a cold run's; prefill's own count shows the history was pulled."""
    pinned_before = await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks")
    messages: list[dict[str, str]] = []
    history = 0
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        body = {
            "model": pair.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
            "conversation_id": "five-turns",
        }
        expected = await workers.cold(body)
        before = await workers.pulled()
        text, ids, headers = await ask(client, body, stream=turn % 2 == 1)
        pulled = await workers.pulled() - before

        assert ids == expected, f"turn {turn}"
        if turn == 0:
            assert headers["X-KVLoop-Reason"] == "new_session"
            assert pulled == 0
        else:
            assert headers["X-KVLoop-Route"] == "prefill-with-pull"
            assert history - BLOCK <= pulled <= history
            assert int(headers["X-KVLoop-Reused-Tokens"]) == pulled
            assert int(headers["X-KVLoop-Pulled-Tokens"]) == pulled
        history = int(headers["X-KVLoop-Prompt-Tokens"]) + len(ids) - 1
        messages.append({"role": "assistant", "content": text})

    assert await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks") > pinned_before
    await release_all(workers, body)
    async with asyncio.timeout(30):
        while await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks") > pinned_before:
            await asyncio.sleep(0.2)


async def test_a_conversation_without_any_id_is_pulled_too(
    pair: Pair, workers: Workers, client: openai.AsyncOpenAI
) -> None:
    """An unchanged client, no id: the token prefix finds the session."""
    body: dict[str, Any] = {
        "model": pair.model,
        "messages": [{"role": "user", "content": "Without an id. " + QUESTIONS[0]}],
        "temperature": 0,
        "max_tokens": 16,
    }
    text, _, _ = await ask(client, body, stream=True)
    body["messages"] += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    expected = await workers.cold(body)
    _, ids, headers = await ask(client, body, stream=True)
    assert headers["X-KVLoop-Reason"] == "history_grew"
    assert int(headers["X-KVLoop-Pulled-Tokens"]) > 300
    assert ids == expected


async def edited_conversation(
    pair: Pair, workers: Workers, before: str, after: str, *, verify: bool
) -> tuple[list[int], list[int], str]:
    """Turn 1 with one password, turn 2 with it edited to another: got, expected, reason."""
    settings = proxy_settings(pair, verify_tokens=verify)
    async with (
        running(App(settings)) as (_, port),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        body: dict[str, Any] = {
            "model": pair.model,
            "messages": [{"role": "user", "content": f"The password is {before}. " * 40}],
            "temperature": 0,
            "max_tokens": 24,
            "conversation_id": before,
        }
        text, _, _ = await ask(client, body, stream=False)
        body["messages"] = [
            {"role": "user", "content": f"The password is {after}. " * 40},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "What is the password? Answer in one word."},
        ]
        expected = await workers.cold(body)
        _, ids, headers = await ask(client, body, stream=False)
    return ids, expected, headers["X-KVLoop-Reason"]


async def test_an_edited_history_is_right_because_tokens_are_compared(
    pair: Pair, workers: Workers
) -> None:
    """The edited turn equals a cold run; the same turn without verification does not."""
    ids, expected, reason = await edited_conversation(pair, workers, "apple", "tiger", verify=True)
    assert ids == expected
    assert reason in ("history_cut", "history_diverged")

    # Other words: decode's own prefix cache knows the first ones by now, and would hide the fault.
    ids, expected, _ = await edited_conversation(pair, workers, "lemon", "horse", verify=False)
    assert ids != expected


async def test_leaving_in_mid_stream_leaves_nothing_on_decode(
    pair: Pair, workers: Workers, client: openai.AsyncOpenAI
) -> None:
    """After a client left, decode runs nothing and pins nothing for it."""
    pinned = await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks")
    stream = await client.chat.completions.create(
        model=pair.model,
        messages=[{"role": "user", "content": "Tell me a very long story."}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(60):
        while await workers.metric(pair.decode, "vllm:num_requests_running"):
            await asyncio.sleep(0.2)
    assert await workers.metric(pair.decode, "vllm:kvloop_pinned_blocks") == pinned
