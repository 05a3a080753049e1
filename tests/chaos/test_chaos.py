"""Parts of the serving path fail under load: every request gets its answer, and nothing is left.

The fast test plays a few faults against proxies inside the test; the long one, marked ``soak``,
plays all of them against proxy processes that are killed too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.app import App
from proxy.settings import Settings
from proxy.turn import prefill_leg
from proxy.workers import http1
from tests.chaos import report
from tests.chaos import rounds as played_rounds
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.leaks import LeakCounter, Served, TableWatch
from tests.chaos.load import Verdict
from tests.chaos.rounds import Rounds, ScriptedRig, play
from tests.fakes.worker import Pin
from tests.proxy.conftest import running


@dataclass
class Inside:
    """A proxy inside the test."""

    url: str
    serving: bool = True
    going: bool = False
    kills: Sequence[float] = ()

    @property
    def metrics_url(self) -> str:
        return self.url + "/metrics"


class InsideRig(ScriptedRig):
    """Proxies inside the test instead of processes."""

    @asynccontextmanager
    async def _proxies(self, count: int, settings: dict[str, Any]) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            found = []
            for _ in range(count):
                _, port = await stack.enter_async_context(running(App(Settings(**settings))))
                found.append(Inside(f"http://127.0.0.1:{port}"))
            yield found

    async def tell_tasks(self) -> None:
        """Nothing: they are the test's own."""


class InsideCounter(LeakCounter):
    """The test's own tasks are in the same loop: only those of turns are told by name."""

    def extra_tasks(self, proxy: Served, numbers: dict[str, float]) -> int:
        return sum(task.get_name() == "client watcher" for task in asyncio.all_tasks())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be waited for in seconds is waited for in tenths."""
    monkeypatch.setattr(http1, "_KEEPALIVE_SECONDS", 0.1)
    monkeypatch.setattr(http1, "_REAP_SECONDS", 0.1)
    monkeypatch.setattr(prefill_leg, "ABORT_SETTLES", 0.05)
    # Far below the lease, which would hide a leak by ending it.
    monkeypatch.setattr(played_rounds, "SETTLES", 6.0)


@asynccontextmanager
async def rounds(folder: Path, seed: int) -> AsyncIterator[tuple[Rounds, InsideRig, LeakCounter]]:
    rig = InsideRig(folder, random.Random(seed), lease=25.0, margin=1.0)
    async with rig.running(2):
        table = TableWatch(f"redis://127.0.0.1:{rig.store.port}")
        table.start()
        counter = InsideCounter(rig.replicas, rig.workers, table, margin=1.5, probe_seconds=0.2)
        try:
            yield Rounds(rig, counter), rig, counter
        finally:
            await table.stop()


QUICK = (
    "a prefill worker answers 500",
    "a decode worker is killed",
    "clients leave",
)


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
async def test_a_few_faults_leave_no_wrong_answer_and_nothing_behind(tmp_path: Path) -> None:
    """The seeded short run: one fault after the other, each judged and counted."""
    by_name = {fault.name: fault for fault in FAULTS}
    async with rounds(tmp_path, seed=1) as (played, _, _):
        rows = [await played.play(by_name[name], 0.5) for name in QUICK]
    assert report.complaints(rows) == []
    assert rows[2].tally.verdicts[Verdict.LEFT] > 0


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
async def test_the_run_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other words than expected are wrong, and what is not given back is counted as leaked."""
    monkeypatch.setattr(played_rounds, "right_answer", lambda messages: "something else")
    monkeypatch.setattr(played_rounds, "RECOVERS", 0.1)
    monkeypatch.setattr(played_rounds, "SETTLES", 0.3)
    monkeypatch.setattr(played_rounds, "MORE", 0.3)

    @asynccontextmanager
    async def keeps(rig: Any) -> AsyncIterator[None]:
        cluster, decode = rig.cluster, rig.decodes[0]
        pin = Pin([1], [1], time.monotonic() + 100)
        cluster.pins[(decode.engine_id, "nobody's")] = pin
        decode.open_requests += 1
        yield

    async with rounds(tmp_path, seed=2) as (played, _, counter):
        _, writer = await asyncio.open_connection("127.0.0.1", played_port(counter))
        row = await played.play(Fault("a worker forgets", keeps), 0.3)
        writer.close()
    assert row.tally.verdicts[Verdict.WRONG] > 0
    assert row.tally.verdicts[Verdict.RIGHT] == 0
    assert (row.leaked.running, row.leaked.pins, row.leaked.connections) == (1, 1, 1)
    assert len(report.complaints([row])) > 3


def played_port(counter: LeakCounter) -> int:
    return int(counter.proxies[0].url.rsplit(":", 1)[1])


@pytest.mark.soak
async def test_every_fault_against_proxy_processes() -> None:
    """All faults, replicas killed at random instants included."""
    rows = []
    async with aclosing(play(FAULTS, seed=7, seconds=3)) as played:
        async for row in played:
            rows.append(row)
    assert report.complaints(rows) == []
