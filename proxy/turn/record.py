"""[io] One turn's record: what was asked, what is known, what was decided, how it went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.dialects.base import Dialect
from proxy.dialects.chat import CHAT
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import Holding
from proxy.session.identity import NOBODY, Caller, Identity
from proxy.session.ledger import Place
from proxy.turn.expectation import Expected
from proxy.turn.plan import DecodeLocalAppend, DecodeOnly, PrefillWithPull, Push, TurnPlan
from proxy.turn.reasons import Reason
from proxy.turn.trace import TurnTrace
from proxy.workers.costs import Work
from proxy.workers.worker import Worker


class Sink(Protocol):
    """Where an answer goes. ``begin`` once, then ``write`` as often as needed."""

    async def begin(self, content_type: str, headers: dict[str, str]) -> None: ...

    async def write(self, data: bytes, *, last: bool = False) -> None: ...

    def offer(self, data: bytes) -> bool:
        """Write at once if that needs no waiting; was it written?"""
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room that is reserved in a ledger."""

    place: Place
    id: str


@dataclass(slots=True)
class Turn:
    """One request on its way. Set by the route: the first block; by the conductor: the rest."""

    body: dict[str, Any]
    identity: Identity
    request_id: str
    started: float
    dialect: Dialect = CHAT
    caller: Caller = NOBODY
    bound_to: str = ""
    """Name of the only decode worker that can serve it; empty when any can."""

    route: str = ""
    reason: Reason = Reason.NEW_SESSION
    stage: str = "queue"
    prompt_tokens: int = 0
    reused_tokens: int = 0
    pulled_tokens: int | None = None
    prefill_cached_tokens: int | None = None
    planned_pull: int = 0
    mismatched_tokens: int = 0
    """Of the claimed holding: tokens that this prompt does not repeat."""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    ttft: float | None = None
    kept: str = ""
    holding_used: str = ""
    """Id of the holding that was claimed: the turn that left it is the one before this."""
    holding_left: str = ""
    """Id of the holding that this turn left for the next."""
    kept_tokens: int = 0
    kept_seconds: float = 0.0
    claimed: Holding | None = None
    """A holding taken out of the table that prefill has neither pulled nor released yet."""
    taken: Holding | None = None
    """The same, until its entry in the ledger is removed."""
    continues: bool = False
    """Was anything found of an earlier turn of its conversation?"""
    reservation: Reservation | None = None
    expected: Expected | None = None
    """What each route was expected to cost when the plan was made."""
    decode_work: Work | None = None
    """What decode's leg has to do, as planned; corrected by what decode says of it."""
    _computing: tuple[Worker, int] | None = None
    handed_over: bool = True
    """False between prefill's answer and decode's first sign of life."""
    legs_at_once: bool = False
    legs: dict[str, float] = field(default_factory=dict)
    trace: TurnTrace = field(default_factory=TurnTrace)
    last_piece: float = 0.0
    """Monotonic time of the newest content that was sent on."""
    gaps: int = 0
    gap_seconds: float = 0.0
    longest_gap: float = 0.0

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def returning(self) -> bool:
        """Does the prompt hold an earlier answer, so that there was something to keep?"""
        messages = self.body.get("messages", self.body.get("input"))
        return isinstance(messages, list) and any(
            isinstance(each, dict) and each.get("role") == "assistant" for each in messages
        )

    def headers(self) -> dict[str, str]:
        """What is known about the turn, for the client."""
        found = {
            "X-Request-Id": self.request_id,
            "X-KVLoop-Route": self.route,
            "X-KVLoop-Reason": str(self.reason),
            "X-KVLoop-Reused-Tokens": str(self.reused_tokens),
        }
        if self.prompt_tokens:
            found["X-KVLoop-Prompt-Tokens"] = str(self.prompt_tokens)
        if self.pulled_tokens is not None:
            found["X-KVLoop-Pulled-Tokens"] = str(self.pulled_tokens)
        if self.prefill_cached_tokens is not None:
            found["X-KVLoop-Prefill-Cached-Tokens"] = str(self.prefill_cached_tokens)
        return found

    def adopt(self, plan: TurnPlan) -> None:
        self.route = plan.route
        self.reason = plan.reason
        self.reused_tokens = 0
        self.legs_at_once = isinstance(plan, Push) and plan.together
        if isinstance(plan, PrefillWithPull):
            self.planned_pull = plan.tokens
        elif isinstance(plan, DecodeLocalAppend):
            self.reused_tokens = self.prompt_tokens - plan.tokens

    def fall_to_decode(self, reason: Reason) -> None:
        """Decode must compute the prompt itself: nothing is reused."""
        self.route, self.reason = DecodeOnly.route, reason
        self.reused_tokens, self.pulled_tokens, self.prefill_cached_tokens = 0, None, None

    def decode_computes(self, worker: Worker, tokens: int) -> None:
        """Decode has so many prompt tokens to compute before its first token."""
        worker.outstanding_tokens += tokens
        self._computing = (worker, tokens)

    def computed(self) -> None:
        """It has, or it gave up."""
        if self._computing is not None:
            worker, tokens = self._computing
            worker.outstanding_tokens -= tokens
            self._computing = None

    def first_content(self) -> None:
        """The answer begins: from now on nothing can be repeated."""
        self.computed()
        self.stage = "relay"
        self.last_piece = time.monotonic()
        self.ttft = self.last_piece - self.started
        self.trace.first_content()

    def next_content(self) -> None:
        """One more piece of a stream. On the hot path: a clock reading and two sums."""
        now = time.monotonic()
        gap = now - self.last_piece
        self.last_piece = now
        self.gaps += 1
        self.gap_seconds += gap
        if gap > self.longest_gap:
            self.longest_gap = gap

    @property
    def cost(self) -> float | None:
        """Seconds of the legs up to the first content: what the plan is about."""
        if not self.streamed or "decode" not in self.legs:
            return None  # a whole answer's leg is as long as the answer
        before = 0.0 if self.legs_at_once else self.legs.get("prefill", 0.0)
        return before + self.legs["decode"]

    def leg(self, name: str) -> _Leg:
        """Time a call to a worker."""
        return _Leg(self.legs, name)


class _Leg:
    __slots__ = ("_legs", "_name", "_start")

    def __init__(self, legs: dict[str, float], name: str) -> None:
        self._legs = legs
        self._name = name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *how: object) -> None:
        self._legs[self._name] = time.monotonic() - self._start


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt: hashed for comparison, and as JSON for both legs."""

    tokens: PromptTokens

    @property
    def json(self) -> bytes:
        return self.tokens.json
