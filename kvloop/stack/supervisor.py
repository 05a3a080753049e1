"""[io] Carry a plan out: start the parts in order, watch them, stop them all.

The stack lives and dies as one: when a part ends that should not, the others are stopped too.
Restarting single workers is left for later; a half stack that looks alive would be worse.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from kvloop.stack import processes
from kvloop.stack.plan import Part, ReadyWhen, StackPlan
from kvloop.stack.probes import answers
from kvloop.stack.state import PartState, Phase, StackState, StateFolder

GRACE_SECONDS = 15.0
"""From SIGTERM to SIGKILL. vLLM on a busy CPU needs several seconds to end its engine; a user at
the terminal will not wait much longer, and a second Ctrl-C ends the grace."""

START_SECONDS = 900.0
"""Longest start. A pair needs about a minute on two quiet cores; big models on slow disks more."""

_PROBE_PAUSE_SECONDS = 0.5
"""Between two questions while a part starts. More often would take CPU from what is starting."""

_FIRST_PAUSE_SECONDS = 0.05
"""After the first question; then twice as long each time. The store is up before the second."""

_PROBE_TIMEOUT_SECONDS = 5.0
"""One question. A worker that computes on every core answers late."""

_LAST_LINES = 25
"""Log lines shown for a failed part: a Python traceback with the worker's words before it."""

_TAIL_BYTES = 64 * 1024

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class AlreadyRunning(Exception):
    """Another supervisor holds this state folder."""


class _PartFailed(Exception):
    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part
        self.problem = problem


class _StopRequested(Exception):
    pass


@contextmanager
def locked(folder: StateFolder) -> Iterator[None]:
    """Hold the folder for one supervisor. Raises ``AlreadyRunning``.

    The kernel drops the lock when its holder dies, however it dies.
    """
    folder.create()
    with open(folder.lock, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"a stack is already running in {folder.path}") from None
        yield


class Supervisor:
    """Runs one plan once. The caller holds the folder's lock."""

    def __init__(
        self,
        plan: StackPlan,
        folder: StateFolder,
        on_change: Callable[[StackState], None] = lambda state: None,
        *,
        grace_seconds: float = GRACE_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        me = processes.identify(os.getpid())
        assert me is not None  # We are running.
        self._plan = plan
        self._folder = folder
        self._on_change = on_change
        self._grace_seconds = grace_seconds
        self._start_seconds = start_seconds
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._processes: dict[str, processes.Process] = {}
        self._ready = {part.name: asyncio.Event() for part in plan.parts}
        self._state = StackState(
            phase=Phase.STARTING,
            supervisor=me,
            url=plan.url,
            live_url=plan.live_url,
            model=plan.model,
            parts=tuple(
                PartState(
                    part.name,
                    Phase.WAITING,
                    str(folder.log(part.name)),
                    part.target,
                    part.ready_when,
                    since=_now(),
                )
                for part in plan.parts
            ),
        )

    def request_stop(self) -> None:
        """Begin to stop. A second request ends the grace that parts have for it."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> StackState:
        """Start everything, wait for a stop or a failure, stop everything.

        The result's phase is ``STOPPED`` (asked to) or ``FAILED``. Only after a failure is the
        state left on disk, for who wants to know why.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.request_stop)
        try:
            return await self._run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def _run(self) -> StackState:
        # A shell that became this process by exec may have left children: not ours to stop.
        self._not_ours = processes.children_of_this_process()
        processes.adopt_orphans()
        self._publish(self._state)
        outcome, problem = Phase.STOPPED, ""
        try:
            async with asyncio.TaskGroup() as group:
                for part in self._plan.parts:
                    group.create_task(self._look_after(part))
                group.create_task(self._announce_ready())
                group.create_task(self._wait_for_stop())
        except* _StopRequested:
            pass
        except* _PartFailed as failures:
            # Leaves only: every exception here was raised by one task of the group.
            first = failures.exceptions[0]
            assert isinstance(first, _PartFailed)
            outcome, problem = Phase.FAILED, f"{first.part} {first.problem}"
        finally:
            await self._stop_all(outcome, problem)
        if outcome is Phase.STOPPED:
            self._folder.forget_state()
        return self._state

    async def _look_after(self, part: Part) -> None:
        """One part from its start to its end. Raises ``_PartFailed`` unless it may end."""
        for name in part.after:
            await self._ready[name].wait()
        log = self._folder.log(part.name)
        began = time.monotonic()
        self._change(part.name, phase=Phase.STARTING)
        try:
            process = processes.start(part.argv, part.environment, log)
        except OSError as error:
            self._fail(part.name, f"cannot be started: {error}", log)
        self._processes[part.name] = process
        self._change(part.name, process=process.id)
        ended = asyncio.create_task(process.ended())
        try:
            if part.ready_when is ReadyWhen.FINISHED:
                code = await ended
                if code != 0:
                    self._fail(part.name, _how_it_ended(code), log)
                # Nothing of it is left to stop, and its pid may come to name another process.
                del self._processes[part.name]
            elif not await self._until_ready(part, ended):
                self._fail(part.name, f"{_how_it_ended(await ended)} before it was ready", log)
            self._change(
                part.name, phase=Phase.READY, start_seconds=round(time.monotonic() - began, 1)
            )
            self._ready[part.name].set()
            if part.ready_when is not ReadyWhen.FINISHED:
                self._fail(part.name, _how_it_ended(await ended), log)
        finally:
            ended.cancel()

    async def _until_ready(self, part: Part, ended: asyncio.Task[int]) -> bool:
        """Ask until the part answers. False if it has ended."""
        pause = _FIRST_PAUSE_SECONDS
        while not ended.done():
            if await answers(part.ready_when, part.target, _PROBE_TIMEOUT_SECONDS):
                return True
            await asyncio.wait([ended], timeout=pause)
            pause = min(2 * pause, _PROBE_PAUSE_SECONDS)
        return False

    async def _announce_ready(self) -> None:
        try:
            async with asyncio.timeout(self._start_seconds):
                for event in self._ready.values():
                    await event.wait()
        except TimeoutError:
            late = [part for part in self._state.parts if part.phase is not Phase.READY]
            starting = [part for part in late if part.phase is Phase.STARTING] or late
            self._fail(
                starting[0].name,
                f"was not ready within {self._start_seconds:.0f} s",
                self._folder.log(starting[0].name),
            )
        self._publish(replace(self._state, phase=Phase.READY))

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()
        raise _StopRequested

    async def _stop_all(self, outcome: Phase, problem: str) -> None:
        self._publish(replace(self._state, phase=Phase.STOPPING, problem=problem))
        remaining = list(self._plan.parts)
        while remaining:
            # Those that nothing remaining needs; so the proxy ends before its store does.
            needed = {name for part in remaining for name in part.after}
            wave = [part for part in remaining if part.name not in needed]
            await asyncio.gather(*(self._stop_part(part.name) for part in wave))
            remaining = [part for part in remaining if part not in wave]
        # What a killed launcher left behind has become our child.
        orphans = processes.children_of_this_process() - self._not_ours
        await asyncio.gather(
            *(processes.stop(orphan, self._grace_seconds, self._hurry) for orphan in orphans)
        )
        self._publish(replace(self._state, phase=outcome))

    async def _stop_part(self, name: str) -> None:
        if (process := self._processes.get(name)) is not None:
            # Also when the process itself has ended: its children may still run.
            await processes.stop(process.id, self._grace_seconds, self._hurry)
            await process.ended()
        if self._part(name).phase is not Phase.FAILED:
            self._change(name, phase=Phase.STOPPED)

    def _fail(self, name: str, problem: str, log: Path) -> NoReturn:
        self._change(name, phase=Phase.FAILED, problem=problem, last_lines=last_lines(log))
        raise _PartFailed(name, problem)

    def _part(self, name: str) -> PartState:
        return next(part for part in self._state.parts if part.name == name)

    def _change(self, name: str, **changes: object) -> None:
        if "phase" in changes:
            changes["since"] = _now()
        parts = tuple(
            replace(part, **changes) if part.name == name else part  # type: ignore[arg-type]
            for part in self._state.parts
        )
        self._publish(replace(self._state, parts=parts))

    def _publish(self, state: StackState) -> None:
        self._state = state
        # A full disk or a closed terminal must not keep the parts from being stopped.
        with suppress(OSError):
            self._folder.write_state(state)
        with suppress(OSError):
            self._on_change(state)


def last_lines(log: Path, count: int = _LAST_LINES) -> tuple[str, ...]:
    """The end of a log, without colours. Empty if there is none."""
    try:
        with open(log, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    return tuple(line for line in lines if line)[-count:]


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _now() -> float:
    return time.time()
