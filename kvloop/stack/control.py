"""[io] What the commands do with a stack: run it in front, detach it, ask about it, stop it.

Each function prints to the console that it is given and returns the command's exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console

from kvloop.stack import processes
from kvloop.stack.plan import ReadyWhen, StackPlan
from kvloop.stack.probes import answers
from kvloop.stack.render import ready_text, say, show_failure, status_table, view_for
from kvloop.stack.state import (
    PartState,
    Phase,
    StackState,
    StateFolder,
    StateUnreadable,
    state_as_json,
)
from kvloop.stack.supervisor import (
    GRACE_SECONDS,
    START_SECONDS,
    AlreadyRunning,
    Supervisor,
    last_lines,
    locked,
)

SUPERVISOR_LOG = "supervisor"

_POLL_SECONDS = 0.2
"""Between two looks at another process's state file."""

_STOP_SECONDS = 2 * GRACE_SECONDS + 15
"""A supervisor stops its parts in two waves, each with its grace. After this it counts as stuck."""


@dataclass(frozen=True)
class Limits:
    """Seconds: longest start, and from SIGTERM to SIGKILL."""

    start: float = START_SECONDS
    grace: float = GRACE_SECONDS


def run_in_front(
    make_plan: Callable[[], StackPlan],
    folder: StateFolder,
    console: Console,
    limits: Limits = Limits(),
) -> int:
    """Run until Ctrl-C (0) or until a part fails (1). Raises ``CannotStart`` from ``make_plan``."""
    try:
        with locked(folder):
            _stop_leftovers(folder, console, limits.grace)
            plan = make_plan()
            say(console, f"Starting in {folder.path}; logs are in {folder.logs}.")
            return asyncio.run(_supervise_in_front(plan, folder, console, limits))
    except AlreadyRunning:
        return _already_running(folder, console)


async def _supervise_in_front(
    plan: StackPlan, folder: StateFolder, console: Console, limits: Limits
) -> int:
    told_ready = told_stopping = False
    view = view_for(console)

    def on_change(state: StackState) -> None:
        nonlocal told_ready, told_stopping, view
        view.update(state)
        if state.phase is Phase.READY and not told_ready:
            told_ready = True
            # The table ends here: what comes after it must not be drawn over.
            view.__exit__(None, None, None)
            say(console, ready_text(state, detached=False))
        elif state.phase is Phase.STOPPING and not told_stopping:
            told_stopping = True
            if told_ready:
                say(console, "")
                view = view_for(console)
                view.__enter__()
                view.update(state)
            if not state.problem:
                say(console, "Stopping (Ctrl-C again: at once).")

    supervisor = Supervisor(
        plan, folder, on_change, start_seconds=limits.start, grace_seconds=limits.grace
    )
    view.__enter__()
    try:
        state = await supervisor.run()
    finally:
        view.__exit__(None, None, None)
    if state.phase is Phase.FAILED:
        show_failure(console, state)
        say(console, f"\n{state.problem}; everything that was started has been stopped.", "red")
        return 1
    say(console, "Everything that was started has been stopped.")
    return 0


def start_detached(
    make_plan: Callable[[], StackPlan],
    folder: StateFolder,
    console: Console,
    limits: Limits = Limits(),
) -> int:
    """Leave a supervisor behind; return when all is ready (0) or something failed (1).

    Ctrl-C before that stops what was started. Raises ``CannotStart`` from ``make_plan``.
    """
    try:
        with locked(folder):
            _stop_leftovers(folder, console, limits.grace)
            folder.write_plan(make_plan())
    except AlreadyRunning:
        return _already_running(folder, console)
    log = folder.log(SUPERVISOR_LOG)
    say(console, f"Starting in {folder.path}; logs are in {folder.logs}.")
    with open(log, "wb") as output:
        supervisor = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvloop.stack.detached", str(folder.path)),
                *(str(limits.start), str(limits.grace)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        state = _follow(supervisor, folder, console)
    except KeyboardInterrupt:
        say(console, "\nStopping what was started.")
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
        return 130
    if state is not None and state.phase is Phase.READY:
        # It runs on without us; Popen would warn that we have not waited for it.
        supervisor.returncode = 0
        say(console, ready_text(state, detached=True))
        return 0
    supervisor.wait()
    if state is not None and state.phase is Phase.FAILED:
        show_failure(console, state)
        say(console, f"\n{state.problem}; everything that was started has been stopped.", "red")
    elif supervisor.returncode == 0:
        say(console, "The stack was stopped before it was ready.")
    else:
        say(console, f"The supervisor ended with {supervisor.returncode}:", "red")
        for line in last_lines(log):
            say(console, f"  {line}")
    return 1


def _follow(
    supervisor: subprocess.Popen[bytes], folder: StateFolder, console: Console
) -> StackState | None:
    """Show the supervisor's state until it is ready or over; the last state that it wrote."""
    state: StackState | None = None
    with view_for(console) as view:
        while True:
            ended = supervisor.poll() is not None
            current = folder.read_state()
            if current is not None and current.supervisor.pid == supervisor.pid:
                state = current
                view.update(state)
            if ended or (state is not None and state.phase is Phase.READY):
                return state
            time.sleep(_POLL_SECONDS)


def stop(folder: StateFolder, console: Console, limits: Limits = Limits()) -> int:
    """Stop the stack of this folder. 0 also when there is none."""
    state = folder.read_state()
    if state is None or not processes.alive(state.supervisor):
        if state is not None and any(_runs(part) for part in state.parts):
            _stop_leftovers(folder, console, limits.grace)
            return 0
        folder.forget_state()
        say(console, f"No stack is running in {folder.path}.")
        return 0
    os.kill(state.supervisor.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    with view_for(console) as view:
        while processes.alive(state.supervisor):
            current = folder.read_state()
            if current is not None and current.phase is Phase.STOPPING:
                view.update(current)
            if time.monotonic() > deadline:
                os.kill(state.supervisor.pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
    _stop_leftovers(folder, console, limits.grace)
    folder.forget_state()
    say(console, "Everything that was started has been stopped.")
    return 0


def status(folder: StateFolder, console: Console, *, as_json: bool, timeout_seconds: float) -> int:
    """Print what runs now. 0 only if every part is ready.

    ``timeout_seconds``: wait for a part's answer; a worker in a long prefill answers late.
    """
    state = folder.read_state()
    if state is not None:
        state = asyncio.run(_checked(state, timeout_seconds))
    if as_json:
        # Not through the console: it would wrap and colour.
        text = state_as_json(state) if state else json.dumps({"phase": "stopped", "parts": []})
        print(text)
    elif state is None:
        say(console, f"No stack is running in {folder.path}.")
    else:
        say(console, f"{state.phase.value.replace('_', ' ')}: {state.url} model {state.model}")
        if state.problem:
            say(console, state.problem, "red")
        console.print(status_table(state))
        say(console, f"logs: {folder.logs}", "dim")
    return 0 if state is not None and state.phase is Phase.READY else 1


async def _checked(state: StackState, timeout_seconds: float) -> StackState:
    """The written state, corrected by a look at the processes and a question to each part."""
    if not processes.alive(state.supervisor) and state.phase is not Phase.FAILED:
        state = replace(
            state,
            phase=Phase.FAILED,
            problem="the supervisor has been killed; `kvloop down` stops what it left behind",
        )
    parts = tuple(
        await asyncio.gather(*(_checked_part(part, timeout_seconds) for part in state.parts))
    )
    phase = state.phase
    if phase is Phase.READY and any(part.phase is not Phase.READY for part in parts):
        phase = Phase.NOT_ANSWERING
    return replace(state, phase=phase, parts=parts)


async def _checked_part(part: PartState, timeout_seconds: float) -> PartState:
    if part.phase is not Phase.READY or part.ready_when is ReadyWhen.FINISHED:
        return part
    if not _runs(part):
        return replace(part, phase=Phase.FAILED, problem="its process is gone")
    if await answers(part.ready_when, part.target, timeout_seconds):
        return part
    return replace(part, phase=Phase.NOT_ANSWERING)


def _runs(part: PartState) -> bool:
    return part.process is not None and bool(processes.family(part.process))


def _stop_leftovers(folder: StateFolder, console: Console, grace_seconds: float) -> None:
    """Stop parts whose supervisor was killed. Without one, a state file means just that."""
    try:
        state = folder.read_state()
    except StateUnreadable:
        # Written by another version, and nobody holds the lock: nothing in it can be trusted.
        folder.forget_state()
        return
    if state is None:
        return
    left = [part for part in state.parts if _runs(part)]
    if left:
        names = ", ".join(part.name for part in left)
        say(console, f"Stopping what an earlier run left behind: {names}.")

        async def stop_all() -> None:
            await asyncio.gather(
                *(processes.stop(part.process, grace_seconds) for part in left if part.process)
            )

        asyncio.run(stop_all())
    folder.forget_state()


def _already_running(folder: StateFolder, console: Console) -> int:
    state = folder.read_state()
    where = f" at {state.url} ({state.phase})" if state else ""
    say(
        console,
        f"A stack is already running in {folder.path}{where}. `kvloop status` shows it, "
        "`kvloop down` stops it.",
    )
    return 1
