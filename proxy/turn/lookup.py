"""[io] From a request to its plan: tokenise, find, claim, decide."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson

from proxy import log
from proxy.dialects.base import Dialect
from proxy.errors import TableUnavailable, WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import Holding, Match, best_match
from proxy.turn import tokenise
from proxy.turn.parts import Parts
from proxy.turn.plan import ColdPrefill, PrefillWithPull, TurnPlan
from proxy.turn.planner import Limits, plan_turn, unusable_now, wants_claim
from proxy.turn.reasons import Reason
from proxy.turn.record import Prompt, Turn
from proxy.workers.pool import Worker


class Lookup:
    """Finds out what a turn's prompt is and what decode still holds of it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._limits = Limits(pull_threshold=parts.settings.pull_threshold)

    async def tokenise(
        self, turn: Turn, workers: tuple[Worker, ...]
    ) -> tuple[Prompt | None, Reason]:
        """Token ids of the prompt, or None and why they are not known."""
        if turn.dialect.has_media(turn.body):
            return None, Reason.MEDIA
        ids = turn.dialect.given_ids(turn.body)
        if ids is not None:
            return self._prompt(turn, ids)
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
    def _prompt(turn: Turn, ids: list[int]) -> tuple[Prompt, Reason]:
        tokens = PromptTokens(turn.identity.namespace, ids)
        return Prompt(tokens, orjson.dumps(ids)), Reason.NEW_SESSION

    async def _rendered(
        self, worker: Worker, dialect: Dialect, body: dict[str, Any]
    ) -> list[int] | None:
        timeout = self._parts.settings.tokenise_timeout_seconds
        if dialect.render_path and worker.render is not False:
            try:
                answers = [
                    await self._parts.client.call(
                        worker,
                        dialect.render_path,
                        orjson.dumps(leg),
                        timeout=timeout,
                        repeatable=True,
                    )
                    for leg in dialect.render_requests(body)
                ]
                worker.render = True
                return tokenise.agreed_ids(answers)
            except WorkerRefused as refusal:
                if not tokenise.render_is_off(refusal.status, _object(refusal.body)):
                    raise
                worker.render = False
                log.event("render_unavailable", worker=worker.name)
        request = dialect.tokenize_request(body)
        if request is None:
            return None
        answer = await self._parts.client.call(
            worker,
            tokenise.TOKENIZE_PATH,
            orjson.dumps(request),
            timeout=timeout,
            repeatable=True,
        )
        return tokenise.token_ids(answer)

    async def plan(
        self, turn: Turn, prompt: Prompt | None, miss: Reason, prefill: Worker
    ) -> TurnPlan:
        if not self._parts.reuse_on:
            return ColdPrefill(Reason.REUSE_DISABLED)
        match: Match | None = None
        if prompt is not None:
            try:
                with turn.trace.span("claim"):
                    match, miss = await self._claim(turn, prompt.tokens, prefill)
            except TableUnavailable:
                miss = Reason.TABLE_UNAVAILABLE
        holding = match.holding if match else None
        if holding is not None and holding.handle is not None:
            turn.claimed = holding
            turn.holding_used = holding.id
            assert match is not None
            turn.mismatched_tokens = holding.fingerprint.token_count - match.common
        with turn.trace.span("plan"):
            plan = plan_turn(
                match=match,
                holder=self._parts.pool.holder(
                    holding.worker if holding else "", holding.engine_id if holding else ""
                ),
                miss=miss,
                limits=self._limits,
                pull_allowed=prefill.pulls_allowed(time.monotonic()),
            )
        if turn.claimed is not None and not _spends(plan):
            # Most likely its process is gone, and prefill learns that in milliseconds. But a turn
            # that ended before the restart was noticed carries the old epoch and a live pin.
            self._parts.releases.later(turn.model, turn.claimed)
            turn.claimed = None
        return plan

    async def _claim(
        self, turn: Turn, prompt: PromptTokens, prefill: Worker
    ) -> tuple[Match | None, Reason]:
        identity = turn.identity
        with self._parts.table_operation("find"):
            candidates = await self._parts.table.find(identity, prompt)
        if not self._parts.settings.verify_tokens:
            match = _unverified(prompt, candidates)
        else:
            match = best_match(prompt, candidates)
        if match is None or not wants_claim(match, named=bool(identity.conversation)):
            return None, Reason.NEW_SESSION
        holder = self._parts.pool.holder(match.holding.worker, match.holding.engine_id)
        allowed = prefill.pulls_allowed(time.monotonic())
        if obstacle := unusable_now(match.holding, holder, pull_allowed=allowed):
            return None, obstacle
        claiming = asyncio.ensure_future(self._parts.table.claim(identity, match.holding))
        try:
            with self._parts.table_operation("claim"):
                won = await asyncio.shield(claiming)
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
    return isinstance(plan, PrefillWithPull) or plan.release is not None


def _unverified(prompt: PromptTokens, candidates: list[Holding]) -> Match | None:
    """What a proxy does that compares nothing (``verify_tokens`` off): trust the newest handle."""
    if not candidates:
        return None
    newest = candidates[0]
    return Match(newest, min(len(prompt), newest.fingerprint.token_count))


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
