"""Clients: conversations whose right answers are known, some of which leave in the middle.

They behave as good clients do behind a load balancer: a replica that refuses connections is
replaced by another, everything else is judged.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

import aiohttp

from proxy.tasks import end
from tests.chaos.steps import Step, Steps, last_words

Message = dict[str, Any]

_COMPARED_AT_ONCE = 8


class Verdict(Enum):
    """What became of one request."""

    RIGHT = "right"
    """The whole answer that a cold run gives."""
    ERROR = "error"
    """An error in the API's own form, or a right beginning and then an error event."""
    WRONG = "wrong"
    """Anything else that came: other text, a broken-off stream, an error not in the API's form."""
    HUNG = "hung"
    """No end within the time that a client waits."""
    LEFT = "left"
    """The client went away."""
    CUT = "cut"
    """The connection broke because its proxy was killed."""


@dataclass(frozen=True)
class Heard:
    """A 200 as the client took it. ``problem`` is empty when its form is right."""

    text: str
    ended: bool = True
    """False: an error event came after the text."""
    problem: str = ""

    def judged(self, wanted: str) -> Verdict:
        if self.problem:
            return Verdict.WRONG
        if self.ended:
            return Verdict.RIGHT if self.text == wanted else Verdict.WRONG
        return Verdict.ERROR if wanted.startswith(self.text) else Verdict.WRONG


@dataclass
class Tally:
    """Verdicts of a round, and what was odd about the bad ones."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    unsure: list[tuple[list[Message], Heard]] = field(default_factory=list)
    """Answers that can be compared only when the fault is over; counted as right until then."""
    compared: int = 0
    """Answers that were compared with a cold run's."""

    @property
    def sent(self) -> int:
        return self.verdicts.total()

    def note(self, verdict: Verdict, complaint: str = "") -> None:
        self.verdicts[verdict] += 1
        if verdict in (Verdict.WRONG, Verdict.HUNG):
            self.complaints.append(f"{verdict.value}: {complaint}")

    async def compare(self, cold: Callable[[list[Message]], Awaitable[str]]) -> None:
        """Judge what was unsure, with answers that were computed from nothing."""
        unsure, self.unsure = self.unsure, []
        self.compared += len(unsure)
        places = asyncio.Semaphore(_COMPARED_AT_ONCE)

        async def judge(messages: list[Message], heard: Heard) -> None:
            async with places:
                wanted = await cold(messages)
            if (verdict := heard.judged(wanted)) is Verdict.WRONG:
                self.verdicts[Verdict.RIGHT if heard.ended else Verdict.ERROR] -= 1
                self.note(verdict, f"{heard.text!r} and not {wanted!r}, message {len(messages)}")

        await asyncio.gather(*(judge(messages, heard) for messages, heard in unsure))


class Front(Protocol):
    """A proxy seen by a client."""

    @property
    def url(self) -> str: ...

    @property
    def serving(self) -> bool: ...

    @property
    def going(self) -> bool:
        """Is it being stopped, or gone?"""
        ...

    @property
    def kills(self) -> Sequence[float]:
        """Times (monotonic) of each SIGKILL: what is cut then is nobody's mistake."""
        ...


@dataclass
class Talk:
    """A conversation. Without a name the proxy finds it by its tokens."""

    name: str
    messages: list[Message] = field(default_factory=list)


@dataclass
class Ways:
    """What the clients of a round do; shares are probabilities."""

    clients: int = 8
    streamed: float = 0.6
    leaving: float = 0.0
    leave_within: float = 0.25
    """Seconds after which a leaving client is gone at the latest: about a turn's duration."""
    leave_at: Step | None = None
    """Leave when the turn has reached this step, instead of after some time."""
    one_shot: float = 0.1
    """Share of turns that begin a new conversation."""
    first_words: int = 40
    talks: int = 32
    """Conversations under way: with more than clients, one rests while a fault comes and goes."""
    pause_after_error: float = 0.0
    """Seconds, as ``Retry-After`` asks for them."""


Leaves = Callable[[], Awaitable[object]]
"""What a client waits for before it leaves."""


class Load:
    """``await run(enough)`` with ``ways.clients`` clients at once.

    ``right`` gives the right answer to messages; None: it is not known yet (``Tally.compare``).
    """

    def __init__(
        self,
        fronts: Sequence[Front],
        model: str,
        dice: random.Random,
        *,
        right: Callable[[list[Message]], str] | None,
        hang_after: float,
        ways: Ways | None = None,
        fields: dict[str, Any] | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._fronts = fronts
        self._model = model
        self._dice = dice
        self._right = right
        self._hang_after = hang_after
        self._fields = fields or {}
        self._steps = steps or Steps()
        self.ways = ways or Ways()
        self.tally = Tally()
        self._last_text: dict[int, str] = {}
        self._talks = [self._new_talk() for _ in range(self.ways.talks)]

    async def run(self, enough: asyncio.Event) -> Tally:
        """Keep asking until ``enough``; returns when every request has its verdict."""

        async def client() -> None:
            while not enough.is_set():
                talk = self._talks.pop(self._dice.randrange(len(self._talks)))
                if len(talk.messages) > 8 or self._dice.random() < self.ways.one_shot:
                    talk = self._new_talk()
                await self._turn(talk)
                self._talks.append(talk)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.ways.clients):
                group.create_task(client())
        return self.tally

    def _new_talk(self) -> Talk:
        dice = self._dice
        return Talk(f"{dice.getrandbits(64):x}" if dice.random() < 0.5 else "")

    def _words(self, count: int) -> str:
        return " ".join(f"{self._dice.getrandbits(20):x}" for _ in range(count))

    async def _turn(self, talk: Talk) -> None:
        dice = self._dice
        before = list(talk.messages)
        if len(talk.messages) > 2 and dice.random() < 0.1:
            # An edited history: what was kept for it may be used up to the edit only.
            at = dice.randrange(0, len(talk.messages), 2)
            talk.messages[at] = {"role": "user", "content": self._words(self.ways.first_words)}
        words = 4 if talk.messages else self.ways.first_words
        talk.messages.append({"role": "user", "content": self._words(words)})
        body = {
            "model": self._model,
            "messages": list(talk.messages),
            "stream": dice.random() < self.ways.streamed,
            **self._fields,
        }
        if talk.name:
            body["conversation_id"] = talk.name
        request_id = f"{dice.getrandbits(64):x}" if self.ways.leave_at else ""
        leaves: Leaves | None = None
        if dice.random() < self.ways.leaving:
            if self.ways.leave_at is None:
                leaves = partial(asyncio.sleep, dice.random() * self.ways.leave_within)
            else:
                leaves = partial(self._reached, self.ways.leave_at, request_id, body)
        verdict = await self.ask(body, leaves=leaves, request_id=request_id)
        if verdict is Verdict.ERROR:
            await asyncio.sleep(self.ways.pause_after_error)
        if verdict is Verdict.RIGHT:
            talk.messages.append({"role": "assistant", "content": self._last_text[id(body)]})
        else:
            talk.messages = before
        self._last_text.pop(id(body), None)

    async def _reached(self, step: Step, request_id: str, body: dict[str, Any]) -> None:
        """Return when the turn is there. For ever, if it never gets there."""
        turn = last_words(body) if step is Step.TOKENISE else request_id
        there = asyncio.Event()

        def act(port: int) -> bool:
            there.set()
            return True

        self._steps.at(step, turn, act)
        try:
            await there.wait()
        finally:
            self._steps.forget(step, turn)

    async def ask(
        self, body: dict[str, Any], *, leaves: Leaves | None = None, request_id: str = ""
    ) -> Verdict:
        """One request, judged and tallied. The client leaves when ``leaves`` returns."""
        while (verdict := await self._asked(body, leaves, request_id)) is None:
            await asyncio.sleep(0.02)
        return verdict

    async def _asked(
        self, body: dict[str, Any], leaves: Leaves | None, request_id: str
    ) -> Verdict | None:
        """None: the replica was just going and took no connection, so nothing was asked."""
        front = await self._pick()
        sent = time.monotonic()
        leaving = asyncio.ensure_future(leaves()) if leaves else None
        asking = asyncio.ensure_future(self._judged(front, body, request_id))
        try:
            await asyncio.wait(
                [asking, leaving] if leaving else [asking],
                timeout=self._hang_after,
                return_when=asyncio.FIRST_COMPLETED,
            )
            left = leaving is not None and leaving.done()
            if not asking.done():
                # Cancelling closes the connection: that is how a client leaves.
                await end([asking])
                complaint = f"no end of {_told(body)} in {self._hang_after:.0f} s"
                self.tally.note(Verdict.LEFT if left else Verdict.HUNG, complaint)
                return Verdict.LEFT if left else Verdict.HUNG
        finally:
            await end([each for each in (asking, leaving) if each and not each.done()])
        try:
            verdict, complaint = asking.result()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and front.going:
                return None
            killed = any(death >= sent for death in front.kills)
            verdict = Verdict.CUT if killed else Verdict.WRONG
            complaint = f"{type(error).__name__} {error} at {_told(body)}"
        self.tally.note(verdict, complaint)
        return verdict

    async def _pick(self) -> Front:
        while not (fronts := [each for each in self._fronts if each.serving]):
            await asyncio.sleep(0.05)
        return self._dice.choice(fronts)

    async def _judged(
        self, front: Front, body: dict[str, Any], request_id: str
    ) -> tuple[Verdict, str]:
        headers = {"X-Request-Id": request_id} if request_id else {}
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.post(front.url + "/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            page = await answer.read()
            if answer.status != 200:
                return _judged_error(answer.status, dict(answer.headers), page)
            reason = answer.headers.get("X-KVLoop-Reason", "")
        heard = _heard_stream(page) if body["stream"] else _heard_plain(page)
        self._last_text[id(body)] = heard.text
        wanted = heard.text if self._right is None else self._right(body["messages"])
        verdict = heard.judged(wanted)
        if self._right is None and verdict is not Verdict.WRONG:
            self.tally.unsure.append((body["messages"], heard))
        complaint = heard.problem or f"{heard.text!r} and not {wanted!r}"
        return verdict, f"{complaint} ({reason}) at {_told(body)}"


def _told(body: dict[str, Any]) -> str:
    kind = "a stream" if body["stream"] else "a plain answer"
    return f"{kind}, message {len(body['messages'])}"


def _judged_error(status: int, headers: dict[str, str], page: bytes) -> tuple[Verdict, str]:
    """An error is one of ours when it has the API's form and a status that says whose fault."""
    told = f"HTTP {status} {page[:200]!r}"
    try:
        error = json.loads(page)["error"]
        proper = isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, KeyError, TypeError):
        return Verdict.WRONG, told
    if status in (429, 503):
        proper = proper and "Retry-After" in headers
    # The requests are faultless, so any other 4xx is wrong, and 500 is a crash of the proxy's.
    return (Verdict.ERROR if proper and status in (429, 502, 503, 504) else Verdict.WRONG), told


def _heard_plain(page: bytes) -> Heard:
    try:
        return Heard(json.loads(page)["choices"][0]["message"]["content"] or "")
    except (ValueError, KeyError, TypeError, IndexError):
        return Heard("", problem=f"no answer: {page[:100]!r}")


def _heard_stream(page: bytes) -> Heard:
    text, finish, error = "", None, None
    for event in page.decode().split("\n\n"):
        if not event.startswith("data: {"):
            continue
        chunk = json.loads(event[6:])
        error = chunk.get("error", error)
        for choice in chunk.get("choices", ()):
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    if not page.endswith(b"data: [DONE]\n\n"):
        return Heard(text, problem=f"a stream without its end, after {text!r}")
    if error is not None and not isinstance(error.get("message"), str):
        return Heard(text, problem=f"an error event without a message: {error}")
    if error is None and finish is None:
        return Heard(text, problem=f"a stream without a reason for its end, after {text!r}")
    return Heard(text, ended=error is None)
