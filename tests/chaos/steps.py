"""The steps of a turn as workers and Redis see them, so that something can happen exactly at one.

Random moments hit the short steps rarely. Here a worker says which step a turn has reached, and who
waits for that step acts before anything goes on: the worker's answer is held back meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class Step(Enum):
    TOKENISE = "the prompt is tokenised"
    PREFILL = "prefill computes"
    BETWEEN = "prefill has answered, decode is not asked yet"
    DECODE = "decode is asked and has said nothing"
    MIDDLE = "the answer is half said"
    KEPT = "decode has ended and keeps the blocks"
    RELEASE = "prefill is asked to give blocks back"
    TABLE = "Redis is asked"
    TABLE_DONE = "Redis has done it, the reply is on its way"


Action = Callable[[int], bool]
"""Is told the port that asks; says whether it acted. If not, it waits for the next one."""


class Steps:
    """Who waits for which step."""

    def __init__(self) -> None:
        self._next: dict[Step, Action] = {}
        self._of: dict[tuple[Step, str], Action] = {}

    def at_next(self, step: Step, action: Action) -> None:
        """Act when any turn reaches the step."""
        self._next[step] = action

    def at(self, step: Step, turn: str, action: Action) -> None:
        """Act when this turn does. ``turn``: its X-Request-Id, before prefill its last message."""
        self._of[step, turn] = action

    def forget(self, step: Step, turn: str = "") -> None:
        """Nobody waits for it any more."""
        self._of.pop((step, turn), None)
        if not turn:
            self._next.pop(step, None)

    @property
    def awaited(self) -> bool:
        return bool(self._next or self._of)

    def reached(self, step: Step, turn: str, port: int) -> bool:
        """Has anybody acted?"""
        action = self._of.get((step, turn)) or self._next.get(step)
        if action is None or not action(port):
            return False
        if self._of.pop((step, turn), None) is None:
            self._next.pop(step, None)
        return True


def last_words(body: dict[str, Any]) -> str:
    """By which a turn is known before it has shown its id to a worker."""
    messages = body.get("messages") or [{}]
    return str(messages[-1].get("content") or "")
