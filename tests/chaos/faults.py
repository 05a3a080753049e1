"""The faults by name: what is done to the stack while clients ask.

A fault is in force inside its block and mended after it. ``strands`` says why decode's blocks may
stay pinned until their lease is over and nobody can help it; where it is empty, such a pin is a
leak.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import redis.asyncio as redis_asyncio

from tests.chaos.link import Link
from tests.chaos.load import Ways
from tests.chaos.replica import Replica, Store
from tests.chaos.worker import ChaosWorker


class Rig(Protocol):
    """What faults are done to."""

    prefills: Sequence[ChaosWorker]
    decodes: Sequence[ChaosWorker]
    link: Link
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

_LEAVING = Ways(leaving=0.6)

FAULTS = (
    Fault("no fault", _nothing),
    Fault("a prefill worker is killed", _killed("prefill")),
    Fault("all prefill workers are killed", _killed("prefill", all_of_them=True), strands=(
        "only prefill can tell decode to let go")),
    Fault("a prefill worker restarts, new engine id", _killed("prefill", restarts=3)),
    Fault("a prefill worker hangs", _misbehaves("prefill", hang=True)),
    Fault("a prefill worker hangs, its probes answered", _misbehaves("prefill", hang_turns=True)),
    Fault("a prefill worker answers 500", _misbehaves("prefill", status=500)),
    Fault("a prefill worker answers 503", _misbehaves("prefill", status=503)),
    Fault("a prefill worker answers garbage", _misbehaves("prefill", garbage=True)),
    Fault("prefill resets half of its connections", _misbehaves(
        "prefill", reset=True, share=0.5, all_of_them=True), strands=(
        "a release may be what gets lost")),
    Fault("prefill loses half of its answers", _misbehaves(
        "prefill", lose_answer=True, share=0.5, all_of_them=True)),
    Fault("prefill is slow", _misbehaves("prefill", delay=0.2, all_of_them=True)),
    Fault("a decode worker is killed", _killed("decode")),
    Fault("all decode workers are killed", _killed("decode", all_of_them=True)),
    Fault("a decode worker restarts, new engine id", _killed("decode", restarts=3)),
    Fault("a decode worker hangs", _misbehaves("decode", hang=True)),
    Fault("a decode worker hangs, its probes answered", _misbehaves("decode", hang_turns=True)),
    Fault("a decode worker answers 500", _misbehaves("decode", status=500)),
    Fault("a decode worker answers 503", _misbehaves("decode", status=503)),
    Fault("a decode worker answers garbage", _misbehaves("decode", garbage=True)),
    Fault("decode resets half of its connections", _misbehaves(
        "decode", reset=True, share=0.5, all_of_them=True)),
    Fault("decode loses half of its answers", _misbehaves(
        "decode", lose_answer=True, share=0.5, all_of_them=True), strands=_UNTOLD),
    Fault("half of the streams die in the middle", _misbehaves(
        "decode", die_mid_stream=0.5, all_of_them=True)),
    Fault("decode is slow", _misbehaves("decode", delay=0.2, all_of_them=True)),
    Fault("Redis cannot be reached", _redis_unreachable, strands=_UNCERTAIN),
    Fault("Redis is killed, restarts empty", _redis_killed, strands=_LOST),
    Fault("Redis is flushed", _redis_flushed, strands=_LOST),
    Fault("Redis is silent", _link(silent=True), strands=_UNCERTAIN),
    Fault("Redis is slow", _link(delay=0.15), strands=_UNCERTAIN),
    Fault("Redis obeys, its replies get lost", _link(swallow_replies=True), strands=_UNCERTAIN),
    Fault("Redis fails over to a lagging replica", _redis_fails_over, strands=_LOST),
    Fault("clients leave", _nothing, _LEAVING, strands=_LEFT),
    Fault("clients leave slow workers", _misbehaves("decode", delay=0.2, all_of_them=True),
        Ways(leaving=0.6, leave_within=0.8), strands=_LEFT),
    Fault("clients leave while a decode worker is killed", _killed("decode"), _LEAVING,
        strands=_LEFT),
    Fault("proxy replicas are killed", _replicas_killed, strands=_DIED, replicas_die=True),
    Fault("proxy replicas are stopped (SIGTERM)", _replicas_drained, replicas_die=True),
)  # fmt: skip
