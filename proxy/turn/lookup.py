"""[io] From a request to its plan: tokenise, find, claim, decide."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from proxy import log
from proxy.dialects.base import Dialect
from proxy.errors import (
    NoWorker,
    TableUnavailable,
    WorkerFailed,
    WorkerRefused,
    WorkerUnreachable,
)
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import Holding, Match, best_match
from proxy.turn import tokenise
from proxy.turn.expectation import (
    Situation,
    append_work,
    expect,
    handed_over_work,
    pull_work,
)
from proxy.turn.parts import Parts
from proxy.turn.plan import ColdPrefill, DecodeLocalAppend, DecodeOnly, PrefillWithPull, TurnPlan
from proxy.turn.planner import (
    Append,
    Limits,
    plan_push,
    plan_turn,
    unusable_now,
    wants_claim,
)
from proxy.turn.reasons import Reason
from proxy.turn.record import Prompt, Turn
from proxy.turn.renderings import renderings
from proxy.workers.pairs import why_no_pull
from proxy.workers.pool import Role, Worker

T = TypeVar("T")

_ASKED_FOR_TOKENS = (Role.PREFILL, Role.DECODE)
"""Either can say what a prompt's token ids are; prefill is asked first."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and who performs it. ``prefill`` is None when decode does it all."""

    plan: TurnPlan
    prompt: Prompt | None
    decode: Worker
    prefill: Worker | None


class Lookup:
    """Finds out what a turn's prompt is and what decode still holds of it, and decides."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        settings = parts.settings
        self._limits = Limits(
            pull_threshold=settings.pull_threshold,
            append_tokens=settings.append_tokens if settings.decode_local_append else 0,
            append_stall_seconds=settings.append_stall_seconds,
            by_cost=settings.plan_by_cost,
        )

    async def tokenise(
        self, turn: Turn, workers: tuple[Worker, ...]
    ) -> tuple[Prompt | None, Reason]:
        """Token ids of the prompt, or None and why they are not known."""
        if turn.dialect.has_media(turn.body):
            return None, Reason.MEDIA
        given = turn.dialect.given_ids(turn.body)
        if given is not None:
            return self._prompt(turn, given)
        ids: bytes | None = None
        with turn.leg("tokenise"), turn.trace.span("tokenise"):
            for worker in workers:
                try:
                    ids = await self._rendered(worker, turn.dialect, turn.body)
                    break
                except (WorkerFailed, WorkerUnreachable) as error:
                    self._parts.verdicts.call_failed(worker, error)
                    log.event("tokenise_failed", request=turn.request_id, error=str(error))
        if ids is None:
            return None, Reason.NOT_TOKENISED
        return self._prompt(turn, ids)

    @staticmethod
    def _prompt(turn: Turn, ids: list[int] | bytes) -> tuple[Prompt | None, Reason]:
        try:
            return Prompt(PromptTokens(turn.identity.namespace, ids)), Reason.NEW_SESSION
        except ValueError:
            return None, Reason.NOT_TOKENISED

    async def _rendered(
        self, worker: Worker, dialect: Dialect, body: dict[str, Any]
    ) -> bytes | None:
        """The prompt's token ids as a JSON array."""
        timeout = self._parts.settings.tokenise_timeout_seconds
        if dialect.render_path and worker.render is not False:
            try:
                answers = [
                    await self._parts.client.post(
                        worker,
                        dialect.render_path,
                        orjson.dumps(leg),
                        timeout=timeout,
                        repeatable=True,
                    )
                    for leg in await renderings(self._parts.client, worker, dialect, body, timeout)
                ]
                worker.render = True
                return _read(worker, tokenise.agreed_ids, answers)
            except WorkerRefused as refusal:
                if not tokenise.render_is_off(refusal.status, _object(refusal.body)):
                    raise
                worker.render = False
                log.event("render_unavailable", worker=worker.name)
        request = dialect.tokenize_request(body)
        if request is None:
            return None
        answer = await self._parts.client.post(
            worker,
            tokenise.TOKENIZE_PATH,
            orjson.dumps(request),
            timeout=timeout,
            repeatable=True,
        )
        return _read(worker, tokenise.token_ids, answer)

    async def decide(self, turn: Turn) -> Decision:
        """The plan of a turn and the workers that perform it. Raises ``NoWorker``.

        A holding that was claimed on the way is ``turn.claimed``, unless it was released.
        """
        parts, model = self._parts, turn.model
        now = time.monotonic()
        prefills = parts.pool.candidates(Role.PREFILL, now=now, model=model)
        if reason := turn.dialect.alone(turn.body):
            return Decision(DecodeOnly(reason), None, self._decode_for(turn, "", now), None)
        if not prefills:
            decode = self._decode_for(turn, "", now)
            return Decision(DecodeOnly(Reason.NO_PREFILL_WORKER), None, decode, None)
        askable = [parts.pool.to_ask(role, model=model, now=now) for role in _ASKED_FOR_TOKENS]
        if askable[-1] is None:
            raise NoWorker("No decode worker is healthy.")
        prompt, miss = await self.tokenise(turn, tuple(each for each in askable if each))
        turn.prompt_tokens = len(prompt.tokens) if prompt else 0
        if prompt is None and turn.dialect.cuts_prompt(turn.body):
            # Each worker would cut for itself: decode could read KV of other tokens than its own.
            return Decision(DecodeOnly(miss), None, self._decode_for(turn, "", now), None)
        turn.stage = "claim"
        match: Match | None = None
        if not parts.reuse_on:
            miss = Reason.REUSE_DISABLED
        elif prompt is not None and any(each.transfer_mode != "push" for each in prefills):
            with turn.trace.span("find"):
                match, miss = await self._find(turn, prompt.tokens, miss)

        now = time.monotonic()
        decode = self._decode_for(turn, match.holding.worker if match else "", now)
        prefill = self._prefill_for(turn, prompt, match, decode, now)
        if prefill is None:
            return Decision(DecodeOnly(Reason.NO_PREFILL_WORKER), None, decode, None)
        if not decode.transfers_allowed(now):
            return Decision(DecodeOnly(Reason.TRANSFER_BLOCKED), None, decode, None)
        if prefill.transfer_mode == "push":
            push = plan_push(
                place_known=bool(prefill.push_place),
                engines=prefill.engines,
                steady=parts.settings.push_together and prefill.pulls_allowed(now),
                decode_waiting=decode.waiting,
            )
            return Decision(push, prompt, decode, prefill)
        if match is not None and prompt is not None:
            with turn.trace.span("claim"):
                match, miss = await self._claim(turn, match, prefill)
        situation = self._situation(prompt, match, prefill, decode, now) if prompt else None
        with turn.trace.span("plan"):
            plan = self._plan(turn, match, miss, prefill, decode, situation)
        if isinstance(plan, DecodeLocalAppend):
            turn.decode_work = append_work(situation) if situation else None
        elif situation is not None:
            turn.decode_work = handed_over_work(situation)
        return Decision(plan, prompt, decode, prefill)

    def _decode_for(self, turn: Turn, holder: str, now: float) -> Worker:
        if turn.bound_to:
            decode = self._parts.pool.healthy(turn.bound_to)
        else:
            decode = self._parts.pool.choose_decode(
                model=turn.model, key=turn.identity.conversation, holder=holder, now=now
            )
        if decode is None:
            raise NoWorker("No decode worker is healthy.")
        return decode

    def _prefill_for(
        self, turn: Turn, prompt: Prompt | None, match: Match | None, decode: Worker, now: float
    ) -> Worker | None:
        """The prefill worker on which the turn's cheaper way through prefill costs least."""
        pool = self._parts.pool
        found = pool.candidates(Role.PREFILL, now=now, model=turn.model, beside=decode)
        if prompt is None:
            return pool.choose(Role.PREFILL, now=now, model=turn.model, beside=decode)
        if len(found) < 2:
            return pool.given(found[0], now) if found else None
        tokens = prompt.tokens
        situations = {
            each.name: self._situation(prompt, match, each, decode, now) for each in found
        }
        in_seconds = all(
            pool.expect(each, pull_work(situations[each.name]), now) is not None for each in found
        )

        def cost(worker: Worker) -> float:
            work = pull_work(situations[worker.name])
            seconds = pool.expect(worker, work, now) if in_seconds else None
            return work.computed + work.ahead if seconds is None else seconds

        return pool.choose_prefill(
            found,
            cost,
            key=turn.identity.conversation or tokens.fingerprint.span(0),
            cached=lambda each: situations[each.name].prefill_cached,
            now=now,
        )

    def _situation(
        self,
        prompt: Prompt,
        match: Match | None,
        prefill: Worker,
        decode: Worker,
        now: float,
    ) -> Situation:
        pool, tokens = self._parts.pool, prompt.tokens
        held = match if match and match.holding.handle is not None else None
        holder = pool.get(held.holding.worker) if held else None
        pullable = 0
        if held and holder and prefill.pulls_allowed(now) and not why_no_pull(prefill, holder):
            pullable = held.common
        decode_cached = 0
        if decode.prefix_caching is not False:
            decode_cached = decode.prefixes.cached(tokens.fingerprint)
        append = None
        if held and holder is decode:
            decode_cached = max(decode_cached, held.common)
            append = self._append_tokens(len(tokens), held.common, decode)
        return Situation(
            prompt=len(tokens),
            pullable=pullable,
            prefill_cached=0
            if prefill.prefix_caching is False
            else prefill.prefixes.cached(tokens.fingerprint),
            decode_cached=decode_cached,
            append=append,
            prefill_ahead=prefill.tokens_ahead,
            decode_ahead=decode.outstanding_tokens,
            pull_threshold=self._limits.pull_threshold,
        )

    def _append_tokens(self, prompt: int, common: int, decode: Worker) -> int | None:
        """Tokens decode would compute itself, or None when it cannot, or could not keep them.

        Only whole blocks are found in a prefix cache; the last token is computed in any case.
        """
        if not decode.retains or decode.plugin is False or decode.prefix_caching is False:
            return None
        block = decode.block_size or 1
        there = min(common, prompt - 1) // block * block
        return prompt - there if there else None

    def _plan(
        self,
        turn: Turn,
        match: Match | None,
        miss: Reason,
        prefill: Worker,
        decode: Worker,
        situation: Situation | None,
    ) -> TurnPlan:
        holding = match.holding if match else None
        if holding is not None and holding.handle is not None:
            turn.claimed = holding
            turn.holding_used = holding.id
            assert match is not None
            turn.mismatched_tokens = holding.fingerprint.token_count - match.common
        now, pool = time.monotonic(), self._parts.pool
        append = None
        if situation is not None:
            turn.expected = expect(
                situation,
                prefill=lambda work: pool.expect(prefill, work, now),
                decode=lambda work: pool.expect(decode, work, now),
                decode_compute=lambda work: pool.compute_seconds(decode, work, now),
            )
            if situation.append is not None:
                append = Append(situation.append, decode.load)
        plan = plan_turn(
            match=match,
            holder=pool.holder(
                holding.worker if holding else "", holding.engine_id if holding else ""
            ),
            miss=miss,
            limits=self._limits,
            pull_allowed=prefill.pulls_allowed(now),
            append=append,
            expected=turn.expected,
        )
        if turn.claimed is not None and not _spends(plan):
            # Most likely its process is gone, and prefill learns that in milliseconds. But a turn
            # that ended before the restart was noticed carries the old epoch and a live pin.
            self._parts.releases.later(turn.model, turn.claimed)
            turn.claimed = None
        return plan

    async def _find(
        self, turn: Turn, prompt: PromptTokens, miss: Reason
    ) -> tuple[Match | None, Reason]:
        """The stored holding that serves this prompt best. Nothing is claimed yet."""
        identity = turn.identity
        try:
            with self._parts.table_operation("find"):
                candidates = await self._parts.table.find(identity, prompt)
        except TableUnavailable:
            return None, Reason.TABLE_UNAVAILABLE
        if not self._parts.settings.verify_tokens:
            match = _unverified(prompt, candidates)
        else:
            match = best_match(prompt, candidates)
        if match is None or not wants_claim(match, named=bool(identity.conversation)):
            return None, Reason.NEW_SESSION
        return match, miss

    async def _claim(
        self, turn: Turn, match: Match, prefill: Worker
    ) -> tuple[Match | None, Reason]:
        identity, pool = turn.identity, self._parts.pool
        holder = pool.holder(match.holding.worker, match.holding.engine_id)
        worker = pool.get(match.holding.worker)
        obstacle = unusable_now(
            match.holding,
            holder,
            pull_allowed=prefill.pulls_allowed(time.monotonic()),
            exchange=worker is None or why_no_pull(prefill, worker) is None,
        )
        if obstacle:
            return None, obstacle
        claiming = asyncio.ensure_future(self._parts.table.claim(identity, match.holding))
        try:
            with self._parts.table_operation("claim"):
                won = await asyncio.shield(claiming)
        except TableUnavailable:
            return None, Reason.TABLE_UNAVAILABLE
        except asyncio.CancelledError:
            # The client left while Redis was deciding: if the holding is ours, it is given back.
            self._parts.background.start(
                self._release_if_won(turn, claiming, match.holding), "unclaim"
            )
            raise
        if not won:
            self._parts.metrics.claims_lost.inc()
            return None, Reason.CLAIM_LOST
        self._parts.retention.came(turn, match.holding)
        return match, Reason.NEW_SESSION

    async def _release_if_won(
        self, turn: Turn, claiming: asyncio.Future[bool], holding: Holding
    ) -> None:
        try:
            won = await claiming
        except TableUnavailable:
            return
        if won and holding.handle is not None:
            self._parts.retention.gone(holding)
            await self._parts.releases.send(turn.model, holding)


def _spends(plan: TurnPlan) -> bool:
    """Does performing this plan pull or release what was claimed?"""
    if isinstance(plan, (PrefillWithPull, DecodeLocalAppend)):
        return True  # the second keeps it until decode has ended
    return isinstance(plan, ColdPrefill) and plan.release is not None


def _unverified(prompt: PromptTokens, candidates: list[Holding]) -> Match | None:
    """What a proxy does that compares nothing (``verify_tokens`` off): trust the newest handle."""
    if not candidates:
        return None
    newest = candidates[0]
    return Match(newest, min(len(prompt), newest.fingerprint.token_count))


def _read(worker: Worker, read: Callable[[T], bytes | None], answer: T) -> bytes | None:
    """Raises ``WorkerFailed`` for an answer that is no answer."""
    try:
        return read(answer)
    except ValueError as error:
        raise WorkerFailed(worker.name, 200, f"answered {error}") from None


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
