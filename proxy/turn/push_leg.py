"""[io] A turn between workers that push: prefill writes what it computed into decode's blocks.

Stock vLLM 0.32.0 with ``NixlPushConnector``, as read and measured (docs/routes.md):

* Decode registers its blocks with prefill's engine, and prefill writes into them when both have had
  requests of one id, in either order. vLLM makes the id from ``X-Request-Id`` and the route.
* Only that write ends decode's wait: ``push_registration_timeout`` writes a warning and no more. Of
  a request that is aborted while it waits decode keeps the blocks, until the write comes or its
  process ends.

Hence the rule of this file: once decode was sent its leg, prefill's is never cancelled, whoever
leaves or fails, and if it fails it is sent again with the same id to the same worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any
from uuid import uuid4

from proxy import log
from proxy.errors import WorkerError, WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.turn import wire
from proxy.turn.decode_leg import DecodeLeg, Pair, Repeatable
from proxy.turn.parts import Parts, busy
from proxy.turn.plan import Push
from proxy.turn.reasons import Reason
from proxy.turn.record import Prompt, Sink, Turn
from proxy.workers.client import refused_connection
from proxy.workers.pairs import why_no_handover
from proxy.workers.pool import Role, Worker

_Writes = asyncio.Task[dict[str, Any]]
_Answer = asyncio.Task[None]


class _Why(Enum):
    """Why prefill writes nothing for a turn. The values are those of the metric."""

    FAILED = "prefill_failed"
    REFUSED = "prefill_refused"
    RESTARTED = "prefill_restarted"
    USELESS = "useless"
    """It answered, and what it answered leads nowhere."""


class _PrefillLost(Exception):
    """Prefill writes nothing, and no content has reached the client."""

    def __init__(self, why: _Why) -> None:
        super().__init__(why.value)
        self.why = why


class PushLeg:
    """Performs both legs of push turns."""

    def __init__(self, parts: Parts, decode_leg: DecodeLeg) -> None:
        self._parts = parts
        self._decode = decode_leg

    async def perform(
        self,
        turn: Turn,
        plan: Push,
        prompt: Prompt | None,
        prefill: Worker,
        decode: Worker,
        sink: Sink,
    ) -> None:
        """Answer through ``sink``; raises what ``DecodeLeg`` raises.

        Prefill's failures are not raised: the turn is tried once more with a prefill worker, one
        leg after the other, and then decode does it alone.
        """
        together = plan.together and bool(
            prefill.push_place
        )  # a probe may just have seen a restart
        for last in (False, True):
            try:
                if together:
                    await self._together(turn, prompt, prefill, decode, sink)
                else:
                    await self._in_turn(turn, prompt, prefill, decode, sink)
                return
            except _PrefillLost as lost:
                again = None if last else self._again(turn, lost.why, prefill, decode)
            if again is None:
                break
            prefill, together = again, False
            turn.adopt(Push(Reason.PUSH_IN_TURN, together))
        if turn.route == Push.route:
            turn.fall_to_decode(Reason.PREFILL_FAILED)
        turn.stage = "decode"
        await self._decode.perform(turn, decode, None, prompt, sink)

    def _again(self, turn: Turn, why: _Why, prefill: Worker, decode: Worker) -> Worker | None:
        """A prefill worker for the second attempt; None when it would bring nothing."""
        parts = self._parts
        if why in (_Why.USELESS, _Why.REFUSED):
            return None
        again: Worker | None = prefill
        if why is _Why.FAILED:
            again = parts.pool.choose(
                Role.PREFILL,
                avoid=[prefill.name],
                now=time.monotonic(),
                model=turn.model,
                beside=decode,
            )
            if again is None or again is prefill or again.transfer_mode != "push":
                return None
        return again if self._may_repeat() else None

    def _may_repeat(self) -> bool:
        if self._parts.retries.spend():
            return True
        self._parts.metrics.retries_refused.inc()
        return False

    async def _in_turn(
        self, turn: Turn, prompt: Prompt | None, prefill: Worker, decode: Worker, sink: Sink
    ) -> None:
        """Prefill's leg, then decode's with its answer. Raises ``_PrefillLost`` before decode's."""
        pair = self._pair(turn, decode, wait=0)
        turn.stage = "prefill"
        try:
            answer = await self._prefill_call(turn, prompt, prefill, pair)
        except WorkerRefused:
            raise _PrefillLost(_Why.REFUSED) from None
        except WorkerError:
            raise _PrefillLost(_Why.FAILED) from None
        handle = self._taken(turn, prompt, prefill, answer)
        if handle is None:
            turn.fall_to_decode(Reason.PREFILL_KEPT_NOTHING)
            raise _PrefillLost(_Why.USELESS)
        if why := why_no_handover(prefill, decode):
            # It was restarted with another connector, and only its handle says so.
            log.event("pair_mismatch", prefill=prefill.name, decode=decode.name, why=why)
            turn.fall_to_decode(Reason.PAIR_MISMATCH)
            raise _PrefillLost(_Why.USELESS)
        turn.stage, turn.handed_over = "decode", False
        await self._decode.perform(turn, decode, handle, prompt, sink, pair=pair)
        self._paired(prefill, decode)

    async def _together(
        self, turn: Turn, prompt: Prompt | None, prefill: Worker, decode: Worker, sink: Sink
    ) -> None:
        """Both legs at once. Raises ``_PrefillLost`` if decode waits in vain."""
        pair = self._pair(turn, decode, wait=self._parts.settings.cold_prefill_timeout_seconds)
        turn.stage = "decode"
        place = prefill.push_place
        handle = wire.push_handle(place, pair.request_id)
        writes = asyncio.ensure_future(self._write(turn, prompt, prefill, pair))
        answer = asyncio.ensure_future(
            self._decode.perform(turn, decode, handle, prompt, sink, pair=pair)
        )
        try:
            await asyncio.wait({writes, answer}, return_when=asyncio.FIRST_COMPLETED)
            lost = None
            if not answer.done():
                lost = self._why_lost(turn, prompt, prefill, place, writes)
                # Its first content may be out all the same: it had the prompt in its own cache.
                if lost is not None and turn.ttft is None:
                    answer.cancel()
                await asyncio.wait({answer})
            if lost is not None and answer.cancelled():
                raise _PrefillLost(lost)
            answer.result()
        finally:
            answer.cancel()  # unless it is over: the client has left
            rest = self._see_through(turn, prompt, prefill, decode, place, writes, answer)
            self._parts.background.start(rest, "push")
        self._paired(prefill, decode)

    async def _see_through(
        self,
        turn: Turn,
        prompt: Prompt | None,
        prefill: Worker,
        decode: Worker,
        place: Mapping[str, Any],
        writes: _Writes,
        answer: _Answer,
    ) -> None:
        """Decode's leg is over, as far as its client is concerned: see that nothing of it stays."""
        await asyncio.wait({answer})  # cancelled, it may take a moment
        try:
            if _refused(answer):
                writes.cancel()  # decode never took the request up: nobody waits
            await asyncio.wait({writes})
        except asyncio.CancelledError:
            writes.cancel()
            raise
        if writes.cancelled():
            return
        lost = self._why_lost(turn, prompt, prefill, place, writes)
        if lost is not None and _left_waiting(answer):
            log.event(
                "push_unpaired",
                request=turn.request_id,
                prefill=prefill.name,
                decode=decode.name,
                cause=lost.value,
            )
            self._parts.metrics.push_unpaired.labels(lost.value).inc()
            self._parts.verdicts.left_waiting(prefill)

    def _why_lost(
        self,
        turn: Turn,
        prompt: Prompt | None,
        prefill: Worker,
        place: Mapping[str, Any],
        writes: _Writes,
    ) -> _Why | None:
        """Why nothing was written for decode's leg; None when prefill has written, or will."""
        error = writes.exception()
        if isinstance(error, WorkerRefused):
            return _Why.REFUSED
        if isinstance(error, WorkerError):
            return _Why.FAILED
        handle = self._taken(turn, prompt, prefill, writes.result())
        if handle is None:
            return _Why.FAILED
        same = handle["remote_engine_id"] == place["remote_engine_id"]
        return None if same else _Why.RESTARTED

    async def _write(
        self, turn: Turn, prompt: Prompt | None, worker: Worker, pair: Pair
    ) -> dict[str, Any]:
        """Prefill's leg, twice if need be: decode waits for this worker and this id."""
        try:
            return await self._prefill_call(turn, prompt, worker, pair)
        except (WorkerFailed, WorkerUnreachable) as error:
            if refused_connection(error) or not self._may_repeat():
                raise
        return await self._prefill_call(turn, prompt, worker, pair)

    async def _prefill_call(
        self, turn: Turn, prompt: Prompt | None, worker: Worker, pair: Pair
    ) -> dict[str, Any]:
        """One call, on decode's route. Raises ``WorkerError``, after what it says of the worker."""
        turn.prefill_worker = worker.name
        dialect, ids = turn.dialect, prompt.json if prompt is not None else None
        if ids is not None and dialect.path == wire.COMPLETIONS_PATH:
            body = wire.prefill_body(turn.body, ids, wire.transfer_for_prefill(None))
        else:
            transfer = wire.transfer_for_push(turn.body, ids)
            body = dialect.prefill_body(turn.body, transfer, pair.shared)
        try:
            with (
                busy(worker, turn.prompt_tokens),
                turn.leg("prefill"),
                turn.trace.span("prefill"),
            ):
                return await self._parts.client.call(
                    worker,
                    dialect.path,
                    body,
                    timeout=self._parts.settings.cold_prefill_timeout_seconds,
                    headers={"X-Request-Id": pair.request_id, **turn.trace.headers()},
                    repeatable=True,
                )
        except WorkerRefused:
            worker.answered()
            raise
        except (WorkerFailed, WorkerUnreachable) as error:
            self._parts.prefill_failed(turn.request_id, worker, error)
            worker.push_place = {}  # most likely it restarts; its next answer says
            raise

    def _taken(
        self, turn: Turn, prompt: Prompt | None, worker: Worker, answer: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What prefill's answer says of it and of the turn; its handle, if decode can use it."""
        worker.answered()
        handle = wire.usable_prefill_handle(answer.get("kv_transfer_params"))
        if handle is None:
            return None
        worker.transfer_mode = str(handle.get("transfer_mode") or worker.transfer_mode)
        worker.push_place = wire.push_place(handle) if worker.transfer_mode == "push" else {}
        if prompt is not None:
            worker.prefixes.sent(prompt.tokens.fingerprint)
        if turn.route == Push.route:
            # Nothing but its own cache can have saved it work.
            turn.reused_tokens, _, _ = wire.reported_reuse(handle)
            turn.pulled_tokens, turn.prefill_cached_tokens = 0, turn.reused_tokens
        return handle

    def _pair(self, turn: Turn, decode: Worker, *, wait: float) -> Pair:
        """What both legs have alike. The client's own id will not do: used twice at a time, prefill
        would write one turn's KV into the other's blocks."""
        return Pair(
            f"{turn.request_id}-{turn.attempts}-{uuid4().hex}",
            turn.dialect.shared_fields(turn.caller, decode.name),
            wait,
        )

    @staticmethod
    def _paired(prefill: Worker, decode: Worker) -> None:
        """Blocks have come over: so decode pushes too, whether or not it says so."""
        prefill.pull_succeeded()
        decode.transfer_mode = prefill.transfer_mode


def _refused(answer: _Answer) -> bool:
    return not answer.cancelled() and isinstance(answer.exception(), WorkerRefused)


def _left_waiting(answer: _Answer) -> bool:
    """May decode's request have been aborted while it waited for blocks?"""
    if answer.cancelled():
        return True
    error = answer.exception()
    if not isinstance(error, Repeatable):
        return False
    return isinstance(error.error, WorkerUnreachable) and error.error.timed_out
