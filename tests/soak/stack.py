"""A stack as ``make up`` starts it, and what its workers use of the CPU."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from kvloop.stack import control, local, processes
from kvloop.stack.plan import StackPlan
from kvloop.stack.state import ProcessId, StateFolder

STOCK = (
    "env.KVLOOP_CPU_TUNING=",
    "env.VLLM_ENABLE_V1_MULTIPROCESSING=",
    "distributed-executor-backend=",
    "kv.num_threads=",
)
"""Overrides that take the profile's mends away, each the ``KEY=`` of a worker's ``--set``."""

IDLE_SECONDS = 8.0
"""Long enough that one tick of a process's CPU time is 0.1 %."""

SETTLE_SECONDS = 3.0
"""After the last turn, before idle use is measured: vLLM logs its statistics and sweeps up."""

_WORKERS = ("prefill", "decode")


@dataclass(frozen=True)
class Stack:
    """A running stack: addresses, log of the proxy, process of each worker."""

    url: str
    prefill_url: str
    model: str
    proxy_log: Path
    workers: dict[str, ProcessId]

    async def idle_percent(self) -> dict[str, float]:
        """Share of one core that each worker uses, all its processes together."""
        await asyncio.sleep(SETTLE_SECONDS)
        before = {name: _cpu_seconds(leader) for name, leader in self.workers.items()}
        started = time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        window = time.monotonic() - started
        return {
            name: 100 * (_cpu_seconds(leader) - before[name]) / window
            for name, leader in self.workers.items()
        }


@contextmanager
def running_stack(
    directory: Path, *, model: str, models: Path, overrides: Sequence[str] = ()
) -> Iterator[Stack]:
    """Start the stack of ``kvloop up``, its workers with these overrides; stop it at the end."""
    folder = StateFolder(directory)
    console = Console(file=io.StringIO(), width=160)

    def plan() -> StackPlan:
        options = local.Options(model=model, port=local.free_ports(1)[0], models=models)
        return _with_overrides(local.plan_local_stack(options, folder), overrides)

    try:
        if control.start_detached(plan, folder, console) != 0:
            sys.exit(console.file.getvalue())  # type: ignore[attr-defined]
        state = folder.read_state()
        assert state is not None
        parts = {part.name: part for part in state.parts}
        yield Stack(
            state.url,
            parts["prefill"].target.removesuffix("/health"),
            state.model,
            folder.log("proxy"),
            {name: parts[name].process for name in _WORKERS},  # type: ignore[misc]
        )
    finally:
        control.stop(folder, console)


def _with_overrides(plan: StackPlan, overrides: Sequence[str]) -> StackPlan:
    sets = tuple(word for item in overrides for word in ("--set", item))
    parts = tuple(
        replace(part, argv=(*part.argv, *sets)) if part.name in _WORKERS else part
        for part in plan.parts
    )
    return replace(plan, parts=parts)


def _cpu_seconds(leader: ProcessId) -> float:
    ticks = 0
    for process in processes.family(leader):
        with suppress(OSError):
            text = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
            # Counted from after the name, which may hold spaces: user and system time.
            fields = text[text.rindex(")") + 2 :].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
