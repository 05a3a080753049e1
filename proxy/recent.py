"""[pure] The turns of the last minutes, for the live page: one ring, sessions, and sums over time.

All of it is bounded, and there is no text of a prompt or an answer. Times are Unix seconds, given
by the caller. A session is known by its (hashed) label; where the client named none, by the chain
of holdings: a turn belongs to the session whose holding it claimed.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from proxy.session.identity import BY_PREFIX

SLICE_SECONDS = 10
SLICES = 90
"""A quarter of an hour."""
_SAMPLES = 64
"""Times to first token that a slice keeps of each kind, for its median."""

Story = dict[str, Any]
"""A turn as the log has it, with ``at``, ``session`` and ``number``."""


@dataclass(slots=True)
class Session:
    """What the ring knows of one conversation."""

    id: str
    turns: int = 0
    reused: int = 0
    last: Story = field(default_factory=dict)
    given_up: bool = False
    """What its last turn left has been evicted, or deleted by its owner."""

    def page(self) -> dict[str, Any]:
        """For the page. ``worker``: where its KV was left last; ``until``: Unix seconds."""
        last = self.last
        kept = bool(last["holding_left"]) and not self.given_up
        return {
            "id": self.id,
            "turns": self.turns,
            "reused": self.reused,
            "at": last["at"],
            "worker": last["decode"] if kept else "",
            "tokens": last["kept_tokens"] if kept else 0,
            "until": last["at"] + last["kept_seconds"] if kept else None,
            "kept": "given up" if self.given_up else last["kept"],
            "route": last["route"],
            "reason": last["reason"],
        }


@dataclass(slots=True)
class Slice:
    """Sums over ``SLICE_SECONDS``."""

    start: int
    turns: int = 0
    returning: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    warm: list[float] = field(default_factory=list)
    """Milliseconds to the first token of reused turns,"""
    warm_as_cold: list[float] = field(default_factory=list)
    """what the same turns would have taken cold (estimated),"""
    cold: list[float] = field(default_factory=list)
    """and of turns without reuse."""

    def page(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "turns": self.turns,
            "returning": self.returning,
            "hits": self.hits,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "warm_ms": _median(self.warm),
            "warm_as_cold_ms": _median(self.warm_as_cold),
            "cold_ms": _median(self.cold),
        }


class RecentTurns:
    """The last ``capacity`` turns."""

    def __init__(self, capacity: int) -> None:
        self._turns: deque[Story] = deque(maxlen=capacity)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._capacity = capacity
        self._session_of_holding: OrderedDict[str, str] = OrderedDict()
        """Of holdings that nobody claimed yet, as far as is known here."""
        self._slices: deque[Slice] = deque(maxlen=SLICES)
        self.number = 0
        """How many turns there have been."""

    def add(self, story: Story, now: float) -> None:
        """A turn that is over."""
        self.number += 1
        session = self._session_of(story)
        story = {**story, "at": round(now, 3), "session": session, "number": self.number}
        self._turns.append(story)
        self._note_session(session, story)
        self._note_slice(story, now)

    def given_up(self, holding: str) -> None:
        """A holding was evicted or deleted: its session's KV is no longer where it was."""
        session = self._sessions.get(self._session_of_holding.pop(holding, ""))
        if session is not None and session.last["holding_left"] == holding:
            session.given_up = True

    def newest(self, count: int) -> list[Story]:
        """Newest first."""
        return [turn for turn, _ in zip(reversed(self._turns), range(count), strict=False)]

    def since(self, number: int, limit: int) -> list[Story]:
        """Turns after that number, oldest first, at most the newest ``limit``."""
        found: list[Story] = []
        for turn in reversed(self._turns):
            if turn["number"] <= number or len(found) >= limit:
                break
            found.append(turn)
        return found[::-1]

    def sessions(self, count: int) -> list[Session]:
        """Those with the newest turns first."""
        return [each for each, _ in zip(reversed(self._sessions.values()), range(count),
                                        strict=False)]  # fmt: skip

    def history(self, session: str) -> list[Story]:
        """The turns of a session that are still in the ring, oldest first."""
        return [turn for turn in self._turns if turn["session"] == session]

    def slices(self, now: float) -> list[Slice]:
        """The last quarter of an hour, oldest first; times without turns are left out."""
        oldest = now - SLICES * SLICE_SECONDS
        return [each for each in self._slices if each.start >= oldest]

    def _session_of(self, story: Story) -> str:
        used, left = story["holding_used"], story["holding_left"]
        session: str = story["session"]
        before = self._session_of_holding.pop(used, "")
        if session == BY_PREFIX:
            session = before or _made_up(story, self.number)
        if left:
            self._session_of_holding[left] = session
            while len(self._session_of_holding) > self._capacity:
                self._session_of_holding.popitem(last=False)
        return session

    def _note_session(self, session: str, story: Story) -> None:
        entry = self._sessions.setdefault(session, Session(session))
        entry.turns += 1
        entry.reused += story["reused_tokens"] > 0
        entry.last = story
        entry.given_up = False
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._capacity:
            self._sessions.popitem(last=False)

    def _note_slice(self, story: Story, now: float) -> None:
        start = int(now // SLICE_SECONDS * SLICE_SECONDS)
        if not self._slices or self._slices[-1].start < start:
            self._slices.append(Slice(start))
        here = self._slices[-1]
        here.turns += 1
        ttft = story["ttft_ms"]
        if ttft is None:
            return
        here.prompt_tokens += story["prompt_tokens"]
        here.reused_tokens += story["reused_tokens"]
        if story["returning"]:
            here.returning += 1
            here.hits += story["reused_tokens"] * 2 >= story["prompt_tokens"] > 0
        if story["reused_tokens"] == 0:
            _sample(here.cold, ttft)
            return
        _sample(here.warm, ttft)
        if (cold := story["cold_prefill_ms"]) is not None:
            _sample(here.warm_as_cold, ttft - story["legs_ms"].get("prefill", 0) + cold)


def _made_up(story: Story, number: int) -> str:
    """A name for a conversation that has none. Not the request's id: a client may choose that."""
    told = f"{story['request']} {number}".encode()
    return "~" + blake2b(told, digest_size=6).hexdigest()[:11]


def _sample(values: list[float], value: float) -> None:
    """Keep it; of many, a random choice."""
    if len(values) < _SAMPLES:
        values.append(value)
    elif (place := random.randrange(_SAMPLES * 2)) < _SAMPLES:
        values[place] = value


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
