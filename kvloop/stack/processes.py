"""[io] Start, identify and stop process groups (Linux).

Ownership rule: a signal goes only to a process whose pid, start time and boot equal what was noted
when it was started, or to members of its session and its descendants. A pid that has been reused
names a stranger and is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvloop.stack.state import ProcessId

_POLL_SECONDS = 0.05
"""Between two looks at /proc while waiting for an end. Shorter only burns CPU; longer is felt."""

_WATCH_SECONDS = 0.2
"""Between two looks at a running child. Its end is noticed this late at most."""

_MARK = "KVLOOP_STARTED_BY"
"""Variable that parts inherit; its value, the supervisor's pid, is for people who look at them."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class UnsupportedPlatform(Exception):
    """No /proc: processes cannot be told apart safely."""


def require_linux() -> None:
    """Raises ``UnsupportedPlatform``."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedPlatform(
            "the local stack needs Linux (it identifies processes through /proc, and NIXL has no "
            "build for other systems); `kvloop proxy` and `kvloop chat` run here"
        )


@dataclass(frozen=True)
class _Entry:
    """One line of the process table."""

    id: ProcessId
    parent: int
    session: int
    zombie: bool


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _entry(pid: int) -> _Entry | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, field 2, is in parentheses and may itself hold spaces and parentheses.
    state, parent, _group, session, *rest = text[text.rindex(")") + 2 :].split()
    return _Entry(
        id=ProcessId(pid=pid, start_ticks=int(rest[15]), boot_id=_boot_id()),
        parent=int(parent),
        session=int(session),
        zombie=state in "ZX",
    )


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now, or None."""
    entry = _entry(pid)
    return entry.id if entry and not entry.zombie else None


def alive(process: ProcessId) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid) == process


def family(leader: ProcessId) -> list[ProcessId]:
    """The leader, the members of its session and its descendants, as far as they run.

    A worker's launcher gives vLLM a session of its own, and vLLM's engine is a child that outlives
    a killed API server: neither way alone finds them all. Empty if the leader's pid now belongs to
    another process. If the leader is gone its pid may since have named another session, so of that
    only processes count that carry our mark.
    """
    return [entry.id for entry in _family(leader)]


def children_of_this_process() -> set[ProcessId]:
    """Direct children that run, adopted ones included."""
    return {entry.id for entry in _table() if entry.parent == os.getpid() and not entry.zombie}


def adopt_orphans() -> None:
    """Make this process, not init, the parent of descendants whose own parent dies.

    What a killed launcher leaves behind can then still be found.
    """
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _table() -> list[_Entry]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [entry for pid in pids if (entry := _entry(pid)) is not None]


def _family(leader: ProcessId) -> list[_Entry]:
    entries = _table()
    current = next((entry for entry in entries if entry.id.pid == leader.pid), None)
    if leader.boot_id != _boot_id() or (current is not None and current.id != leader):
        return []
    children: dict[int, list[_Entry]] = {}
    for entry in entries:
        children.setdefault(entry.parent, []).append(entry)
    members = [entry for entry in entries if entry.session == leader.pid]
    if current is None:
        members = [entry for entry in members if _is_marked(entry.id.pid)]
    found = {entry.id: entry for entry in members}
    if current is not None:
        found[current.id] = current
    queue = [entry.id.pid for entry in found.values()]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child.id not in found:
                found[child.id] = child
                queue.append(child.id.pid)
    return [entry for entry in found.values() if not entry.zombie]


def _is_marked(pid: int) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # Gone, or another user's.
    return any(variable.startswith(f"{_MARK}=".encode()) for variable in variables)


class Process:
    """A process that was started here."""

    def __init__(self, popen: subprocess.Popen[bytes], identity: ProcessId) -> None:
        self._popen = popen
        self.id = identity

    async def ended(self) -> int:
        """Wait for the end; the exit code, or minus the signal's number."""
        while (code := self._popen.poll()) is None:  # noqa: ASYNC110 - only the kernel knows
            await asyncio.sleep(_WATCH_SECONDS)
        return code


def start(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a process in a session of its own, its output going to ``log`` (emptied first).

    If the supervisor is killed outright, the kernel sends the part SIGTERM. Raises ``OSError`` if
    the program cannot be started. Not a coroutine: between the fork and the note of who was
    started nothing may be cancelled.
    """
    libc = _libc()  # Loaded before the fork: after it only the call itself may happen.
    with open(log, "wb") as output:
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, _MARK: str(os.getpid())},
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    # It may have ended already, but its pid stays in the table until it is waited for.
    entry = _entry(popen.pid)
    assert entry is not None
    return Process(popen, entry.id)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


async def stop(leader: ProcessId, grace_seconds: float, hurry: asyncio.Event | None = None) -> None:
    """Stop a process and all that belongs to it: SIGTERM, then SIGKILL after the grace.

    Descendants in other sessions are left to the leader at first: it knows how to end them. They
    get their own SIGTERM when it is gone. ``hurry`` ends the grace early. Returns when nothing of
    it runs any more.
    """
    first = _family(leader)
    _signal([entry.id for entry in first if entry.session == leader.pid], signal.SIGTERM)
    members = {entry.id for entry in first}
    orphans_told = False
    clock = asyncio.get_running_loop().time
    deadline = clock() + grace_seconds
    while True:
        # Looked up afresh as well: a process may have forked after the first look.
        members = {process for process in members if alive(process)} | set(family(leader))
        if not members:
            return
        if clock() >= deadline or (hurry is not None and hurry.is_set()):
            _signal(members, signal.SIGKILL)
        elif not orphans_told and not alive(leader):
            _signal(members, signal.SIGTERM)
            orphans_told = True
        await asyncio.sleep(_POLL_SECONDS)


def _signal(processes: Iterable[ProcessId], number: signal.Signals) -> None:
    for process in processes:
        if alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
