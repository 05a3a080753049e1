"""What a person sees: the stack as a live table, as plain lines, and text to paste."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvloop.stack.state import PartState, Phase, StackState
from kvloop.stack.supervisor import last_lines

_STYLE = {
    Phase.WAITING: "dim",
    Phase.STARTING: "yellow",
    Phase.READY: "green",
    Phase.NOT_ANSWERING: "red",
    Phase.FAILED: "red",
    Phase.STOPPING: "yellow",
    Phase.STOPPED: "dim",
}


class View(Protocol):
    """Shows a stack while it changes."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def update(self, state: StackState) -> None: ...


def view_for(console: Console) -> View:
    """Live on a terminal, lines elsewhere."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView:
    """One line for each part that changes: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, Phase] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, state: StackState) -> None:
        for part in state.parts:
            if part.phase is Phase.WAITING or self._shown.get(part.name) is part.phase:
                continue
            if part.phase is Phase.READY and state.phase is Phase.STOPPING:
                continue  # `down` begins to look here: that it was ready is no news.
            self._shown[part.name] = part.phase
            say(self._console, f"{part.name:<8} {_phase_text(part, time.time())}")


class LiveView:
    """A table that is drawn again several times a second, from entering until leaving."""

    def __init__(self, console: Console) -> None:
        self._state: StackState | None = None
        self._spinner = Spinner("dots", style="yellow")
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, state: StackState) -> None:
        self._state = state

    def _render(self) -> RenderableType:
        if self._state is None:
            return Text()
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for _mark_and_name in range(2):
            table.add_column(no_wrap=True)
        table.add_column()
        # Takes what is left of the line, so that a long log line pushes nothing else aside.
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for part in self._state.parts:
            busy = part.phase in (Phase.STARTING, Phase.STOPPING)
            mark = self._spinner if busy else Text(_MARK.get(part.phase, " "))
            table.add_row(
                mark,
                Text(part.name, style="bold"),
                Text(_phase_text(part, time.time()), style=_STYLE[part.phase]),
                Text(_detail(part), style="dim"),
            )
        return table


_LOG_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?(\w+ [\d-]+ [\d:]+ \[[^]]*\] )?")
"""What vLLM puts before its words: process, level, time, file. They fill the line."""

_MARK = {Phase.READY: "✓", Phase.FAILED: "✗", Phase.WAITING: "·", Phase.STOPPED: "■"}


def _detail(part: PartState) -> str:
    """What it is doing, for a part that starts; where it is, for one that is ready."""
    if part.phase is Phase.STARTING:
        lines = last_lines(Path(part.log), 1)
        return _LOG_PREFIX.sub("", lines[0]) if lines else ""
    return part.target if part.phase is Phase.READY else ""


def _phase_text(part: PartState, now: float) -> str:
    match part.phase:
        case Phase.READY if part.start_seconds is not None:
            return f"ready after {part.start_seconds:.1f} s"
        case Phase.STARTING if now - part.since >= 1:
            return f"starting ({now - part.since:.0f} s)"
        case Phase.FAILED:
            return f"failed: {part.problem}"
        case _:
            return part.phase.value.replace("_", " ")


def status_table(state: StackState) -> Table:
    """For ``kvloop status``."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("part", "state", "pid", "address"):
        table.add_column(heading, overflow="fold")
    for part in state.parts:
        table.add_row(
            part.name,
            Text(_phase_text(part, time.time()), style=_STYLE[part.phase]),
            str(part.process.pid) if part.process else "",
            part.target,
        )
    return table


def show_failure(console: Console, state: StackState) -> None:
    """Which part failed, why, and the end of its log."""
    for part in state.failed_parts:
        say(console, f"\n{part.name} {part.problem}", "bold red")
        if part.last_lines:
            say(console, f"The end of its log ({_short(part.log)}):", "red")
            for line in part.last_lines:
                say(console, f"  {line}")
        else:
            say(console, f"Its log is empty ({_short(part.log)}).", "red")


def ready_text(state: StackState, *, detached: bool) -> str:
    """Examples to paste, with the real address and model."""
    command = _own_command()
    chat = f"{command} chat" + ("" if state.url.endswith(":8000") else f" --url {state.url}")
    stop = f"{command} down" if detached else "Ctrl-C"
    watch = f"Watch it:   {state.live_url}\n" if state.live_url else ""
    return f"""
Ready: {state.url}/v1 serves the model {state.model}.

curl -N {state.url}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{state.model}", "stream": true, "max_tokens": 64,
       "messages": [{{"role": "user", "content": "Tell me about the sea."}}]}}'

from openai import OpenAI

client = OpenAI(base_url="{state.url}/v1", api_key="none")
messages = [{{"role": "user", "content": "Tell me about the sea."}}]
answer = client.chat.completions.create(model="{state.model}", messages=messages, max_tokens=64)
print(answer.choices[0].message.content)

{watch}Talk to it: {chat}
Stop it:    {stop}
"""


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no markup, no wrapping, so that it can be pasted."""
    console.print(Text(text, style=style), soft_wrap=True)


def _own_command() -> str:
    """How this user can call kvloop: its folder is on no PATH unless the environment is active."""
    if shutil.which("kvloop"):
        return "kvloop"
    script = Path(sys.prefix) / "bin" / "kvloop"
    return _short(str(script)) if script.exists() else "python -m kvloop"


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
