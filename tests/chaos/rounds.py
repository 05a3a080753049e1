"""Rounds: load under one fault, then the count of what it left. The result is a row."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import Fault
from tests.chaos.leaks import LeakCounter, Leaks, TableWatch, settled, uncertain
from tests.chaos.link import Link
from tests.chaos.load import Load, Tally, Verdict
from tests.chaos.replica import Replica, Store
from tests.chaos.worker import ChaosCluster, ChaosWorker, right_answer
from tests.fakes.worker import MODEL

LEASE = 30.0
"""Seconds for which decode keeps a handle's blocks. Short, so that its end can be waited for."""
MARGIN = 3.0
"""Seconds by which records expire before the blocks they speak of."""
SETTLES = 8.0
"""Seconds in which pins without an owner must be gone: a release that finds no prefill worker waits
2 for one. With the round itself well below the lease, or its end would hide a leak."""
MORE = 20.0
"""Further seconds for all else: idle connections to workers are kept for up to 6, and a look at
everything takes seconds on a busy machine."""
STALLED = (
    "the machine stalled for longer than the proxies wait for Redis, and nobody can tell whether "
    "Redis carried a command out"
)
"""Only for as many pins as the proxies counted such commands."""
RECOVERS = 15.0
HANGS = 40.0
"""Seconds after which a client counts as left hanging. Every leg's timeout twice is less."""

SETTINGS: dict[str, Any] = {
    # A busy machine must not look like a Redis that failed: then handles stay until their lease.
    "table_timeout_seconds": 2,
    "health_interval_seconds": 0.2,
    # Two busy cores answer probes late without being dead.
    "health_timeout_seconds": 2,
    "health_failures": 2,
    "breaker_failures": 3,
    "breaker_pause_seconds": 1,
    "pull_failures": 3,
    "pull_pause_seconds": 2,
    "connect_timeout_seconds": 1,
    "tokenise_timeout_seconds": 2,
    "warm_prefill_timeout_seconds": 2,
    "cold_prefill_timeout_seconds": 3,
    "first_byte_timeout_seconds": 4,
    "chunk_timeout_seconds": 3,
    "abandoned_prefill_seconds": 3,
    "drain_seconds": 15,
    # Far above what eight clients take, and below what too many of them ask for.
    "max_in_flight": 16,
    "max_queued": 8,
}


@dataclass
class Row:
    """One line of the table."""

    fault: str
    tally: Tally
    leaked: Leaks
    until_lease: int = 0
    """Pins that only the end of their lease ended, where nothing else could."""
    why: str = ""
    complaints: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        verdicts = self.tally.verdicts
        bad = verdicts[Verdict.WRONG] + verdicts[Verdict.HUNG] + self.leaked.all
        return bad == 0 and verdicts[Verdict.RIGHT] > 0 and not self.complaints


class ScriptedRig:
    """Scripted workers, Valkey behind a link, proxy processes."""

    def __init__(
        self, folder: Path, dice: random.Random, *, lease: float = LEASE, margin: float = MARGIN
    ) -> None:
        self.lease = lease
        self.margin = margin
        self.dice = dice
        self.seconds = 2.0
        self.complaints: list[str] = []
        self.cluster = ChaosCluster()

        def worker(role: str) -> ChaosWorker:
            made = ChaosWorker(self.cluster, role, dice, lease=lease)
            made.knobs.prefill_delay = 0.02
            made.knobs.chunk_delay = 0.004
            return made

        self.prefills: Sequence[ChaosWorker] = [worker("prefill") for _ in range(2)]
        self.decodes: Sequence[ChaosWorker] = [worker("decode") for _ in range(2)]
        self.steps = self.cluster.steps
        self.link = Link(self.steps)
        self.store = Store(folder, "valkey")
        self.replicas: Sequence[Replica] = []
        self._folder = folder

    @property
    def workers(self) -> list[ChaosWorker]:
        return [*self.prefills, *self.decodes]

    async def tell_tasks(self) -> None:
        """Have the proxies log what each task waits for."""
        for each in self.replicas:
            each.signal(signal.SIGUSR1)
        await asyncio.sleep(1)

    @asynccontextmanager
    async def running(self, replicas: int) -> AsyncIterator[ScriptedRig]:
        """Start everything, with so many proxies."""
        await self.store.start()
        await self.link.open(self.store.port)
        for each in self.workers:
            await each.start()
        settings: dict[str, Any] = {
            "prefill_urls": ",".join(each.url for each in self.prefills),
            "decode_urls": ",".join(each.url for each in self.decodes),
            "redis_url": f"redis://127.0.0.1:{self.link.port}",
            "decode_kv_ttl_seconds": self.lease,
            "expiry_margin_seconds": self.margin,
            **SETTINGS,
        }
        try:
            async with self._proxies(replicas, settings) as self.replicas:
                yield self
        finally:
            for worker in self.workers:
                await worker.stop()
            await self.link.close()
            await self.store.kill()

    @asynccontextmanager
    async def _proxies(
        self, count: int, settings: dict[str, Any]
    ) -> AsyncIterator[Sequence[Replica]]:
        replicas = [
            Replica(f"proxy-{number}", self._folder / f"proxy-{number}.log", settings)
            for number in range(count)
        ]
        try:
            await asyncio.gather(*(each.start() for each in replicas))
            yield replicas
        finally:
            for each in replicas:
                await each.kill()


class Rounds:
    """Plays faults on one rig."""

    def __init__(self, rig: ScriptedRig, counter: LeakCounter) -> None:
        self._rig = rig
        self._counter = counter

    async def play(self, fault: Fault, seconds: float) -> Row:
        rig = self._rig
        rig.seconds = seconds / 3
        rig.complaints.clear()
        before = len(rig.cluster.faults)
        doubts = await uncertain(rig.replicas)
        load = self._load(fault)
        enough = asyncio.Event()
        asking = asyncio.create_task(load.run(enough))
        await asyncio.sleep(rig.seconds * (0.5 + rig.dice.random()))
        async with fault.apply(rig):
            await asyncio.sleep(max(rig.seconds, fault.lasts))
        await asyncio.sleep(rig.seconds)
        enough.set()
        tally = await asking
        recovered = await self._recovered(tally)
        if fault.replicas_die:
            await self._counter.note_idle()
        leaked, until_lease, why = await self._left_behind(fault, doubts, tally)
        for seen in rig.cluster.faults[before:]:
            tally.note(Verdict.WRONG, f"a worker saw: {seen}")
        complaints = [*rig.complaints]
        if not recovered:
            complaints.append("requests are not answered right after the fault")
        return Row(fault.name, tally, leaked, until_lease, why, complaints)

    def _load(self, fault: Fault) -> Load:
        return Load(
            self._rig.replicas,
            MODEL,
            self._rig.dice,
            right=right_answer,
            hang_after=HANGS,
            ways=fault.ways,
            steps=self._rig.steps,
        )

    async def _recovered(self, tally: Tally) -> bool:
        """Four right answers in a row, soon."""
        until = time.monotonic() + RECOVERS
        load = self._load(Fault("", _never))
        in_a_row = 0
        while in_a_row < 4 and time.monotonic() < until:
            verdict = await load.ask(
                {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": f"Are you there? {in_a_row} " * 8}],
                    "stream": bool(in_a_row % 2),
                }
            )
            in_a_row = in_a_row + 1 if verdict is Verdict.RIGHT else 0
        tally.verdicts += load.tally.verdicts
        tally.complaints += load.tally.complaints
        return in_a_row == 4

    async def _left_behind(self, fault: Fault, doubts: int, tally: Tally) -> tuple[Leaks, int, str]:
        """What is left, pins that only their lease ended, and why those."""
        found = await settled(self._counter.count, SETTLES)
        pins = found.pins + found.claimed
        why = fault.strands
        if fault.strands_per_left is not None:
            limit = max(2, fault.strands_per_left * tally.verdicts[Verdict.LEFT])
            why = why if pins <= limit else ""
        if pins and not why and pins <= await uncertain(self._rig.replicas) - doubts:
            why = STALLED
        if pins and why:
            return await settled(self._counter.count, self._rig.lease + 2), pins, why
        if found.all and not pins:
            found = await settled(self._counter.count, MORE)
        if found.all:
            self._rig.complaints += (f"left: {each}" for each in self._counter.told()[:6])
            if found.tasks:
                await self._rig.tell_tasks()
        return found, 0, ""


def _never(rig: object) -> Any:
    raise AssertionError


async def play(
    faults: Sequence[Fault],
    *,
    seed: int,
    seconds: float,
    replicas: int = 2,
    logs: Path | None = None,
) -> AsyncGenerator[Row, None]:
    """Start a rig, play the faults one after the other."""
    with tempfile.TemporaryDirectory(prefix="kvloop-chaos-") as name:
        dice = random.Random(seed)
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        rig = ScriptedRig(folder, dice)
        async with rig.running(replicas):
            table = TableWatch(f"redis://127.0.0.1:{rig.link.port}")
            table.start()
            counter = LeakCounter(
                rig.replicas,
                rig.workers,
                table,
                margin=rig.margin + 1,
                probe_seconds=SETTINGS["health_timeout_seconds"] + 0.5,
            )
            try:
                await counter.note_idle()
                rounds = Rounds(rig, counter)
                for fault in faults:
                    # Each fault has dice of its own, so that one can be played alone.
                    dice.seed(f"{seed} {fault.name}")
                    yield await rounds.play(fault, seconds)
            finally:
                await table.stop()
