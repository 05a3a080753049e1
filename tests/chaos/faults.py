"""The faults by name: what is done to the stack while clients ask.

A fault is in force inside its block and mended after it. ``strands`` says why decode's blocks may
stay pinned until their lease is over and nobody can help it; where it is empty, such a pin is a
leak.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import redis.asyncio as redis_asyncio

from tests.chaos.link import Link
from tests.chaos.load import Ways
from tests.chaos.replica import Replica, Store
from tests.chaos.steps import Step, Steps
from tests.chaos.worker import ChaosWorker


class Rig(Protocol):
    """What faults are done to."""

    prefills: Sequence[ChaosWorker]
    decodes: Sequence[ChaosWorker]
    link: Link
    steps: Steps
    store: Store
    replicas: Sequence[Replica]
    dice: random.Random
    seconds: float
    """How long a fault lasts."""
    complaints: list[str]
    """For what a fault itself finds wrong: an exit code, say."""


Apply = Callable[[Rig], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Fault:
    name: str
    apply: Apply
    ways: Ways = field(default_factory=Ways)
    strands: str = ""
    strands_per_left: float | None = None
    """Such pins for each client that left, at most; more of them are leaks. None: no limit."""
    lasts: float = 0.0
    """Seconds for which it is in force at least: longer than the proxy waits, say."""
    replicas_die: bool = False


@asynccontextmanager
async def _nothing(rig: Rig) -> AsyncIterator[None]:
    yield


def _killed(role: str, *, all_of_them: bool = False, restarts: int = 0) -> Apply:
    """Kill; back at the end, or at once and several times."""

    @asynccontextmanager
    async def apply(rig: Rig) -> AsyncIterator[None]:
        workers = _of(rig, role) if all_of_them else [rig.dice.choice(_of(rig, role))]
        for _ in range(restarts):
            for each in workers:
                await each.kill()
                await each.come_back()
            await asyncio.sleep(rig.seconds / (restarts + 1) * rig.dice.random() * 2)
        if restarts:
            yield
            return
        for each in workers:
            await each.kill()
        try:
            yield
        finally:
            for each in workers:
                await each.come_back()

    return apply


def _misbehaves(role: str, *, all_of_them: bool = False, **mischief: Any) -> Apply:
    @asynccontextmanager
    async def apply(rig: Rig) -> AsyncIterator[None]:
        workers = _of(rig, role) if all_of_them else [rig.dice.choice(_of(rig, role))]
        with ExitStack() as stack:
            for each in workers:
                stack.enter_context(each.misbehaving(**mischief))
            yield

    return apply


def _of(rig: Rig, role: str) -> list[ChaosWorker]:
    return list(rig.prefills if role == "prefill" else rig.decodes)


def _link(**manners: Any) -> Apply:
    @asynccontextmanager
    async def apply(rig: Rig) -> AsyncIterator[None]:
        with rig.link.behaving(**manners):
            yield

    return apply


@asynccontextmanager
async def _little_room(rig: Rig) -> AsyncIterator[None]:
    """Half of the conversations fit into what decode may keep: others are given up all the time."""
    before = [each.block_count for each in rig.decodes]
    for each in rig.decodes:
        each.block_count = 400
    try:
        yield
    finally:
        for each, count in zip(rig.decodes, before, strict=True):
            each.block_count = count


def _stand_still() -> None:
    """All scripted workers live in this event loop."""
    time.sleep(_STILL)


@asynccontextmanager
async def _all_stand_still(rig: Rig) -> AsyncIterator[None]:
    """Workers and the way to Redis do nothing for longer than probes and Redis are waited for."""
    for _ in range(2):
        _stand_still()
        await asyncio.sleep(rig.seconds / 2)
    yield


@asynccontextmanager
async def _redis_unreachable(rig: Rig) -> AsyncIterator[None]:
    await rig.link.close()
    try:
        yield
    finally:
        await rig.link.open(rig.link.target)


@asynccontextmanager
async def _redis_killed(rig: Rig) -> AsyncIterator[None]:
    await rig.store.kill()
    await rig.link.cut()
    try:
        yield
    finally:
        await rig.store.start()


@asynccontextmanager
async def _redis_flushed(rig: Rig) -> AsyncIterator[None]:
    for _ in range(3):
        await _command(rig.store.port, "FLUSHALL")
        await asyncio.sleep(rig.seconds / 3)
    yield


@asynccontextmanager
async def _redis_fails_over(rig: Rig) -> AsyncIterator[None]:
    """The master dies, and a replica that lags behind takes its place.

    Claims of the last second are lost with the master: handles that have been read appear again.
    """
    second = Store(rig.store.log.parent, "valkey-second")
    await second.start()
    try:
        await _command(second.port, "REPLICAOF", "127.0.0.1", str(rig.store.port))
        while b"master_link_status:up" not in await _command(second.port, "INFO", "replication"):
            await asyncio.sleep(0.05)
        await asyncio.sleep(rig.seconds / 2)
        await _command(second.port, "REPLICAOF", "NO", "ONE")  # from here on it lags
        await asyncio.sleep(rig.seconds / 4)
        await rig.store.kill()
        rig.link.target = second.port
        await rig.link.cut()
        # Proxies leave Redis alone for a second after a failure.
        await asyncio.sleep(1 + rig.seconds)
        yield
    finally:
        await rig.store.kill()
        await rig.store.start()
        rig.link.target = rig.store.port
        await rig.link.cut()
        await second.kill()


async def _command(port: int, *words: str) -> bytes:
    async with redis_asyncio.Redis(port=port) as server:
        reply = await server.execute_command(*words)  # type: ignore[no-untyped-call]
    if isinstance(reply, dict):
        return "\n".join(f"{key}:{value}" for key, value in reply.items()).encode()
    return reply if isinstance(reply, bytes) else str(reply).encode()


@asynccontextmanager
async def _replicas_killed(rig: Rig) -> AsyncIterator[None]:
    """One after the other, at random instants, each started again at once."""
    for _ in range(2):
        for each in rig.replicas:
            await asyncio.sleep(rig.dice.random() * rig.seconds / 4)
            await each.kill_now()
            await each.start()
    yield


_STILL = 3.0
"""Seconds."""
_REACHED_WITHIN = 15.0
"""Seconds in which a step must be seen under load."""


@asynccontextmanager
async def _replicas_killed_at_steps(rig: Rig) -> AsyncIterator[None]:
    """At each step of a turn the replica whose turn it is dies."""
    for step in Step:
        struck: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()

        def strike(port: int, struck: asyncio.Future[Replica] = struck) -> bool:
            for each in rig.replicas:
                # The count of leaks asks Redis too, and is none of them.
                if each.serving and each.asks_from(port):
                    each.strike()
                    struck.set_result(each)
                    return True
            return False

        rig.steps.at_next(step, strike)
        if step is Step.RELEASE:
            await _have_one_deleted(rig.replicas[0])
        try:
            async with asyncio.timeout(_REACHED_WITHIN):
                dead = await struck
        except TimeoutError:
            rig.steps.forget(step)
            rig.complaints.append(f"wrong: nobody was killed when {step.value}")
            continue
        await dead.ended()
        await dead.start()
    yield


async def _have_one_deleted(replica: Replica) -> None:
    """An owner deletes what is kept of a conversation: decode's blocks are given back at once."""
    async with aiohttp.ClientSession() as session:
        with suppress(aiohttp.ClientError, TimeoutError):  # it may be killed while it answers
            while True:
                async with session.get(replica.url + "/v1/sessions?limit=1") as answer:
                    listed = (await answer.json())["data"]
                for each in listed:
                    async with session.delete(f"{replica.url}/v1/sessions/{each['id']}"):
                        return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def _replicas_drained(rig: Rig) -> AsyncIterator[None]:
    for each in rig.replicas:
        await asyncio.sleep(rig.dice.random() * rig.seconds / 4)
        if (code := await each.drain()) != 0:
            rig.complaints.append(f"wrong: {each.name} ended with {code} after SIGTERM")
        await each.start()
    yield


_UNCERTAIN = "nobody can tell whether Redis carried a command out"
_LOST = "the records are lost with Redis"
_UNTOLD = "decode finished, and its answer with the handle got lost"
_DIED = "the proxy that owned the handle is dead"
_LEFT = "decode finished in the moment in which the client left"
# Scripted answers take a tenth of a second, so that many clients leave as decode ends.
_AFTER_LEAVING: dict[str, Any] = {"strands": _LEFT, "strands_per_left": 0.2}

_PATIENCE = 5.0
"""Longer than the proxies wait for any answer of a worker (``rounds.SETTINGS``)."""

_LEAVING = Ways(leaving=0.6)


def _leave_at(step: Step, **more: Any) -> Ways:
    return Ways(leaving=0.6, leave_at=step, **more)


FAULTS = (
    Fault("no fault", _nothing),
    Fault("a prefill worker is killed", _killed("prefill")),
    Fault("all prefill workers are killed", _killed("prefill", all_of_them=True), strands=(
        "only prefill can tell decode to let go")),
    Fault("a prefill worker restarts, new engine id", _killed("prefill", restarts=3)),
    Fault("a prefill worker hangs and goes on", _misbehaves("prefill", hang=True), lasts=_PATIENCE),
    Fault("a prefill worker accepts and never answers", _misbehaves("prefill", never=True)),
    Fault("a prefill worker answers 500", _misbehaves("prefill", status=500)),
    Fault("a prefill worker answers 503", _misbehaves("prefill", status=503)),
    Fault("a prefill worker answers garbage", _misbehaves("prefill", garbage=True)),
    Fault("prefill resets half of its connections", _misbehaves(
        "prefill", reset=True, share=0.5, all_of_them=True), strands=(
        "a release may be what gets lost")),
    Fault("prefill loses half of its answers", _misbehaves(
        "prefill", lose_answer=True, share=0.5, all_of_them=True)),
    Fault("prefill breaks off half of its answers", _misbehaves(
        "prefill", cut_answer=True, share=0.5, all_of_them=True)),
    Fault("prefill is slow", _misbehaves("prefill", delay=0.2, all_of_them=True)),
    Fault("a decode worker is killed", _killed("decode")),
    Fault("all decode workers are killed", _killed("decode", all_of_them=True)),
    Fault("a decode worker restarts, new engine id", _killed("decode", restarts=3)),
    Fault("a decode worker hangs and goes on", _misbehaves("decode", hang=True), lasts=_PATIENCE),
    Fault("a decode worker accepts and never answers", _misbehaves("decode", never=True)),
    Fault("a decode worker answers 500", _misbehaves("decode", status=500)),
    Fault("a decode worker answers 503", _misbehaves("decode", status=503)),
    Fault("a decode worker answers garbage", _misbehaves("decode", garbage=True)),
    Fault("decode resets half of its connections", _misbehaves(
        "decode", reset=True, share=0.5, all_of_them=True)),
    Fault("decode loses half of its answers", _misbehaves(
        "decode", lose_answer=True, share=0.5, all_of_them=True), strands=_UNTOLD),
    Fault("half of the streams die in the middle", _misbehaves(
        "decode", die_mid_stream=0.5, all_of_them=True)),
    Fault("half of the streams fall silent in the middle", _misbehaves(
        "decode", fall_silent=0.5, all_of_them=True)),
    Fault("decode is slow", _misbehaves("decode", delay=0.2, all_of_them=True)),
    Fault("Redis cannot be reached", _redis_unreachable, strands=_UNCERTAIN),
    Fault("Redis is killed, restarts empty", _redis_killed, strands=_LOST),
    Fault("Redis is flushed", _redis_flushed, strands=_LOST),
    Fault("Redis is silent", _link(silent=True), strands=_UNCERTAIN),
    Fault("Redis is slow", _link(delay=0.15), strands=_UNCERTAIN),
    Fault("Redis obeys, its replies get lost", _link(swallow_replies=True), strands=_UNCERTAIN),
    Fault("Redis fails over to a lagging replica", _redis_fails_over, strands=_LOST),
    Fault("decode has room for few conversations", _little_room, lasts=_PATIENCE),
    Fault("workers and Redis stand still", _all_stand_still, strands=_UNCERTAIN),
    Fault("clients leave", _nothing, _LEAVING, **_AFTER_LEAVING),
    Fault("clients leave: tokenise", _nothing, _leave_at(Step.TOKENISE), **_AFTER_LEAVING),
    Fault("clients leave: prefill", _nothing, _leave_at(Step.PREFILL), **_AFTER_LEAVING),
    Fault("clients leave: between the legs", _nothing, _leave_at(Step.BETWEEN), **_AFTER_LEAVING),
    Fault("clients leave: before the first byte", _nothing, _leave_at(Step.DECODE),
        **_AFTER_LEAVING),
    Fault("clients leave: in the middle of a stream", _nothing,
        _leave_at(Step.MIDDLE, streamed=1.0), **_AFTER_LEAVING),
    Fault("clients leave: as decode ends", _nothing, _leave_at(Step.KEPT), **_AFTER_LEAVING),
    Fault("clients leave: a call that is not streamed", _nothing,
        Ways(leaving=0.6, streamed=0.0), **_AFTER_LEAVING),
    Fault("clients leave slow workers", _misbehaves("decode", delay=0.2, all_of_them=True),
        Ways(leaving=0.6, leave_within=0.8), **_AFTER_LEAVING),
    Fault("clients leave while a decode worker is killed", _killed("decode"), _LEAVING,
        **_AFTER_LEAVING),
    Fault("proxy replicas are killed", _replicas_killed, strands=_DIED, replicas_die=True),
    Fault("proxy replicas are killed at each step of a turn", _replicas_killed_at_steps,
        strands=_DIED, replicas_die=True),
    Fault("proxy replicas are stopped (SIGTERM)", _replicas_drained, replicas_die=True),
    Fault("more clients than places", _nothing,
        Ways(clients=60, talks=80, pause_after_error=0.3)),
)  # fmt: skip
