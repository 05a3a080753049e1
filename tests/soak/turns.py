"""The load of a soak: conversations held through the proxy, as clients hold them.

Mixed in: streamed and plain answers, answers given up in mid-stream, edited histories, answers that
are asked for again. Some conversations have a name, the others are found by their tokens.

One turn starts at a time: the next may start when the first words of a streamed answer are there,
or the whole of a plain one. So decodes run beside prefills, but no prefill waits behind another
and its time is the worker's own.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.soak.report import Soak
from tests.soak.stack import Stack

HANG_SECONDS = 60.0
CONVERSATIONS = 6
RUNNERS = 3
LONGEST_CONVERSATION = 10
LONG_CONVERSATION = 22
"""Messages. Every sixth conversation is a long one."""
QUESTION_WORDS = (6, 8, 12, 12, 20, 30, 60)
FIRST_QUESTION_WORDS = (20, 40, 60, 120, 240)
ANSWER_TOKENS = (2, 4, 6, 10)
GIVE_UP_AFTER_CHUNKS = 2
CHECK_EVERY_PLAIN_TURN = 20
"""Turns between two answers that are compared with a cold one: each costs a whole prefill."""
WORDS = (  # noqa: SIM905
    "river stone window garden letter music winter bread mountain clock paper silver child "
    "harbour forest engine candle orange market bridge summer horse little quiet bright people "
    "story island travel water"
).split()


@dataclass
class Talk:
    """One conversation. ``name`` is empty when the client names none."""

    name: str
    longest: int
    messages: list[dict[str, str]] = field(default_factory=list)


class Load:
    """Turns over one stack, counted in one ``Soak``."""

    def __init__(self, stack: Stack, soak: Soak, seed: int, http: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._soak = soak
        self._dice = random.Random(seed)
        self._http = http
        self._gate = asyncio.Lock()
        self._talks = [self._new_talk() for _ in range(CONVERSATIONS)]
        self._started = 0

    async def run(self, turns: int, limit_seconds: float) -> None:
        began = time.monotonic()

        async def runner() -> None:
            while self._started < turns and time.monotonic() - began < limit_seconds:
                self._started += 1
                number = self._started
                talk = self._talks.pop(self._dice.randrange(len(self._talks)))
                if not await self._guarded(talk, number) or len(talk.messages) >= talk.longest:
                    talk = self._new_talk()
                self._talks.append(talk)
                if number % 50 == 0:
                    print(f"  {number} turns, {time.monotonic() - began:.0f} s", flush=True)

        await asyncio.gather(*(runner() for _ in range(RUNNERS)))
        self._soak.seconds = time.monotonic() - began

    async def _guarded(self, talk: Talk, number: int) -> bool:
        try:
            await self._turn(talk)
        except TimeoutError:
            self._soak.hangs.append(f"turn {number} took over {HANG_SECONDS:.0f} s")
            return False
        except (aiohttp.ClientError, RuntimeError) as error:
            self._soak.errors.append(f"turn {number}: {error}")
            return False
        self._soak.turns += 1
        return True

    async def _turn(self, talk: Talk) -> None:
        dice, kinds = self._dice, self._soak.kinds
        if len(talk.messages) > 2 and dice.random() < 0.12:
            kinds["edited history"] += 1
            at = dice.randrange(0, len(talk.messages) - 1, 2)
            talk.messages[at]["content"] += " Also: " + " ".join(dice.choices(WORDS, k=5))
        if talk.messages and dice.random() < 0.05:
            kinds["asked again"] += 1
            talk.messages.pop()
        else:
            words = dice.choice(QUESTION_WORDS if talk.messages else FIRST_QUESTION_WORDS)
            question = "Please write about: " + " ".join(dice.choices(WORDS, k=words)) + "."
            talk.messages.append({"role": "user", "content": question})
        body = {
            "model": self._stack.model,
            "messages": talk.messages,
            "temperature": 0,
            "max_tokens": dice.choice(ANSWER_TOKENS),
        }
        named = {"conversation_id": talk.name} if talk.name else {}
        if dice.random() < 0.5:
            give_up = dice.random() < 0.2
            kinds["given up" if give_up else "streamed"] += 1
            text = await self._streamed({**body, **named, "stream": True}, give_up)
        else:
            kinds["plain"] += 1
            async with self._gate:
                text = await self._plain(self._stack.url, {**body, **named})
                if kinds["plain"] % CHECK_EVERY_PLAIN_TURN == 0:
                    await self._compare(text, body)
        if text is None:
            talk.messages.pop()
        else:
            talk.messages.append({"role": "assistant", "content": text})

    async def _plain(self, base_url: str, body: dict[str, Any]) -> str:
        async with self._http.post(f"{base_url}/v1/chat/completions", json=body) as response:
            await _require_ok(response)
            answer = await response.json()
        return answer["choices"][0]["message"]["content"] or ""

    async def _streamed(self, body: dict[str, Any], give_up: bool) -> str | None:
        """The answer; None when it was given up."""
        text, chunks = "", 0
        async with AsyncExitStack() as gate:
            await gate.enter_async_context(self._gate)
            async with self._http.post(
                f"{self._stack.url}/v1/chat/completions", json=body
            ) as response:
                await _require_ok(response)
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"error inside a stream: {event['error']}")
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                    chunks += 1
                    if text:
                        await gate.aclose()
                    if give_up and chunks >= GIVE_UP_AFTER_CHUNKS:
                        response.close()
                        return None
        return text

    async def _compare(self, text: str, body: dict[str, Any]) -> None:
        """Ask prefill, which keeps nothing in this profile, to compute the whole answer."""
        self._soak.checked += 1
        cold = await self._plain(self._stack.prefill_url, body)
        if cold != text:
            self._soak.differing.append(f"{text!r} instead of {cold!r}")

    def _new_talk(self) -> Talk:
        name = f"{self._dice.getrandbits(64):x}" if self._dice.random() < 0.5 else ""
        long = self._dice.random() < 1 / 6
        return Talk(name, LONG_CONVERSATION if long else LONGEST_CONVERSATION)


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")


async def soak(stack: Stack, *, turns: int, limit_seconds: float, seed: int) -> Soak:
    """Idle use, the turns, idle use with the pins that they left."""
    result = Soak()
    result.idle["before the first turn"] = await stack.idle_percent()
    timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await Load(stack, result, seed, http).run(turns, limit_seconds)
    result.idle["pins held"] = await stack.idle_percent()
    return result
