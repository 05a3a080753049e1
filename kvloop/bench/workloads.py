"""[pure] What is asked: conversations as scripts, made from a seed.

Lengths are tokens at scale 1, which suits a GPU pair; ``scale`` shortens them all. Text is made of
common words, so that a length in tokens can be met with any tokenizer after one calibration.

Tool results are sent as user messages: not every chat template has a role for tools, and to the KV
cache a tool result is appended text like any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Message = Mapping[str, str]

_WORDS = (  # noqa: SIM905
    "river stone window garden letter music winter bread mountain clock paper silver child "
    "harbour forest engine candle orange market bridge summer horse little quiet bright people "
    "story island travel water field copper road table north glass"
).split()


@dataclass(frozen=True)
class Compact:
    """The client replaces its history by a summary, keeping the first ``head`` messages."""

    head: int
    summary: str

    def apply(self, history: Sequence[Message]) -> list[Message]:
        return [*history[: self.head], {"role": "user", "content": self.summary}]


@dataclass(frozen=True)
class Edit:
    """The client changes one earlier message of its own, as when a file is read again."""

    index: int
    content: str

    def apply(self, history: Sequence[Message]) -> list[Message]:
        changed = list(history)
        if self.index < len(changed):
            changed[self.index] = {**changed[self.index], "content": self.content}
        return changed


@dataclass(frozen=True)
class StripReasoning:
    """The client sends only the last part of each answer back, as with hidden reasoning."""

    share: float
    """Of each answer's words that are left out."""

    def apply(self, history: Sequence[Message]) -> list[Message]:
        return [self._stripped(m) if m["role"] == "assistant" else m for m in history]

    def _stripped(self, message: Message) -> Message:
        words = message["content"].split()
        return {**message, "content": " ".join(words[int(len(words) * self.share) :])}


Rewrite = Compact | Edit | StripReasoning


@dataclass(frozen=True)
class Step:
    """One turn: what is added, how long the client waits before it, how long the answer may be."""

    add: tuple[Message, ...]
    max_tokens: int
    pause: float = 0.0
    rewrite: Rewrite | None = None

    def messages(self, history: Sequence[Message]) -> list[Message]:
        """The request's messages. ``history`` holds what was sent and answered before."""
        before = self.rewrite.apply(history) if self.rewrite else list(history)
        return [*before, *self.add]


@dataclass(frozen=True)
class Script:
    """One conversation. ``branches``: after that many steps, these start from a copy of it."""

    name: str
    steps: tuple[Step, ...]
    branches: Mapping[int, tuple[Script, ...]] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        inner = (script.turns for branch in self.branches.values() for script in branch)
        return len(self.steps) + sum(inner)


@dataclass(frozen=True)
class Workload:
    """Conversations of one kind."""

    name: str
    what: str
    scripts: tuple[Script, ...]
    loaded: bool = False
    """True: arms take turns pass by pass, with several clients at once. False: turn by turn, with
    one request in the whole system at a time."""
    clients: int = 4
    """Conversations under way at once."""
    named: bool = True
    """Requests carry a session id. Without one the token prefix alone tells conversations apart."""
    favourable: bool | None = None
    """Expected for reuse; None where that is the question."""


@dataclass(frozen=True)
class Sizes:
    """What scales a workload. ``count``: conversations of each kind."""

    scale: float = 1.0
    count: int = 4
    lease_seconds: float = 480.0
    """How long decode keeps a conversation's KV: the workload ``late`` waits for longer."""
    lengths: tuple[int, ...] = (2000, 4000, 8000, 12000, 16000, 24000)
    pause_scale: float = 1.0
    clients: int = 4


class Writer:
    """Text of a wanted length in tokens, different for each conversation."""

    def __init__(self, words_per_token: float, dice: random.Random, scale: float) -> None:
        self._rate = words_per_token
        self._dice = dice
        self._scale = scale

    def text(self, tokens: float, opening: str = "") -> str:
        """Some ``tokens`` at scale 1. ``opening`` comes first and is not counted."""
        words = max(1, round(tokens * self._scale * self._rate))
        return f"{opening} {' '.join(self._dice.choices(_WORDS, k=words))}.".strip()

    def user(self, tokens: float, opening: str = "") -> Message:
        return {"role": "user", "content": self.text(tokens, opening)}

    def length(self, tokens: int) -> int:
        """An answer's limit; not shorter than a few tokens, or there is no ITL."""
        return max(8, round(tokens * self._scale))

    def between(self, low: float, high: float) -> float:
        return self._dice.uniform(low, high)


Maker = Callable[[Writer, int, Sizes], Script]


def _agent(write: Writer, number: int, sizes: Sizes) -> Script:
    first = (
        {"role": "system", "content": write.text(600, "You are an agent with tools.")},
        write.user(3400, f"Task {number}. Find out what this says and act on it:"),
    )
    steps = [Step(first, write.length(96))]
    for call in range(7):
        result = write.user(write.between(60, 400), f"Result of tool call {call}:")
        pause = write.between(0.2, 2.0) * sizes.pause_scale
        steps.append(Step((result,), write.length(96), pause))
    return Script(f"agent-{number}", tuple(steps))


def _chat(write: Writer, number: int, sizes: Sizes) -> Script:
    steps = [Step((write.user(120, f"Question {number}."),), write.length(256))]
    for _ in range(5):
        pause = write.between(8, 40) * sizes.pause_scale
        steps.append(Step((write.user(write.between(20, 120), "Next:"),), write.length(256), pause))
    return Script(f"chat-{number}", tuple(steps))


def _coding(write: Writer, number: int, sizes: Sizes) -> Script:
    file = write.user(2000, f"File {number}, first version:")
    task = write.user(800, "Change it as follows:")
    steps = [Step((file, task), write.length(128))]

    def tool(rewrite: Rewrite | None = None) -> Step:
        pause = write.between(0.5, 4.0) * sizes.pause_scale
        return Step((write.user(300, "Output of the tests:"),), write.length(128), pause, rewrite)

    steps += [tool(), tool()]
    steps.append(tool(Edit(1, write.text(820, "Change it differently:"))))
    steps += [tool(), tool(Compact(1, write.text(500, "Summary of the work so far:"))), tool()]
    return Script(f"coding-{number}", tuple(steps))


def _reasoning(write: Writer, number: int, sizes: Sizes) -> Script:
    strip = StripReasoning(0.7)
    steps = [Step((write.user(1500, f"Problem {number}:"),), write.length(512))]
    for _ in range(4):
        pause = write.between(1, 6) * sizes.pause_scale
        steps.append(Step((write.user(150, "And now:"),), write.length(512), pause, strip))
    return Script(f"reasoning-{number}", tuple(steps))


def _branches(write: Writer, number: int, sizes: Sizes) -> Script:
    def child(name: str) -> Script:
        opening = write.user(200, f"You are sub-agent {name}. Your part:")
        tool = write.user(200, "Result:")
        pause = write.between(0.2, 1.0) * sizes.pause_scale
        return Script(
            name, (Step((opening,), write.length(96)), Step((tool,), write.length(96), pause))
        )

    name = f"branches-{number}"
    children = tuple(child(f"{name}.{letter}") for letter in "abc")
    start = Step((write.user(3000, f"Shared context {number}:"),), write.length(64))
    join = Step((write.user(400, "The sub-agents found:"),), write.length(96))
    return Script(name, (start, join), {1: children})


def _one_shot(write: Writer, number: int, sizes: Sizes) -> Script:
    step = Step((write.user(write.between(500, 3000), f"Document {number}:"),), write.length(64))
    return Script(f"one-shot-{number}", (step,))


def _late(write: Writer, number: int, sizes: Sizes) -> Script:
    first = Step((write.user(2500, f"Long read {number}:"),), write.length(64))
    late = sizes.lease_seconds * 1.1 + 2
    second = Step((write.user(60, "I am back:"),), write.length(64), late)
    return Script(f"late-{number}", (first, second))


def _burst(write: Writer, number: int, sizes: Sizes) -> Script:
    steps = (
        Step((write.user(write.between(800, 2400), f"Burst {number}:"),), write.length(128)),
        Step((write.user(100, "Go on:"),), write.length(128), 0.2 * sizes.pause_scale),
        Step((write.user(100, "Go on:"),), write.length(128), 0.2 * sizes.pause_scale),
    )
    return Script(f"burst-{number}", steps)


@dataclass(frozen=True)
class _Kind:
    what: str
    make: Maker
    favourable: bool | None
    loaded: bool = False
    named: bool = True


_KINDS: Mapping[str, _Kind] = {
    "agent": _Kind("agent loop: long history, short tool results, quick turns", _agent, True),
    "chat": _Kind("people chatting: short questions, long answers, pauses", _chat, True),
    "coding": _Kind(
        "coding agent: one history edited, one compacted into a summary", _coding, None
    ),
    "reasoning": _Kind("most of each answer is reasoning that the client strips", _reasoning, None),
    "branches": _Kind(
        "three sub-agents start from one context at once, none has an id",
        _branches,
        None,
        named=False,
    ),
    "one-shot": _Kind("single requests that never come back", _one_shot, False),
    "late": _Kind("every pause is longer than the lease", _late, False),
    "burst": _Kind("many short conversations at once, clients do not wait", _burst, None, True),
}

LENGTHS = "lengths"
_LENGTHS_WHAT = "the published experiment: follow-up turns on histories of fixed lengths"
_FOLLOW_UPS = 3
"""Turns after the first, per conversation: each is one measurement at about that length."""


def names() -> tuple[str, ...]:
    return (LENGTHS, *_KINDS)


def describe(name: str) -> str:
    return _LENGTHS_WHAT if name == LENGTHS else _KINDS[name].what


class UnknownWorkload(ValueError):
    """No workload of this name; the message lists those that there are."""


def make(name: str, sizes: Sizes, *, words_per_token: float, seed: int) -> Workload:
    """The workload, the same for the same arguments. Raises ``UnknownWorkload``."""
    if name == LENGTHS:
        return _lengths(sizes, words_per_token, seed)
    if name not in _KINDS:
        raise UnknownWorkload(f"unknown workload {name!r}; known: {', '.join(names())}")
    kind = _KINDS[name]
    scripts = []
    for number in range(1, sizes.count + 1):
        # Its own dice for each conversation: a longer run begins with the shorter one's.
        dice = random.Random(f"{seed} {name} {number}")
        scripts.append(kind.make(Writer(words_per_token, dice, sizes.scale), number, sizes))
    return Workload(
        name,
        kind.what,
        tuple(scripts),
        kind.loaded,
        sizes.clients,
        kind.named,
        kind.favourable,
    )


def _lengths(sizes: Sizes, words_per_token: float, seed: int) -> Workload:
    """Conversations of each length, in turn, so that none is measured in one stretch."""
    scripts = []
    for number in range(1, sizes.count + 1):
        for length in sizes.lengths:
            name = f"length-{length}-{number}"
            write = Writer(words_per_token, random.Random(f"{seed} {name}"), 1.0)
            steps = [Step((write.user(length, f"Text {number} of {length}:"),), 16)]
            steps += [Step((write.user(24, "Next:"),), 16) for _ in range(_FOLLOW_UPS)]
            scripts.append(Script(name, tuple(steps)))
    return Workload(LENGTHS, _LENGTHS_WHAT, tuple(scripts), clients=1, favourable=True)
