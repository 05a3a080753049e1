"""[pure] What to do with a turn, from values alone.

Five questions, each a function here, asked in this order by the conductor:

``may_split``    can prefill and decode share this request at all?
``wants_claim``  is the best stored holding worth claiming? (Claiming consumes it.)
``unusable_now`` could it be used at this moment?
``expect``       what would each route cost? (``turn/expectation.py``)
``plan_turn``    given what was claimed and that, which plan?

Workers that push have no history to claim: ``plan_push`` takes the place of the last four.

Whatever is claimed ends up in the plan: pulled, or under ``release``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from proxy.session.holding import Holding, Match
from proxy.turn.expectation import Expected
from proxy.turn.plan import ColdPrefill, DecodeLocalAppend, PrefillWithPull, Push, TurnPlan
from proxy.turn.reasons import Reason


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a route starts to pay. Lengths in tokens.

    ``append_tokens``: the longest new part that decode computes itself while its cost is not known;
    0: never. ``append_stall_seconds``: how long its other streams may stand still for it.
    ``by_cost`` False: these fixed rules always decide.
    """

    pull_threshold: int = 64
    append_tokens: int = 0
    append_stall_seconds: float = 0.0
    by_cost: bool = True


@dataclass(frozen=True, slots=True)
class Append:
    """A local append that the chosen decode worker could do: ``tokens`` to compute, beside
    ``others`` requests that would stand still meanwhile."""

    tokens: int
    others: int


@dataclass(frozen=True, slots=True)
class HolderState:
    """What the pool knows of the worker that a holding names.

    ``epoch`` is empty when unknown; ``block_size`` (tokens) is None when it was not probed.
    """

    present: bool
    epoch: str = ""
    block_size: int | None = None


def may_split(body: Mapping[str, Any]) -> Reason | None:
    """None when prefill and decode may share the request, else why one worker must do it all.

    Sources: vLLM #38900 (n), #50792 and #27449 (prompt_logprobs and echo kill the decode engine,
    which has no logits for pulled tokens).
    """
    if (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1 or body.get("use_beam_search"):
        return Reason.MULTIPLE_CHOICES
    if body.get("prompt_logprobs") is not None or body.get("echo"):
        return Reason.PROMPT_LOGPROBS
    return None


def has_media(messages: object) -> bool:
    """Does any message hold a part that is not text?

    Placeholders of different images have equal ids (smg #2365), and vLLM ignores forwarded ids for
    such messages, so the ids prove nothing.
    """
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and not _is_text(part):
                    return True
    return False


_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def _is_text(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return kind in _TEXT_PARTS if kind is not None else set(part) <= {"text"}


def wants_claim(match: Match, *, named: bool) -> bool:
    """Should the turn claim this holding?

    A turn that names its conversation claims that conversation's holding whatever it shares:
    useless, it is released. A turn found by prefix alone must use at least half of the holding, or
    a chance match (a shared system prompt) would consume another conversation's handle.
    """
    if match.holding.handle is None:
        return True
    return named or match.common * 2 >= match.holding.fingerprint.token_count


def unusable_now(
    holding: Holding, holder: HolderState, *, pull_allowed: bool, exchange: bool = True
) -> Reason | None:
    """Why this holding had better stay in the table, or None.

    ``exchange`` False: the chosen prefill worker and the holder cannot exchange blocks at all.

    Decode may only have answered a probe late, and pulls may only be paused: its blocks live on.
    Claimed now they could be neither pulled nor released; left alone, a later turn has them.
    """
    if holding.handle is None:
        return None
    if not holder.present:
        return Reason.DECODE_RESTARTED
    if not exchange:
        return Reason.PAIR_MISMATCH
    return None if pull_allowed else Reason.PULL_BLOCKED


def plan_turn(
    *,
    match: Match | None,
    holder: HolderState,
    miss: Reason = Reason.NEW_SESSION,
    limits: Limits,
    pull_allowed: bool = True,
    append: Append | None = None,
    expected: Expected | None = None,
) -> TurnPlan:
    """The plan for a turn that prefill and decode could share.

    ``match`` is what was claimed (None: nothing, and ``miss`` says why); ``holder`` describes its
    worker; ``pull_allowed`` is False while pulls to the chosen prefill worker are paused;
    ``append`` is None when decode cannot compute the new part itself.
    """
    if match is None:
        return ColdPrefill(miss)
    holding = match.holding
    if holding.handle is None:
        return ColdPrefill(holding.absent or Reason.NEW_SESSION)
    if not holder.present or (holder.epoch and holding.epoch and holder.epoch != holding.epoch):
        # The process that held the blocks is gone: there is nothing to release either.
        return ColdPrefill(Reason.DECODE_RESTARTED)
    if not pull_allowed:
        # That prefill worker may hang on handles: it is not sent the release form either.
        return ColdPrefill(Reason.PULL_BLOCKED)
    if match.common < limits.pull_threshold:
        grew = match.complete
        reason = Reason.BELOW_THRESHOLD if grew else Reason.HISTORY_DIVERGED
        return ColdPrefill(reason, release=holding)
    cut = _cut(match, holder.block_size)
    if append is not None and not _bearable(append, limits, expected):
        append = None
    route, by_cost = _cheapest(
        limits, expected, append_tokens=append.tokens if append else None, pull=cut is not None
    )
    if route == DecodeLocalAppend.route and append is not None:
        reason = Reason.APPEND_CHEAPEST if by_cost else Reason.SHORT_APPEND
        return DecodeLocalAppend(reason, holding, append.tokens)
    if cut is None:
        return ColdPrefill(Reason.UNCUTTABLE, release=holding)
    if route == ColdPrefill.route:
        return ColdPrefill(Reason.COLD_CHEAPEST, release=holding)
    tokens, blocks = cut
    reason = Reason.HISTORY_GREW if match.complete else Reason.HISTORY_CUT
    return PrefillWithPull(reason, holding, tokens, blocks)


def plan_push(*, place_known: bool, engines: int | None, steady: bool, decode_waiting: int) -> Push:
    """The plan for two workers that push.

    ``place_known``: are the coordinates of prefill's engine known, which decode must name before
    prefill answers? ``engines``: data-parallel engines behind prefill's address; which of several
    will take the request is not known. ``steady`` False: prefill left decode waiting lately, or no
    such risk is to be taken (``push_together``).
    ``decode_waiting``: requests queued on decode. One that waits longer than prefill keeps its
    blocks (30 s) finds them gone; only a request that carries prefill's answer prolongs that.
    """
    together = place_known and (engines or 1) == 1 and steady and decode_waiting == 0
    return Push(Reason.PUSH_ONE_WAY if together else Reason.PUSH_IN_TURN, together)


def _bearable(append: Append, limits: Limits, expected: Expected | None) -> bool:
    """May decode's other streams be made to wait for this append?"""
    if limits.append_tokens == 0:
        return False
    if append.others == 0 or append.tokens <= 1:
        return True
    stall = expected.append_stall if expected else None
    if stall is None:
        return append.tokens <= limits.append_tokens
    return stall <= limits.append_stall_seconds


_WORTH_CHANGING = 0.95
_WORTH_SECONDS = 0.005
"""The fixed rules' route is left for one that is expected to take less than this share of its time,
and to save this many seconds: two routes that cost the same must not take turns on noise."""


def _cheapest(
    limits: Limits, expected: Expected | None, *, append_tokens: int | None, pull: bool
) -> tuple[str, bool]:
    """The route, and whether costs decided. ``append_tokens`` None: no append is possible.

    The route of the fixed rules is taken until its cost is known: that is how it becomes known.
    """
    if append_tokens is not None and append_tokens <= limits.append_tokens:
        fixed = DecodeLocalAppend.route
    else:
        fixed = PrefillWithPull.route if pull else ColdPrefill.route
    if not limits.by_cost or expected is None:
        return fixed, False
    costs = {ColdPrefill.route: expected.cold}
    if pull:
        costs[PrefillWithPull.route] = expected.pull
    if append_tokens is not None:
        costs[DecodeLocalAppend.route] = expected.append
    known = {route: seconds for route, seconds in costs.items() if seconds is not None}
    if fixed not in known:
        return fixed, False
    best = min(known, key=lambda route: known[route])
    enough = min(known[fixed] * _WORTH_CHANGING, known[fixed] - _WORTH_SECONDS)
    return (best if known[best] < enough else fixed), True


def _cut(match: Match, block_size: int | None) -> tuple[int, int] | None:
    """Tokens and block-list length to send, or None when that cannot be done safely.

    vLLM keeps the *last* blocks of a list that is longer than it needs, so the list must have
    exactly ``ceil(tokens / block_size)`` ids: token count and list are cut together or not at all.
    With several KV-cache groups a count in tokens does not describe the lists: whole or nothing.
    """
    handle = match.holding.handle
    assert handle is not None
    groups: list[list[int]] = handle["remote_block_ids"]
    held = handle["remote_num_tokens"]
    tokens = min(match.common, held)
    if tokens == held:
        if len(groups) == 1 and block_size and len(groups[0]) != ceil(held / block_size):
            return None
        return tokens, max(len(group) for group in groups)
    if len(groups) != 1 or not block_size:
        return None
    blocks = ceil(tokens / block_size)
    return (tokens, blocks) if blocks <= len(groups[0]) else None
