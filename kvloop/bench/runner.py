"""[io] Who asks when.

Unloaded workloads: each turn of a conversation is asked of every arm, in an order drawn anew, with
one request in the whole system at a time. So a machine that changes its speed changes it for all,
and a turn's time is its own. Loaded workloads: arms take turns pass by pass, forwards and then
backwards, each with all clients at once; only so has an arm a throughput of its own.

Each arm's conversation goes on with that arm's own answers, as a client's would. A prefix cache
that two arms share must not help one with the other's prompts: each arm's requests carry a
``cache_salt`` of its own, which changes no token.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import aiohttp

from kvloop.bench import observe
from kvloop.bench.client import Endpoint, Timed, ask, digest
from kvloop.bench.records import Sample, Span, Transfer, TurnRecord
from kvloop.bench.workloads import Message, Script, Step, Workload


@dataclass(frozen=True)
class Target:
    """One arm, with the workers behind it as far as they are known."""

    name: str
    endpoint: Endpoint
    prefills: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()


@dataclass
class _History:
    """One conversation on one arm."""

    messages: list[Message] = field(default_factory=list)
    ended: float | None = None
    broken: bool = False


@dataclass
class Found:
    """What a run collects."""

    turns: list[TurnRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    requests: dict[int, str] = field(default_factory=dict)
    """Index into ``turns`` -> the request's id at the proxy."""


Tell = Callable[[str], None]


class Runner:
    """Plays workloads on arms."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        targets: Sequence[Target],
        *,
        seed: int,
        tell: Tell,
        sample_seconds: float = 1.0,
    ) -> None:
        self._session = session
        self._targets = {target.name: target for target in targets}
        self._dice = random.Random(seed)
        self._tell = tell
        self._sample_seconds = sample_seconds
        self._nonce = uuid4().hex[:8]
        self._workload = ""
        self.found = Found()

    async def run(self, workload: Workload, *, repeats: int, deadline: float | None = None) -> None:
        """Play it on all arms. After ``deadline`` (``time.monotonic()``) no new turn starts."""
        self._workload = workload.name
        async with self._sampling():
            if workload.loaded:
                await self._loaded(workload, repeats, deadline)
            else:
                gate = asyncio.Semaphore(1)
                await self._play_all(
                    workload, list(self._targets), gate, repeat=0, deadline=deadline
                )

    async def _loaded(self, workload: Workload, repeats: int, deadline: float | None) -> None:
        order = list(self._targets)
        self._dice.shuffle(order)
        for repeat in range(repeats):
            for arm in order if repeat % 2 == 0 else order[::-1]:
                if deadline is not None and time.monotonic() > deadline:
                    return
                started = time.time()
                gate = asyncio.Semaphore(workload.clients)
                await self._play_all(workload, [arm], gate, repeat=repeat, deadline=None)
                span = Span(workload.name, arm, repeat, started, time.time())
                self.found.spans.append(span)
                self._tell(f"{workload.name}, {arm}: {span.ended - started:.1f} s for one pass")

    async def _play_all(
        self,
        workload: Workload,
        arms: list[str],
        gate: asyncio.Semaphore,
        *,
        repeat: int,
        deadline: float | None,
    ) -> None:
        places = asyncio.Semaphore(workload.clients)

        async def play(script: Script) -> None:
            async with places:
                histories = {arm: _History() for arm in arms}
                scene = _Scene(workload, repeat, gate, deadline)
                await self._play(scene, script, histories)

        await asyncio.gather(*(play(script) for script in workload.scripts))

    async def _play(self, scene: _Scene, script: Script, histories: Mapping[str, _History]) -> None:
        for number, step in enumerate(script.steps, start=1):
            if step.pause:
                await asyncio.sleep(step.pause)
            if scene.over():
                return
            await self._turn(scene, script.name, number, step, histories)
            if branches := script.branches.get(number):
                await asyncio.gather(
                    *(self._play(scene, branch, _copies(histories)) for branch in branches)
                )

    async def _turn(
        self,
        scene: _Scene,
        conversation: str,
        number: int,
        step: Step,
        histories: Mapping[str, _History],
    ) -> None:
        async with scene.gate:
            order = [arm for arm in histories if not histories[arm].broken]
            self._dice.shuffle(order)
            for arm in order:
                await self._request(scene, conversation, number, step, arm, histories[arm])

    async def _request(
        self,
        scene: _Scene,
        conversation: str,
        number: int,
        step: Step,
        arm: str,
        history: _History,
    ) -> None:
        target = self._targets[arm]
        messages = step.messages(history.messages)
        alone = not scene.workload.loaded
        before = await self._counters(target) if alone else (None, None)
        pause = None if history.ended is None else time.time() - history.ended
        answer = await ask(
            self._session,
            target.endpoint,
            messages,
            max_tokens=step.max_tokens,
            # A pass must not find what an earlier one left.
            conversation=f"{self._nonce}.{arm}.{scene.repeat}.{conversation}"
            if scene.workload.named
            else "",
            salt=f"{self._nonce}.{arm}.{scene.repeat}.{scene.workload.name}",
        )
        after = await self._counters(target) if alone else (None, None)
        pull, push = (_difference(*pair) for pair in zip(before, after, strict=True))
        record = replace(
            _record(answer, messages),
            workload=scene.workload.name,
            conversation=conversation,
            turn=number,
            arm=arm,
            repeat=scene.repeat,
            loaded=scene.workload.loaded,
            pause=pause,
            pull=pull,
            push=push,
        )
        self.found.requests[len(self.found.turns)] = answer.headers.get("x-request-id", "")
        self.found.turns.append(record)
        history.ended = answer.started + answer.total
        history.messages = [*messages, {"role": "assistant", "content": answer.text}]
        # A conversation with a hole in it is another conversation: it ends here on this arm.
        history.broken = bool(answer.error)
        shown = f"{record.ttft * 1000:.0f} ms" if record.ttft is not None else record.error
        self._tell(f"{conversation} turn {number}, {arm}: {shown}")

    async def _counters(
        self, target: Target
    ) -> tuple[observe.Counters | None, observe.Counters | None]:
        if not target.prefills or not target.decodes:
            return None, None
        return (
            await observe.counters(self._session, target.prefills),
            await observe.counters(self._session, target.decodes),
        )

    @asynccontextmanager
    async def _sampling(self) -> Any:
        decodes = sorted({url for target in self._targets.values() for url in target.decodes})

        async def look() -> None:
            while True:
                now = time.time()
                for url in decodes:
                    found = await observe.sample(self._session, url, now, self._workload)
                    if found is not None:
                        self.found.samples.append(found)
                await asyncio.sleep(self._sample_seconds)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@dataclass(frozen=True)
class _Scene:
    """What all conversations of one pass share."""

    workload: Workload
    repeat: int
    gate: asyncio.Semaphore
    deadline: float | None

    def over(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


def _copies(histories: Mapping[str, _History]) -> dict[str, _History]:
    return {
        arm: _History(list(each.messages), each.ended, each.broken)
        for arm, each in histories.items()
    }


def _difference(before: observe.Counters | None, after: observe.Counters | None) -> Transfer | None:
    if before is None or after is None:
        return None
    return after.since(before)


def _record(answer: Timed, messages: Sequence[Message]) -> TurnRecord:
    usage = answer.usage
    details = usage.get("prompt_tokens_details") or {}
    headers = answer.headers
    return TurnRecord(
        workload="",
        conversation="",
        turn=0,
        arm="",
        started=answer.started,
        total=answer.total,
        ttft=answer.ttft,
        itl=tuple(answer.itl),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
        route=headers.get("x-kvloop-route", ""),
        reason=headers.get("x-kvloop-reason", ""),
        pulled_tokens=_count(headers.get("x-kvloop-pulled-tokens")),
        prefill_cached_tokens=_count(headers.get("x-kvloop-prefill-cached-tokens")),
        reused_tokens=_count(headers.get("x-kvloop-reused-tokens")),
        history=digest(list(messages)),
        answer=digest(answer.text) if answer.text else "",
        error=answer.error,
    )


def _count(value: object) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isdigit() else None
