"""The clients that people use, unchanged, against the proxy: base URL and key are all they need."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator

import anthropic
import httpx2 as httpx
import openai
import orjson
import pytest

from proxy.tenants import hashed
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving

pytestmark = pytest.mark.slow

LONG = "a story about a small dog that runs far away " * 20
KEY = "key-a"


@pytest.fixture
async def keyed(serve: Serve) -> Serving:
    return await serve(api_keys=f"a={hashed(KEY.encode())}")


@pytest.fixture
async def openai_client(keyed: Serving) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=keyed.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
async def anthropic_client(keyed: Serving) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=keyed.url, api_key=KEY, max_retries=0) as made:
        yield made


async def test_openai_chat(openai_client: openai.AsyncOpenAI, keyed: Serving) -> None:
    """Whole, and streamed with usage; the second turn pulls the first."""
    said = [{"role": "user", "content": LONG}]
    whole = await openai_client.chat.completions.create(model=MODEL, messages=said)  # type: ignore
    assert whole.choices[0].message.content == "Fine."
    said += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Go on."}]
    stream = await openai_client.chat.completions.create(
        model=MODEL,
        messages=said,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Fine."
    assert chunks[-1].usage is not None
    assert keyed.cluster.pulls == 1


async def test_openai_completions_responses_models(
    openai_client: openai.AsyncOpenAI, keyed: Serving
) -> None:
    """The SDK's own models take every answer and every event."""
    done = await openai_client.completions.create(model=MODEL, prompt=LONG)
    assert done.choices[0].text == "Fine."
    streamed = await openai_client.completions.create(model=MODEL, prompt=LONG, stream=True)
    assert "".join([c.choices[0].text async for c in streamed]) == "Fine."
    whole = await openai_client.responses.create(model=MODEL, input=LONG)
    assert whole.output_text == "Fine."
    async with openai_client.responses.stream(model=MODEL, input=LONG + "!") as events:
        kinds = [event.type async for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    again = await openai_client.responses.retrieve(whole.id)
    assert again.output_text == "Fine."
    assert [model.id async for model in openai_client.models.list()] == [MODEL]
    assert (await openai_client.models.retrieve(MODEL)).id == MODEL
    vectors = await openai_client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert vectors.data[0].embedding == [0.5, 0.25]


async def test_openai_errors_are_the_sdks_own(openai_client: openai.AsyncOpenAI) -> None:
    """Each status becomes the exception that the SDK has for it, with field and code."""
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as wrong:
        await openai_client.chat.completions.create(model=MODEL, messages=[])
    assert (wrong.value.param, wrong.value.type) == ("messages", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.chat.completions.create(model="gpt-17", messages=messages)  # type: ignore
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await openai_client.with_options(api_key="wrong").models.list()


async def test_anthropic_messages(
    anthropic_client: anthropic.AsyncAnthropic, keyed: Serving
) -> None:
    """Whole and streamed through the SDK's accumulator; the second turn pulls the first."""
    said: list[anthropic.types.MessageParam] = [{"role": "user", "content": LONG}]
    whole = await anthropic_client.messages.create(model=MODEL, max_tokens=50, messages=said)
    assert (whole.content[0].text, whole.stop_reason) == ("Fine.", "end_turn")  # type: ignore
    said += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Go on."}]
    async with anthropic_client.messages.stream(
        model=MODEL, max_tokens=50, messages=said
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Fine."
    assert final.stop_reason == "end_turn"
    assert keyed.cluster.pulls == 1
    counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=said)
    assert counted.input_tokens > len(LONG)


async def test_anthropic_messages_as_agents_send_them(
    anthropic_client: anthropic.AsyncAnthropic, keyed: Serving
) -> None:
    """Beta routes are the same paths with a query; system blocks with cache marks; a bearer token
    instead of a key. Two sub-agents that share tools and system prompt keep their histories."""
    agent = anthropic_client.with_options(
        api_key=None, auth_token=KEY, default_headers={"X-Api-Key": anthropic.Omit()}
    )
    system = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    common = {
        "model": MODEL,
        "max_tokens": 50,
        "system": system,
        "betas": ["context-1m-2025-08-07"],
        "metadata": {"user_id": "u_session_1"},
    }
    talks = [[{"role": "user", "content": f"{name}: {LONG}"}] for name in ("one", "two")]
    for turn in range(3):
        for said in talks:
            async with agent.beta.messages.stream(messages=said, **common) as stream:  # type: ignore
                assert (await stream.get_final_message()).content[0].text == "Fine."  # type: ignore
            said += [
                {"role": "assistant", "content": "Fine."},
                {"role": "user", "content": f"Go on, {turn}."},
            ]
    counted = await agent.beta.messages.count_tokens(
        model=MODEL,
        messages=talks[0],  # type: ignore
        system=system,  # type: ignore
    )
    assert counted.input_tokens > 2 * len(LONG)
    assert keyed.cluster.pulls == 4
    assert keyed.cluster.faults == []


async def drained(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def test_anthropic_errors_are_the_sdks_own(
    anthropic_client: anthropic.AsyncAnthropic, keyed: Serving
) -> None:
    said: list[anthropic.types.MessageParam] = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await anthropic_client.messages.create(model=MODEL, max_tokens=0, messages=said)
    with pytest.raises(anthropic.NotFoundError):
        await anthropic_client.messages.create(model="claude-17", max_tokens=5, messages=said)
    stranger = anthropic_client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        await stranger.messages.create(model=MODEL, max_tokens=5, messages=said)
    keyed.decode.knobs.die_after_chunks = 2
    broken = await anthropic_client.messages.create(
        model=MODEL, max_tokens=5, messages=said, stream=True
    )
    with pytest.raises(anthropic.APIStatusError, match="stopped answering"):
        await drained(broken)


async def test_synchronous_clients(keyed: Serving) -> None:
    """The SDKs' other halves, and plain httpx."""

    def speak() -> None:
        with openai.OpenAI(base_url=keyed.url + "/v1", api_key=KEY, max_retries=0) as client:
            said = [{"role": "user", "content": "Hello"}]
            stream = client.chat.completions.create(model=MODEL, messages=said, stream=True)  # type: ignore
            assert "".join(c.choices[0].delta.content or "" for c in stream) == "Fine."
        with (
            anthropic.Anthropic(base_url=keyed.url, api_key=KEY, max_retries=0) as other,
            other.messages.stream(
                model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "Hello"}]
            ) as events,
        ):
            assert events.get_final_text() == "Fine."
        with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as plain:
            body = {"model": MODEL, "prompt": "Hello", "stream": True}
            with plain.stream("POST", keyed.url + "/v1/completions", json=body) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"

    await asyncio.to_thread(speak)


async def test_curl(keyed: Serving) -> None:
    """The line that people paste; -N shows the stream as it comes."""
    said = {"role": "user", "content": "Hi"}
    curl = shutil.which("curl")
    assert curl is not None
    process = await asyncio.create_subprocess_exec(
        *(curl, "-sN", keyed.url + "/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}"),
        *("-H", "Content-Type: application/json", "-d"),
        orjson.dumps({"model": MODEL, "stream": True, "messages": [said]}),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.endswith(b"data: [DONE]\n\n")
    assert output.count(b'"content": "') >= 5
