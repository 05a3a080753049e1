"""[io] Performs a turn: tokenise, find and claim, plan, prefill, decode, relay, commit.

The decisions are in ``planner`` (what to do) and ``wire`` (what to say), the single steps in
``lookup``, ``prefill_leg``, ``decode_leg``, ``push_leg`` and ``keeping``; here is only their order
and what happens when one fails. The rules that these files must keep:

* a claimed holding is pulled once or released, whatever happens;
* before the first content byte a failure is repeated cold, unseen by the client; after it, never;
* what decode kept is in the table before the client can know that the turn is over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from proxy import log
from proxy.errors import WorkerError, WorkerRefused
from proxy.metrics import Metrics
from proxy.recent import RecentTurns
from proxy.session.ledger import Ledger
from proxy.session.table import SessionTable
from proxy.settings import Settings
from proxy.turn.admission import Admission, RetryBudget
from proxy.turn.background import Background
from proxy.turn.books import Books
from proxy.turn.decode_leg import DecodeLeg, Repeatable
from proxy.turn.lookup import Lookup
from proxy.turn.parts import Parts, busy
from proxy.turn.plan import ColdPrefill, DecodeLocalAppend, DecodeOnly, Push, TurnPlan
from proxy.turn.prefill_leg import PrefillLeg
from proxy.turn.push_leg import PushLeg
from proxy.turn.reasons import Reason
from proxy.turn.record import Prompt, Sink, Turn
from proxy.turn.releases import Releases
from proxy.turn.retaining import Retention
from proxy.turn.trace import TurnTrace, trace_headers
from proxy.workers.client import WorkerClient
from proxy.workers.pool import Pool, Role, Worker
from proxy.workers.verdicts import Verdicts

if TYPE_CHECKING:
    from proxy.tracing import Tracing


class Conductor:
    """Performs turns. One instance serves all requests of a process."""

    def __init__(
        self,
        *,
        settings: Settings,
        pool: Pool,
        client: WorkerClient,
        table: SessionTable,
        ledger: Ledger,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self.background = Background()
        verdicts = Verdicts(settings)
        self.releases = Releases(settings, pool, client, metrics, self.background, verdicts)
        self.retention = Retention(
            settings, pool, table, ledger, metrics, self.background, self.releases
        )
        self._parts = Parts(
            settings=settings,
            pool=pool,
            client=client,
            table=table,
            metrics=metrics,
            background=self.background,
            verdicts=verdicts,
            releases=self.releases,
            retention=self.retention,
            retries=RetryBudget(settings.retry_share),
            reuse_on=settings.reuse_enabled,
        )
        self._lookup = Lookup(self._parts)
        self._prefill = PrefillLeg(self._parts)
        self._decode = DecodeLeg(self._parts)
        self._push = PushLeg(self._parts, self._decode)
        self.recent = RecentTurns(settings.recent_turns)
        self.retention.on_given_up = self.recent.given_up
        self._books = Books(metrics, self.recent)
        self.admission = Admission(
            metrics,
            max_in_flight=settings.max_in_flight,
            max_queued=settings.max_queued,
            wait_seconds=settings.queue_timeout_seconds,
        )

    @property
    def reuse_on(self) -> bool:
        """May change at any time (``proxy/switch.py``)."""
        return self._parts.reuse_on

    @reuse_on.setter
    def reuse_on(self, on: bool) -> None:
        self._parts.reuse_on = on

    async def close(self) -> None:
        """Let releases that are under way finish, for a moment."""
        await self.background.close()

    @property
    def background_tasks(self) -> int:
        return len(self.background.tasks)

    def begin(self, turn: Turn, headers: Mapping[bytes, bytes]) -> None:
        """The request's headers (lower-case names) say which trace the turn belongs to."""
        if self._tracing is not None:
            turn.trace = self._tracing.turn(headers)
        elif given := trace_headers(headers):
            turn.trace = TurnTrace(given)

    async def perform(self, turn: Turn, sink: Sink) -> None:
        """Answer a turn through ``sink``. Raises ``KvloopError`` if nothing was sent."""
        async with self.admission.place():
            self._parts.retries.turn()
            try:
                await self._perform(turn, sink)
            finally:
                if turn.claimed is not None:
                    self._parts.releases.later(turn.model, turn.claimed)
                    turn.claimed = None
                self.retention.turn_over(turn)

    async def _perform(self, turn: Turn, sink: Sink) -> None:
        turn.stage = "tokenise"
        decision = await self._lookup.decide(turn)
        plan, prompt = decision.plan, decision.prompt
        decode, prefill = decision.decode, decision.prefill
        turn.adopt(plan)

        refused_workers: list[str] = []
        while True:
            turn.attempts += 1
            handle = await self._prefill.perform(turn, plan, prompt, prefill, decode)
            turn.stage = "decode"
            turn.decode_worker = decode.name
            turn.handed_over = handle is None
            append = isinstance(plan, DecodeLocalAppend)
            if isinstance(plan, DecodeLocalAppend):
                turn.decode_computes(decode, plan.tokens)
            try:
                with busy(decode):
                    if isinstance(plan, Push) and prefill is not None:
                        await self._push.perform(turn, plan, prompt, prefill, decode, sink)
                    else:
                        await self._decode.perform(
                            turn, decode, handle, prompt, sink, append=append
                        )
                self._learn(turn, decode, prompt)
                return
            except WorkerRefused:
                decode.answered()  # its verdict is about the request, and proves it alive
                raise
            except Repeatable as failure:
                handed = handle is not None or turn.route == Push.route
                self._decode_failed(turn, decode, failure.error, with_handle=handed)
                if turn.attempts >= 2 or turn.bound_to:
                    raise failure.error from failure
                if not self._parts.retries.spend():
                    self._parts.metrics.retries_refused.inc()
                    raise failure.error from failure
                cause = type(failure.error).__name__
                self._parts.metrics.cold_retries.labels("decode", cause).inc()
                log.event(
                    "cold_retry", request=turn.request_id, leg="decode", error=str(failure.error)
                )
                # A handle that decode may have read once is void: prefill makes a new one.
                refused_workers.append(decode.name)
                now = time.monotonic()
                pool = self._parts.pool
                again = pool.choose(Role.DECODE, avoid=refused_workers, now=now, model=turn.model)
                if again is None:
                    raise failure.error from failure
                decode = again
                turn.decode_work = None  # planned for another worker
                if not isinstance(plan, DecodeOnly):
                    prefill = pool.choose(Role.PREFILL, now=now, model=turn.model, beside=decode)
                    if prefill is not None and decode.transfers_allowed(now):
                        plan = _again_through(prefill)
                    else:
                        plan = DecodeOnly(Reason.TRANSFER_BLOCKED)
                    turn.adopt(plan)
            finally:
                turn.computed()

    def _learn(self, turn: Turn, worker: Worker, prompt: Prompt | None) -> None:
        """Decode has done its leg: what it cost, and what its prefix cache now holds."""
        if prompt is None:
            return
        worker.prefixes.sent(prompt.tokens.fingerprint)
        work = turn.decode_work
        if work is not None and turn.cost is not None and turn.route != DecodeOnly.route:
            self._parts.pool.observe(worker, work, turn.legs["decode"], time.monotonic())

    def _decode_failed(
        self, turn: Turn, worker: Worker, error: WorkerError, *, with_handle: bool
    ) -> None:
        if with_handle and not turn.handed_over:
            self._parts.metrics.stranded_prefills.labels("decode_failed").inc()
        self._parts.verdicts.call_failed(worker, error)
        if with_handle:
            self._parts.verdicts.read_failed(worker, error)

    def abandon(self, turn: Turn) -> None:
        """The client left. Called by the route after the turn was cancelled."""
        self._parts.metrics.client_disconnects.labels(turn.stage).inc()
        if turn.stage == "decode" and not turn.handed_over:
            # Decode may not have seen the request: then prefill waits for its lease.
            self._parts.metrics.stranded_prefills.labels("client_left").inc()

    def finished(self, turn: Turn, outcome: str) -> None:
        """Count and log a turn, once, however it ended."""
        self._books.close(turn, outcome)


def _again_through(prefill: Worker) -> TurnPlan:
    if prefill.transfer_mode == "push":
        return Push(Reason.DECODE_RETRIED, together=False)
    return ColdPrefill(Reason.DECODE_RETRIED)
