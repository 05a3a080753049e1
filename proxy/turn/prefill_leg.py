"""[io] Prefill's part of a turn: the pull or the cold computation, and what happens if it fails."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from proxy import log
from proxy.canary import Canary
from proxy.errors import WorkerError, WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.session.holding import Holding
from proxy.turn import wire
from proxy.turn.parts import Parts, busy
from proxy.turn.plan import (
    ColdPrefill,
    DecodeLocalAppend,
    DecodeOnly,
    PrefillWithPull,
    Push,
    TurnPlan,
)
from proxy.turn.reasons import Reason
from proxy.turn.record import Prompt, Turn
from proxy.turn.releases import ABORT_SETTLES
from proxy.turn.wire import COMPLETIONS_PATH
from proxy.workers.costs import Work
from proxy.workers.pairs import why_no_handover
from proxy.workers.pool import Role, Worker


class PrefillLeg:
    """Performs prefill legs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._canary = Canary(parts.settings.canary_fraction, parts.client, parts.metrics)

    async def perform(
        self,
        turn: Turn,
        plan: TurnPlan,
        prompt: Prompt | None,
        worker: Worker | None,
        decode: Worker,
    ) -> dict[str, Any] | None:
        """Prefill's handle for decode, or None when decode must compute the prompt itself."""
        if isinstance(plan, (DecodeOnly, DecodeLocalAppend, Push)) or worker is None:
            return None
        turn.stage = "prefill"
        pull = plan if isinstance(plan, PrefillWithPull) else None
        release = plan.release if isinstance(plan, ColdPrefill) else None
        tried: list[str] = []
        along: Holding | None = None
        if pull is None and release is None and prompt is not None and turn.claimed is None:
            along = release = turn.claimed = self._parts.releases.take_along(worker)
        while True:
            warm = pull is not None or release is not None
            turn.prefill_worker = worker.name
            ahead = worker.tokens_ahead
            to_compute = turn.prompt_tokens - (pull.tokens if pull is not None else 0)
            try:
                with (
                    busy(worker, max(0, to_compute)),
                    turn.leg("prefill"),
                    turn.trace.span("prefill"),
                ):
                    if warm:
                        answer = await self._warm_call(
                            turn, worker, prompt, pull, release, along=along is not None
                        )
                    else:
                        answer = await self._prefill_call(turn, worker, prompt, None, None)
            except WorkerRefused:
                worker.answered()
                if prompt is None:
                    raise  # prefill saw the client's own request: its verdict stands
                # Prefill will not take ids that it produced itself (context limit, say). Decode
                # sees the client's request and answers with its own words.
                turn.fall_to_decode(Reason.PREFILL_FAILED)
                return None
            except (WorkerFailed, WorkerUnreachable) as error:
                self._parts.prefill_failed(turn.request_id, worker, error, warm=warm)
                if warm:
                    self._parts.verdicts.pull_failed(worker)
                    if pull is not None:
                        turn.route, turn.reason = ColdPrefill.route, Reason.PULL_FAILED
                    pull = release = None
                    if along is not None:
                        self._parts.releases.failed_along(turn.model, worker, along, error, 0)
                        along = turn.claimed = None
                    elif turn.claimed is not None:
                        # A failed read frees nothing on decode.
                        answered = isinstance(error, WorkerFailed)
                        self._parts.releases.later(
                            turn.model,
                            turn.claimed,
                            avoid=worker.name,
                            pause=0 if answered else ABORT_SETTLES,
                        )
                        turn.claimed = None
                else:
                    tried.append(worker.name)
                    if len(tried) >= 2:
                        turn.fall_to_decode(Reason.PREFILL_FAILED)
                        return None
                    if not self._parts.retries.spend():
                        self._parts.metrics.retries_refused.inc()
                        turn.fall_to_decode(Reason.PREFILL_FAILED)
                        return None
                again = self._parts.pool.choose(
                    Role.PREFILL,
                    avoid=tried,
                    now=time.monotonic(),
                    model=turn.model,
                    beside=decode,
                )
                if again is None or again.name in tried:
                    turn.fall_to_decode(Reason.PREFILL_FAILED)
                    return None
                worker = again
                continue
            break
        if warm:
            turn.claimed = None
            worker.pull_succeeded()
            if (spent := pull.holding if pull is not None else release) is not None:
                self._parts.releases.proved(worker, spent)
            if release is not None:
                self._parts.metrics.releases.labels("with_prefill").inc()
        worker.answered()
        handle = wire.usable_prefill_handle(answer.get("kv_transfer_params"))
        if handle is None:
            turn.fall_to_decode(Reason.PREFILL_KEPT_NOTHING)
            return None
        if (mode := handle.get("transfer_mode")) and isinstance(mode, str):
            worker.transfer_mode = mode
        if reason := why_no_handover(worker, decode):
            log.event("pair_mismatch", prefill=worker.name, decode=decode.name, why=reason)
            turn.fall_to_decode(Reason.PAIR_MISMATCH)
            return None
        if worker.transfer_mode == "push":
            worker.push_place = wire.push_place(handle)
            turn.fall_to_decode(Reason.PUSH_FOUND)
            return None
        total, pulled, local = wire.reported_reuse(handle)
        turn.reused_tokens, turn.pulled_tokens, turn.prefill_cached_tokens = total, pulled, local
        if prompt is not None:
            self._learn(turn, worker, prompt, ahead)
        return handle

    def _learn(self, turn: Turn, worker: Worker, prompt: Prompt, ahead: int) -> None:
        """What the leg cost, and what prefill's cache now holds."""
        worker.prefixes.sent(prompt.tokens.fingerprint)
        if turn.pulled_tokens is None:
            return  # a stock worker does not say how much of its work was saved by which way
        there = min(turn.reused_tokens, turn.prompt_tokens - 1)
        work = Work(turn.prompt_tokens - there, there, turn.pulled_tokens, ahead)
        self._parts.pool.observe(worker, work, turn.legs["prefill"], time.monotonic())

    async def _warm_call(
        self,
        turn: Turn,
        worker: Worker,
        prompt: Prompt | None,
        pull: PrefillWithPull | None,
        release: Holding | None,
        *,
        along: bool,
    ) -> dict[str, Any]:
        """A prefill that carries a handle is not cancelled with its turn.

        Measured: cancelled before prefill's scheduler took it up, decode's blocks stay pinned to
        the end of their lease; a moment later, they are freed. From here the two look alike, and
        a release on top of a read shows on decode as a read of freed blocks.
        """
        call = asyncio.ensure_future(self._prefill_call(turn, worker, prompt, pull, release))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            holding, turn.claimed = turn.claimed, None
            self._parts.background.start(
                self._abandoned_prefill(turn, worker, call, holding, along), "abandoned prefill"
            )
            raise

    async def _abandoned_prefill(
        self,
        turn: Turn,
        worker: Worker,
        call: asyncio.Future[dict[str, Any]],
        holding: Holding | None,
        along: bool,
    ) -> None:
        try:
            with busy(worker):
                async with asyncio.timeout(self._parts.settings.abandoned_prefill_seconds):
                    await call
            self._parts.metrics.stranded_prefills.labels("client_left").inc()
        except (WorkerError, TimeoutError) as error:
            if along and holding is not None:
                self._parts.releases.failed_along(turn.model, worker, holding, error, ABORT_SETTLES)
            elif holding is not None:
                await self._parts.releases.send(turn.model, holding, pause=ABORT_SETTLES)

    async def _prefill_call(
        self,
        turn: Turn,
        worker: Worker,
        prompt: Prompt | None,
        pull: PrefillWithPull | None,
        release: Holding | None,
    ) -> dict[str, Any]:
        transfer = wire.transfer_for_prefill(pull, release)
        settings = self._parts.settings
        warm = pull is not None or release is not None
        watched = pull is not None and self._canary.chosen()
        if prompt is not None:
            path, body = (
                COMPLETIONS_PATH,
                wire.prefill_body(turn.body, prompt.json, transfer, ask_ids=watched),
            )
        else:
            path, body = turn.dialect.path, turn.dialect.prefill_body(turn.body, transfer)
        answer = await self._parts.client.call(
            worker,
            path,
            body,
            # A cold prefill rides along with a release: it needs a cold prefill's time.
            timeout=settings.warm_prefill_timeout_seconds
            if pull is not None
            else settings.cold_prefill_timeout_seconds,
            headers={
                "X-Request-Id": f"{turn.request_id}-p{turn.attempts}",
                **turn.trace.headers(),
            },
            repeatable=not warm,  # a warm prefill may have been read: its handle is spent
        )
        if watched and prompt is not None and (first := wire.first_token(answer)) is not None:
            cold = wire.cold_replay_body(turn.body, prompt.json)
            self._parts.background.start(
                self._canary.compare(worker, cold, first, turn.request_id), "canary"
            )
        return answer
