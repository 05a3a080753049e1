"""[pure] A user's own conversations, OpenAI format, as a workload.

One JSON object a line with ``messages``; optional: an id (``conversation_id``, ``session_id`` or
``id``), ``timestamp`` (seconds) in each message. Several lines with one id are requests of one
conversation: the longest is taken. What the model answers during the benchmark replaces the
recorded answers, whose length only limits it: KV exists for what was generated, not for what once
was. Results of tools become user messages, as their call ids would not match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvloop.bench.workloads import Message, Script, Step, Workload

_ID_FIELDS = ("conversation_id", "session_id", "id")
_CHARACTERS_PER_TOKEN = 4
_LONGEST_PAUSE = 600.0
"""Seconds. A pause over night is cut to this: it is beyond every lease all the same."""


class NotAConversation(ValueError):
    """A line is not what was promised; the message has its number and the field."""


def workload_of(lines: Iterable[str], *, name: str, clients: int) -> Workload:
    """Raises ``NotAConversation``."""
    longest: dict[str, tuple[int, list[Any]]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        conversation, messages = _read(line, number)
        if conversation not in longest or len(messages) > len(longest[conversation][1]):
            longest[conversation] = (number, messages)
    scripts = [
        _script(f"{name}-{index}", messages, number)
        for index, (number, messages) in enumerate(longest.values(), start=1)
    ]
    if not scripts:
        raise NotAConversation("the file holds no conversation")
    return Workload(name, "recorded conversations", tuple(scripts), clients=clients)


def _read(line: str, number: int) -> tuple[str, list[Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise NotAConversation(f"line {number} is not JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = {**value, **value["body"]}  # the format of OpenAI's batch files
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise NotAConversation(f"line {number} has no 'messages'")
    found = next((value[key] for key in _ID_FIELDS if value.get(key) is not None), None)
    return (f"line {number}" if found is None else str(found)), messages


def _script(name: str, messages: list[Any], line: int) -> Script:
    steps: list[Step] = []
    add: list[Message] = []
    answered: float | None = None
    asked: float | None = None
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise NotAConversation(f"line {line}: messages[{index}] has no 'role'")
        when = message.get("timestamp")
        when = float(when) if isinstance(when, int | float) else None
        text = _text(message)
        if message["role"] == "assistant":
            if add:
                steps.append(_step(add, text, asked, answered))
                add, asked = [], None
            answered = when
        else:
            role = message["role"] if message["role"] in ("system", "developer") else "user"
            add.append({"role": "system" if role == "developer" else role, "content": text})
            asked = asked if asked is not None else when
    if add:
        steps.append(_step(add, "", asked, answered))
    return Script(name, tuple(steps))


def _step(add: list[Message], answer: str, asked: float | None, answered: float | None) -> Step:
    pause = 0.0
    if asked is not None and answered is not None:
        pause = min(max(0.0, asked - answered), _LONGEST_PAUSE)
    return Step(tuple(add), max(16, len(answer) // _CHARACTERS_PER_TOKEN), pause)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text", "") for p in content if isinstance(p, Mapping)]
        content = "\n".join(part for part in parts if part)
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(calls) if calls else "")
