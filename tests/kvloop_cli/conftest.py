"""Real processes, stub parts: what a test of the local stack needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop.stack import processes
from kvloop.stack.local import free_ports
from kvloop.stack.plan import Part, ReadyWhen, StackPlan
from kvloop.stack.state import ProcessId, StackState, StateFolder

HERE = Path(__file__).parent
PATIENCE_SECONDS = 60
"""After this a test's process is killed, so that a hang fails and does not block the suite."""


class Command:
    """A running command, and what it has printed."""

    def __init__(self, *argv: str) -> None:
        self.output = ""
        self.popen = subprocess.Popen(
            [sys.executable, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._watchdog = threading.Timer(PATIENCE_SECONDS, self.popen.kill)
        self._watchdog.start()

    def until(self, words: str) -> str:
        """Read until a line holds the words; that line."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.output += line
            if words in line:
                return line
        raise AssertionError(f"{words!r} was never printed:\n{self.output}")

    def ended(self) -> int:
        """Read to the end; the exit code."""
        assert self.popen.stdout is not None
        self.output += self.popen.stdout.read()
        code = self.popen.wait()
        self.close()
        return code

    def close(self) -> None:
        self._watchdog.cancel()
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Lab:
    """One state folder, stub parts for it, and the commands that act on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = StateFolder(path / "state")
        self.commands: list[Command] = []

    def part(
        self, name: str, *options: str, after: tuple[str, ...] = (), port: int | None = None
    ) -> Part:
        port = port or free_ports(1)[0]
        return Part(
            name=name,
            argv=(sys.executable, str(HERE / "stub_part.py"), f"port={port}", *options),
            ready_when=ReadyWhen.HTTP_OK,
            target=f"http://127.0.0.1:{port}/health",
            after=after,
        )

    def plan(self, *parts: Part) -> None:
        self.folder.create()
        self.folder.write_plan(
            StackPlan(
                parts,
                url="http://127.0.0.1:8123",
                model="stub-model",
                live_url="http://127.0.0.1:8124/",
            )
        )

    def command(self, *argv: str) -> Command:
        command = Command(*argv)
        self.commands.append(command)
        return command

    def up(self, *options: str) -> Command:
        return self.command(str(HERE / "stub_stack.py"), str(self.folder.path), *options)

    def kvloop(self, name: str, *options: str) -> Command:
        return self.command("-m", "kvloop", name, "--state-dir", str(self.folder.path), *options)

    def state(self) -> StackState:
        state = self.folder.read_state()
        assert state is not None
        return state

    def running(self) -> list[ProcessId]:
        """The parts' processes, as the state file names them now."""
        return [part.process for part in self.state().parts if part.process is not None]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Cleans up with the rules of the product, so a failing test leaves nothing running."""
    lab = Lab(tmp_path)
    yield lab
    for command in lab.commands:
        command.close()
    state = lab.folder.read_state()
    for process in [state.supervisor, *lab.running()] if state is not None else []:
        for member in processes.family(process):
            os.kill(member.pid, signal.SIGKILL)


@pytest.fixture
def bystander() -> Iterator[ProcessId]:
    """A process that no stack has started, and that must outlive the test's commands."""
    popen = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    identity = processes.identify(popen.pid)
    assert identity is not None
    yield identity
    popen.kill()
    popen.wait()
