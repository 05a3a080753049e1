"""[pure] A server-sent event stream, cut at any byte.

Bytes are forwarded as they came; only whole events leave the splitter, so that an event can be
looked at, or taken out, before a client sees half of it. Lines end at LF, CRLF or CR and nowhere
else: ``str.splitlines`` would also split at U+2028 inside JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

TURN_EVENT_PREFIX = b": kvloop "
"""Start of the comment event that our vLLM plugin adds before ``data: [DONE]``. A comment, so that
a client which talks to a worker directly ignores it."""

DONE = b"[DONE]"


class EventSplitter:
    """Bytes in, whole events out. ``feed`` returns a run of whole events, possibly empty."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if self.whole(data):
            return data
        cut = _last_event_end(data)
        self._rest = data[cut:]
        return data[:cut]

    @property
    def pending(self) -> bool:
        """Has a part of an event come whose rest is missing?"""
        return bool(self._rest)

    def whole(self, data: bytes) -> bool:
        """Is ``data`` a run of whole events as it stands? Then it need not be fed."""
        return not self._rest and data.endswith(b"\n\n") and b"\r" not in data[-4:]

    def flush(self) -> bytes:
        """What remains when the stream ends without a final blank line."""
        rest, self._rest = self._rest, b""
        return rest


def _last_event_end(data: bytes) -> int:
    """Index just after the last blank line, where a CR may yet be followed by its LF."""
    end = 0
    lf = data.rfind(b"\n\n")
    if lf >= 0:
        end = lf + 2
    crlf = data.rfind(b"\r\n\r\n")
    if crlf >= 0:
        end = max(end, crlf + 4)
    cr = data.rfind(b"\r\r")
    if cr >= 0:
        after = cr + 2
        if after < len(data):  # at the very end an LF may follow and belong to it
            end = max(end, after + 1 if data[after : after + 1] == b"\n" else after)
    return end


def split_events(block: bytes) -> Iterator[bytes]:
    """Whole events of a block that ``EventSplitter`` released, each with its blank line."""
    marks = (b"\n\n", b"\r\n\r\n", b"\r\r") if b"\r" in block else (b"\n\n",)
    start = 0
    while start < len(block):
        ends = [index + len(mark) for mark in marks if (index := block.find(mark, start)) >= 0]
        end = min(ends, default=len(block))
        yield block[start:end]
        start = end


def event_data(event: bytes) -> bytes | None:
    """The ``data`` of an event (lines joined by LF), None for comments and empty events."""
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(data) if data else None


def take_turn_event(block: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """Remove the plugin's event from a block of whole events; return the rest and its object.

    Generated text cannot forge it: text travels inside JSON strings, where a line break is escaped,
    so ``: kvloop`` never starts a line.
    """
    start = 0 if block.startswith(TURN_EVENT_PREFIX) else block.find(b"\n" + TURN_EVENT_PREFIX) + 1
    if start == 0 and not block.startswith(TURN_EVENT_PREFIX):
        return block, None
    end = block.find(b"\n\n", start)
    end = len(block) if end < 0 else end + 2
    try:
        event = orjson.loads(block[start + len(TURN_EVENT_PREFIX) : end])
    except orjson.JSONDecodeError:
        event = None
    rest = block[:start] + block[end:]
    return rest, event if isinstance(event, dict) else None


def carries_content(data: bytes) -> bool:
    """Does this event commit us to the answer: anything but a first chunk that only names the role?

    Before such an event a failed turn can still be repeated without the client noticing.
    """
    if data == DONE:
        return True
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return True
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or len(choices) != 1:
        return True
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return True
    return any(value for key, value in delta.items() if key != "role")


def stream_error(data: bytes) -> dict[str, Any] | None:
    """The error object of an in-stream error event (status was already 200), else None."""
    if not data.startswith(b'{"error"'):
        return None
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    error = chunk.get("error") if isinstance(chunk, dict) else None
    return error if isinstance(error, dict) else None
