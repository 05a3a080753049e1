"""Chaos on the real pair: two vLLM workers with NIXL between them, killed, stopped, restarted.

The workers' commands are those of ``kvloop up``; they are started here one by one, because the
stack of ``kvloop up`` ends as a whole when a part dies.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from kvloop.stack import local, processes
from kvloop.stack.plan import Part
from kvloop.stack.probes import answers
from kvloop.stack.state import StateFolder
from tests.chaos.leaks import Leaks, TableWatch, gauges, open_connections, settled, uncertain
from tests.chaos.load import Load, Message, Tally, Verdict, Ways
from tests.chaos.replica import Replica, Store
from tests.chaos.rounds import STALLED, Row

REPOSITORY = Path(__file__).parent.parent.parent
MODELS = Path(os.environ.get("KVLOOP_MODELS_DIR", REPOSITORY / ".kvloop" / "models"))
MODEL = "tiny"
STARTS_WITHIN = 300.0
LEASE = 60.0
MARGIN = 8.0
SETTLES = 20.0
"""Seconds. Beyond a release's pauses: a record expires some seconds before its blocks do, and in
between they have no owner."""
HANGS = 90.0
STOPPED = 14.0
"""Seconds for which a worker is stopped: longer than the proxy waits for a chunk or a prefill."""

SETTINGS: dict[str, Any] = {
    "decode_kv_ttl_seconds": LEASE,
    "expiry_margin_seconds": MARGIN,
    # Workers that compute take the whole machine: that must not look like a Redis that failed.
    "table_timeout_seconds": 2,
    "health_interval_seconds": 0.5,
    "health_timeout_seconds": 4,
    "health_failures": 2,
    "breaker_pause_seconds": 2,
    "pull_pause_seconds": 3,
    "tokenise_timeout_seconds": 8,
    "warm_prefill_timeout_seconds": 10,
    "cold_prefill_timeout_seconds": 10,
    "first_byte_timeout_seconds": 12,
    "chunk_timeout_seconds": 8,
    "abandoned_prefill_seconds": 10,
}
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
LONGER: dict[str, Any] = {"temperature": 0, "max_tokens": 48}
"""For clients that leave: in an answer of ten tokens hardly a moment is far from its end."""


class Worker:
    """One real worker, which can be killed and started again on its port."""

    def __init__(self, part: Part, sets: Sequence[str], logs: Path) -> None:
        words = [word for item in sets for word in ("--set", item)]
        self._argv = [*part.argv, *words]
        self._part = part
        self._logs = logs
        self._starts = 0
        self._process: processes.Process | None = None
        self.url = part.target.removesuffix("/health")
        self.port = int(self.url.rsplit(":", 1)[1])

    def spawn(self) -> None:
        self._starts += 1
        log = self._logs / f"{self._part.name}-{self._starts}.log"
        self._process = processes.start(self._argv, self._part.environment, log)

    async def ready(self) -> None:
        """Raises ``RuntimeError`` when it does not answer in time."""
        until = time.monotonic() + STARTS_WITHIN
        while not await answers(self._part.ready_when, self._part.target, 5):
            if time.monotonic() > until:
                raise RuntimeError(f"{self._part.name} did not start; see {self._logs}")
            await asyncio.sleep(0.5)

    def signal(self, number: signal.Signals) -> None:
        """To every process that belongs to it."""
        assert self._process is not None
        for each in processes.family(self._process.id):
            with suppress(ProcessLookupError):
                os.kill(each.pid, number)

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            members = processes.family(self._process.id)
            self.signal(signal.SIGKILL)
            await self._process.ended()
            while any(processes.alive(each) for each in members):
                await asyncio.sleep(0.05)
            self._process = None

    async def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        timeout = aiohttp.ClientTimeout(total=20)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(self.url + "/metrics") as answer,
        ):
            page = await answer.text()
        pattern = rf"^{name}(?:\{{.*\}})? (\S+)$"
        return sum(float(value) for value in re.findall(pattern, page, re.M))


@dataclass
class PairRig:
    """Both workers, two proxies, a Valkey server."""

    prefill: Worker
    decode: Worker
    store: Store
    replicas: Sequence[Replica]
    table: TableWatch
    dice: random.Random
    idle_tasks: dict[str, float] = field(default_factory=dict)
    open: set[Any] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    dead_engines: set[str] = field(default_factory=set)

    async def cold(self, messages: list[Message], fields: dict[str, Any] = FIELDS) -> str:
        """The answer computed from nothing: by prefill alone, which keeps nothing."""
        return await _plain(self.prefill.url, messages, fields)

    async def note_idle(self) -> None:
        for each in self.replicas:
            self.idle_tasks[each.url] = (await gauges(each.metrics_url))["kvloop_event_loop_tasks"]

    async def count(self) -> Leaks:
        """One look. On decode pins are counted, not named: those beyond the table's are ownerless.

        Which of them had an owner cannot be told, so all stand under ``pins``.
        """
        # vLLM reports with an engine step; an idle engine would show old numbers.
        await _plain(self.decode.url, [{"role": "user", "content": "Hi"}])
        running = 0.0
        for worker in (self.prefill, self.decode):
            for name in ("running", "waiting"):
                running += await worker.metric(f"vllm:num_requests_{name}")
        tasks = 0.0
        for each in self.replicas:
            numbers = await gauges(each.metrics_url)
            running += numbers["kvloop_turns_in_flight"] + numbers["kvloop_turns_queued"]
            extra = numbers["kvloop_event_loop_tasks"] - self.idle_tasks[each.url]
            tasks += numbers["kvloop_background_tasks"] + max(0, extra)
        ports = {int(each.url.rsplit(":", 1)[1]) for each in self.replicas}
        workers = {self.prefill.port, self.decode.port}
        self.open = open_connections(ports, workers)
        if self.open:
            # What is open for less may be a health probe's.
            await asyncio.sleep(SETTINGS["health_timeout_seconds"] + 0.5)
            self.open &= open_connections(ports, workers)
        # Records of a process that is gone own nothing of the one that runs now.
        owned = sum(engine not in self.dead_engines for engine, _ in await self.table.owned())
        pinned = int(await self.decode.metric("vllm:kvloop_pinned_requests"))
        return Leaks(int(running), max(0, pinned - owned), 0, len(self.open), int(tasks))


async def _plain(url: str, messages: list[Message], fields: dict[str, Any] = FIELDS) -> str:
    timeout = aiohttp.ClientTimeout(total=120)
    body = {"model": MODEL, "messages": messages, **fields}
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + "/v1/chat/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        page = await answer.json()
    return page["choices"][0]["message"]["content"] or ""


@asynccontextmanager
async def running(
    seed: int, logs: Path | None, *, decode_sets: Sequence[str] = (), replicas: int = 2
) -> AsyncIterator[PairRig]:
    """Start everything; at the end nothing of it runs any more."""
    with tempfile.TemporaryDirectory(prefix="kvloop-chaos-") as name:
        scratch = Path(name)
        folder = logs or scratch
        folder.mkdir(parents=True, exist_ok=True)
        store = Store(scratch, "valkey")
        url = f"redis://127.0.0.1:{store.port}"
        os.environ["KVLOOP_REDIS_URL"] = url  # the plan then brings no store of its own
        options = local.Options(model=MODEL, port=local.free_ports(1)[0], models=MODELS)
        parts = {p.name: p for p in local.plan_local_stack(options, StateFolder(scratch)).parts}
        made = processes.start(parts["model"].argv, {}, folder / "model.log")
        if await made.ended() != 0:
            raise RuntimeError((folder / "model.log").read_text()[-2000:])
        ttl = f"kv.decoder_kv_blocks_ttl={LEASE:.0f}"
        prefill = Worker(parts["prefill"], (), folder)
        decode = Worker(parts["decode"], (ttl, *decode_sets), folder)
        settings = {"prefill_urls": prefill.url, "decode_urls": decode.url, "redis_url": url}
        proxies = [
            Replica(f"proxy-{number}", folder / f"proxy-{number}.log", {**settings, **SETTINGS})
            for number in range(replicas)
        ]
        table = TableWatch(url)
        try:
            await store.start()
            for worker in (prefill, decode):
                worker.spawn()
            for worker in (prefill, decode):
                await worker.ready()
            for each in proxies:
                await each.start()
            table.start()
            rig = PairRig(prefill, decode, store, proxies, table, random.Random(seed))
            await rig.note_idle()
            yield rig
        finally:
            await table.stop()
            for each in proxies:
                await each.kill()
            for worker in (prefill, decode):
                await worker.kill()
            await store.kill()


# Faults.


async def _nothing(rig: PairRig) -> None:
    await asyncio.sleep(8)


async def _clients_leave(rig: PairRig) -> None:
    await asyncio.sleep(15)


def _stopped(role: str) -> Callable[[PairRig], Awaitable[None]]:
    async def apply(rig: PairRig) -> None:
        worker: Worker = getattr(rig, role)
        worker.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED)
        finally:
            worker.signal(signal.SIGCONT)

    return apply


def _restarted(role: str) -> Callable[[PairRig], Awaitable[None]]:
    async def apply(rig: PairRig) -> None:
        worker: Worker = getattr(rig, role)
        await worker.kill()
        if worker is rig.decode:
            rig.dead_engines |= {engine for engine, _ in rig.table.ever}
        worker.spawn()
        await worker.ready()

    return apply


async def _replica_killed(rig: PairRig) -> None:
    for each in rig.replicas:
        await asyncio.sleep(rig.dice.random() * 2)
        await each.kill_now()
        await each.start()


async def _replica_stopped(rig: PairRig) -> None:
    for each in rig.replicas:
        await asyncio.sleep(rig.dice.random() * 2)
        if (code := await each.drain()) != 0:
            rig.complaints.append(f"{each.name} ended with {code} after SIGTERM")
        await each.start()


async def _redis_stopped(rig: PairRig) -> None:
    rig.store.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(6)
    finally:
        rig.store.signal(signal.SIGCONT)


async def _redis_restarted(rig: PairRig) -> None:
    await asyncio.sleep(3)
    await rig.store.kill()
    await asyncio.sleep(3)
    await rig.store.start()


@dataclass(frozen=True)
class PairFault:
    name: str
    apply: Callable[[PairRig], Awaitable[None]]
    ways: Ways = field(default_factory=lambda: _WAYS)
    strands: str = ""
    fields: dict[str, Any] = field(default_factory=lambda: FIELDS)
    replicas_die: bool = False


_COMMON: dict[str, Any] = {
    "clients": 4,
    "talks": 8,
    "first_words": 30,
    "one_shot": 0.05,
    "pause_after_error": 0.5,
}
_WAYS = Ways(**_COMMON)
_LEAVING = Ways(**_COMMON, leaving=0.6, leave_within=3.0)
FAULTS = (
    PairFault("no fault", _nothing),
    PairFault("clients leave", _clients_leave, _LEAVING, fields=LONGER,
        strands="decode finished in the moment in which the client left"),
    PairFault("prefill is stopped (SIGSTOP) and goes on", _stopped("prefill"),
        strands="only prefill can tell decode to let go"),
    PairFault("decode is stopped (SIGSTOP) and goes on", _stopped("decode"),
        strands="decode finished what nobody waited for any more"),
    PairFault("prefill is killed and started again", _restarted("prefill"),
        strands="only prefill can tell decode to let go"),
    PairFault("decode is killed and started again", _restarted("decode")),
    PairFault("proxy replicas are stopped (SIGTERM)", _replica_stopped, replicas_die=True),
    PairFault("proxy replicas are killed", _replica_killed, replicas_die=True,
        strands="the proxy that owned the handle is dead"),
    PairFault("Redis is stopped (SIGSTOP) and goes on", _redis_stopped,
        strands="nobody can tell whether Redis carried a command out"),
    PairFault("Redis is killed, restarts empty", _redis_restarted,
        strands="the records are lost with Redis"),
)  # fmt: skip


async def play(
    faults: Sequence[PairFault], seed: int, logs: Path | None
) -> AsyncGenerator[Row, None]:
    """Start the pair, play the faults one after the other."""
    async with running(seed, logs) as rig:
        for fault in faults:
            # Each fault has dice of its own, so that one can be played alone.
            rig.dice.seed(f"{seed} {fault.name}")
            yield await _round(rig, fault)


async def _round(rig: PairRig, fault: PairFault) -> Row:
    rig.complaints.clear()
    doubts = await uncertain(rig.replicas)
    load = Load(
        rig.replicas,
        MODEL,
        rig.dice,
        right=None,
        hang_after=HANGS,
        ways=fault.ways,
        fields=fault.fields,
    )
    enough = asyncio.Event()
    asking = asyncio.create_task(load.run(enough))
    try:
        await asyncio.sleep(3)
        await fault.apply(rig)
        await asyncio.sleep(4)
    finally:
        enough.set()
        tally = await asking
    complaints = [*rig.complaints]
    if not await _recovered(load, tally, fault.fields):
        complaints.append("requests are not answered right after the fault")
    if fault.replicas_die:
        await rig.note_idle()
    found = await settled(rig.count, SETTLES)
    until_lease = 0
    why = fault.strands
    if found.pins and not why and found.pins <= await uncertain(rig.replicas) - doubts:
        why = STALLED
    if found.pins and why:
        until_lease = found.pins
        found = await settled(rig.count, LEASE)
    if found.connections:
        complaints.append(f"open: {sorted(rig.open)[:4]}")
    await tally.compare(partial(rig.cold, fields=fault.fields))
    return Row(fault.name, tally, found, until_lease, why, complaints)


async def _recovered(load: Load, tally: Tally, fields: dict[str, Any]) -> bool:
    """Four whole answers in a row, soon."""
    until = time.monotonic() + 60
    in_a_row = 0
    while in_a_row < 4 and time.monotonic() < until:
        question = {"role": "user", "content": f"Are you there? {in_a_row}"}
        body = {"model": MODEL, "messages": [question], "stream": bool(in_a_row % 2), **fields}
        in_a_row = in_a_row + 1 if await load.ask(body) is Verdict.RIGHT else 0
    return in_a_row == 4
