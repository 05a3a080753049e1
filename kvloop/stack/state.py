"""What a stack is doing now, and its one home on disk: ``state.json`` in the state folder.

The supervisor writes it whole at every change and replaces the file in one step, so a reader never
sees half of it. A process is named by pid, start time and boot: a pid alone may have been given to
a stranger since.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kvloop.stack.plan import ReadyWhen, StackPlan


class Phase(StrEnum):
    """Where a part is, or the stack as a whole."""

    WAITING = "waiting"
    """For a part that it needs; the stack as a whole is never waiting."""
    STARTING = "starting"
    READY = "ready"
    NOT_ANSWERING = "not_answering"
    """It was ready and still runs, but does not answer now. Only ``kvloop status`` finds this."""
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ProcessId:
    """A process that stays the same process: never a later one with the same pid."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot, field 22 of ``/proc/<pid>/stat``."""
    boot_id: str
    """Ticks start again at every boot, so the boot belongs to the name."""


@dataclass(frozen=True)
class PartState:
    """One part. Times are Unix seconds."""

    name: str
    phase: Phase
    log: str
    """Path of its log file."""
    target: str = ""
    ready_when: ReadyWhen = ReadyWhen.FINISHED
    process: ProcessId | None = None
    since: float = 0.0
    """When this phase began."""
    start_seconds: float | None = None
    """How long it took to become ready; None before."""
    problem: str = ""
    """Why it failed, in words."""
    last_lines: tuple[str, ...] = ()
    """The end of its log, kept when it failed."""


@dataclass(frozen=True)
class StackState:
    """The whole stack."""

    phase: Phase
    supervisor: ProcessId
    url: str
    model: str
    parts: tuple[PartState, ...]
    problem: str = ""
    live_url: str = ""

    @property
    def failed_parts(self) -> tuple[PartState, ...]:
        return tuple(part for part in self.parts if part.phase is Phase.FAILED)


_PLAN = TypeAdapter(StackPlan)
_STATE = TypeAdapter(StackState)


class StateUnreadable(Exception):
    """A file in the state folder is not what this version writes."""


class StateFolder:
    """The folder that belongs to one stack (default ``.kvloop``)."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def create(self) -> None:
        """Make the folders. Raises ``OSError``."""
        # Only the owner may enter: the private Valkey's socket and prompts in worker logs are here.
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.logs.mkdir(exist_ok=True)

    def write_state(self, state: StackState) -> None:
        self._replace(self.state_file, _STATE.dump_json(state, indent=2))

    def read_state(self) -> StackState | None:
        """The last written state, or None. Raises ``StateUnreadable``."""
        try:
            return _STATE.validate_json(self.state_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StateUnreadable(
                f"{self.state_file} was not written by this version of kvloop; if no stack is "
                "running, delete it"
            ) from error

    def forget_state(self) -> None:
        self.state_file.unlink(missing_ok=True)

    def write_plan(self, plan: StackPlan) -> None:
        self._replace(self.plan_file, _PLAN.dump_json(plan, indent=2))

    def read_plan(self) -> StackPlan:
        """Raises ``OSError`` or ``StateUnreadable``."""
        try:
            return _PLAN.validate_json(self.plan_file.read_bytes())
        except ValidationError as error:
            raise StateUnreadable(f"{self.plan_file}: {error}") from error

    def _replace(self, path: Path, content: bytes) -> None:
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_bytes(content + b"\n")
        os.replace(draft, path)


def state_as_json(state: StackState) -> str:
    """The state as indented JSON text, for ``kvloop status --json``."""
    return _STATE.dump_json(state, indent=2).decode()
