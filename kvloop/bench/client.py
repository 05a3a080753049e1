"""[io] One streamed chat request, timed as its client sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import aiohttp
import orjson

from kvloop.bench.workloads import Message


@dataclass(frozen=True)
class Endpoint:
    """Where an arm's requests go."""

    url: str
    model: str
    api_key: str | None = None
    cache_salt: bool = True
    """Send ``cache_salt``: vLLM's, unknown to some other servers."""


@dataclass
class Timed:
    """What came back, and when. Seconds since the request was sent."""

    started: float
    total: float = 0.0
    ttft: float | None = None
    itl: list[float] = field(default_factory=list)
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


async def ask(
    session: aiohttp.ClientSession,
    to: Endpoint,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    conversation: str,
    salt: str,
) -> Timed:
    """Send and read to the end. A failure is an answer too: see ``error``."""
    body: dict[str, Any] = {
        "model": to.model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if to.cache_salt:
        body["cache_salt"] = salt
    headers = {"Content-Type": "application/json"}
    if conversation:
        headers["X-Session-ID"] = conversation
    if to.api_key:
        headers["Authorization"] = f"Bearer {to.api_key}"
    data = orjson.dumps(body)
    answer = Timed(started=time.time())
    clock = time.perf_counter
    sent = last = clock()
    try:
        async with session.post(
            to.url + "/v1/chat/completions", data=data, headers=headers
        ) as response:
            answer.headers = {key.lower(): value for key, value in response.headers.items()}
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = clock()
                    event = orjson.loads(line[6:])
                    if "error" in event:
                        answer.error = f"in the stream: {event['error']}"[:200]
                    answer.usage = event.get("usage") or answer.usage
                    if words := _content(event):
                        answer.text += words
                        if answer.ttft is None:
                            answer.ttft = now - sent
                        else:
                            answer.itl.append(now - last)
                        last = now
    except (aiohttp.ClientError, orjson.JSONDecodeError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:200]
    except asyncio.TimeoutError:  # noqa: UP041 - aiohttp raises its own subclass
        answer.error = "no answer within the time limit"
    answer.total = clock() - sent
    if answer.ttft is None and not answer.error:
        answer.error = "no content"
    return answer


def _content(event: Mapping[str, Any]) -> str:
    text = ""
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        text += (
            delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        )
    return text


async def first_model(session: aiohttp.ClientSession, url: str, api_key: str | None) -> str:
    """Raises ``aiohttp.ClientError`` or ``LookupError``."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with session.get(url + "/v1/models", headers=headers) as response:
        response.raise_for_status()
        models = (await response.json())["data"]
    if not models:
        raise LookupError(f"{url} serves no model")
    return str(models[0]["id"])


async def words_per_token(session: aiohttp.ClientSession, to: Endpoint) -> float:
    """How many of our words make a token, by what the server counts. Raises ``LookupError``.

    Two lengths, so that the template's own tokens cancel out.
    """
    from random import Random

    from kvloop.bench.workloads import Writer

    counts = []
    for words in (40, 240):
        text = Writer(1.0, Random(words), 1.0).text(words)
        salt = f"calibrate-{words}-{time.time_ns()}"
        answer = await ask(
            session,
            to,
            [{"role": "user", "content": text}],
            max_tokens=8,
            conversation=salt,
            salt=salt,
        )
        count = answer.usage.get("prompt_tokens")
        if not isinstance(count, int):
            why = answer.error or "its stream carries no usage"
            raise LookupError(f"{to.url} does not count prompt tokens: {why}")
        counts.append(count)
    return 200 / max(1, counts[1] - counts[0])


def digest(value: object) -> str:
    """Short name of a value: equal values have equal names."""
    return blake2b(orjson.dumps(value), digest_size=8).hexdigest()
