"""[io] Performs a turn: tokenise, find and claim, plan, prefill, decode, relay, commit.

The decisions are in ``planner`` (what to do) and ``wire`` (what to say); here is only the order of
calls and what happens when one fails. The rules that this file must keep:

* a claimed holding is pulled once or released, whatever happens;
* before the first content byte a failure is repeated cold, unseen by the client; after it, never;
* what decode kept is in the table before the client can know that the turn is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from proxy import log
from proxy.canary import Canary
from proxy.errors import (
    NoWorker,
    TableUnavailable,
    WorkerError,
    WorkerFailed,
    WorkerRefused,
    WorkerUnreachable,
)
from proxy.metrics import Metrics
from proxy.relay.sse import (
    TURN_EVENT_PREFIX,
    EventSplitter,
    carries_content,
    event_data,
    split_events,
    stream_error,
    take_turn_event,
)
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import Holding, Match, best_match, held_tokens, usable_handle
from proxy.session.identity import Identity
from proxy.session.table import SessionTable, new_holding_id
from proxy.settings import Settings
from proxy.turn import tokenise, wire
from proxy.turn.admission import Admission, RetryBudget
from proxy.turn.plan import ColdPrefill, DecodeOnly, PrefillWithPull, TurnPlan
from proxy.turn.planner import (
    Limits,
    has_media,
    may_split,
    plan_turn,
    unusable_now,
    wants_claim,
)
from proxy.turn.reasons import Reason
from proxy.workers.client import WorkerClient
from proxy.workers.pool import Pool, Role, Worker

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
_RELEASE_TIMEOUT = 30.0
_ABORT_SETTLES = 1.0
"""Seconds between closing a prefill leg's connection and releasing its handle: vLLM must have
aborted the request, or it could still be reading the blocks that decode frees."""
_LAST_WORDS_SECONDS = 0.05
"""How long a plain answer may still arrive after its client left: decode may have finished and
pinned blocks in that very moment, and only the answer says which."""
_DONE_END = b"data: [DONE]\n\n"


class Sink(Protocol):
    """Where an answer goes. ``begin`` once, then ``write`` as often as needed."""

    async def begin(self, content_type: str, headers: dict[str, str]) -> None: ...

    async def write(self, data: bytes, *, last: bool = False) -> None: ...


@dataclass(slots=True)
class Turn:
    """One request on its way. Set by the route: the first block; by the conductor: the rest."""

    body: dict[str, Any]
    identity: Identity
    request_id: str
    started: float

    route: str = ""
    reason: Reason = Reason.NEW_SESSION
    stage: str = "queue"
    prompt_tokens: int = 0
    reused_tokens: int = 0
    pulled_tokens: int | None = None
    prefill_cached_tokens: int | None = None
    planned_pull: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    ttft: float | None = None
    kept: str = ""
    claimed: Holding | None = None
    """A holding taken out of the table that prefill has neither pulled nor released yet."""
    handed_over: bool = True
    """False between prefill's answer and decode's first sign of life."""
    legs: dict[str, float] = field(default_factory=dict)

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

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


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A tokenised prompt: hashed for comparison, and as JSON for both legs."""

    tokens: PromptTokens
    json: bytes


class _Repeatable(Exception):
    """Decode failed before any content reached the client."""

    def __init__(self, error: WorkerError) -> None:
        super().__init__(str(error))
        self.error = error


class Conductor:
    """Performs turns. One instance serves all requests of a process."""

    def __init__(
        self,
        *,
        settings: Settings,
        pool: Pool,
        client: WorkerClient,
        table: SessionTable,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._client = client
        self._table = table
        self._metrics = metrics
        self._limits = Limits(pull_threshold=settings.pull_threshold)
        self._background: set[asyncio.Task[None]] = set()
        self._canary = Canary(settings.canary_fraction, client, metrics)
        self.reuse_on = settings.reuse_enabled
        """May change at any time (``proxy/switch.py``)."""
        self._retries = RetryBudget(settings.retry_share)
        self.admission = Admission(
            metrics,
            max_in_flight=settings.max_in_flight,
            max_queued=settings.max_queued,
            wait_seconds=settings.queue_timeout_seconds,
        )

    async def close(self) -> None:
        """Let releases that are under way finish, for a moment."""
        if self._background:
            await asyncio.wait(self._background, timeout=5)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    @property
    def background_tasks(self) -> int:
        return len(self._background)

    async def perform(self, turn: Turn, sink: Sink) -> None:
        """Answer a turn through ``sink``. Raises ``KvloopError`` if nothing was sent."""
        async with self.admission.place():
            self._retries.turn()
            try:
                await self._perform(turn, sink)
            finally:
                if turn.claimed is not None:
                    self._release_later(turn, turn.claimed)
                    turn.claimed = None

    async def _perform(self, turn: Turn, sink: Sink) -> None:
        turn.stage = "tokenise"
        now = time.monotonic()
        decode = self._pool.choose(Role.DECODE, now=now)
        if decode is None:
            raise NoWorker("No decode worker is healthy.")
        prefill = self._pool.choose(Role.PREFILL, now=now)
        plan: TurnPlan
        prompt: _Prompt | None = None
        if reason := may_split(turn.body):
            plan = DecodeOnly(reason)
        elif prefill is None:
            plan = DecodeOnly(Reason.NO_PREFILL_WORKER)
        elif not decode.transfers_allowed(now):
            plan = DecodeOnly(Reason.TRANSFER_BLOCKED)
        else:
            prompt, miss = await self._tokenise(turn, (prefill, decode))
            turn.prompt_tokens = len(prompt.tokens) if prompt else 0
            turn.stage = "claim"
            plan = await self._plan(turn, prompt, miss, prefill)
        self._adopt(turn, plan)

        refused_workers: list[str] = []
        while True:
            turn.attempts += 1
            handle = await self._prefill(turn, plan, prompt, prefill)
            turn.stage = "decode"
            turn.decode_worker = decode.name
            turn.handed_over = handle is None
            try:
                with _busy(decode):
                    await self._decode(turn, decode, handle, prompt, sink)
                return
            except WorkerRefused:
                decode.answered()  # its verdict is about the request, and proves it alive
                raise
            except _Repeatable as failure:
                self._decode_failed(turn, decode, failure.error, with_handle=handle is not None)
                if turn.attempts >= 2:
                    raise failure.error from failure
                if not self._retries.spend():
                    self._metrics.retries_refused.inc()
                    raise failure.error from failure
                cause = type(failure.error).__name__
                self._metrics.cold_retries.labels("decode", cause).inc()
                log.event(
                    "cold_retry", request=turn.request_id, leg="decode", error=str(failure.error)
                )
                # A handle that decode may have read once is void: prefill makes a new one.
                refused_workers.append(decode.name)
                now = time.monotonic()
                again = self._pool.choose(Role.DECODE, avoid=refused_workers, now=now)
                if again is None:
                    raise failure.error from failure
                decode = again
                if not isinstance(plan, DecodeOnly):
                    if decode.transfers_allowed(now):
                        plan = ColdPrefill(Reason.DECODE_RETRIED)
                    else:
                        plan = DecodeOnly(Reason.TRANSFER_BLOCKED)
                    self._adopt(turn, plan)

    def _decode_failed(
        self, turn: Turn, worker: Worker, error: WorkerError, *, with_handle: bool
    ) -> None:
        settings, now = self._settings, time.monotonic()
        if with_handle and not turn.handed_over:
            self._metrics.stranded_prefills.labels("decode_failed").inc()
        self._failed(worker, error)
        if with_handle and isinstance(error, WorkerFailed) and error.status != 503:
            worker.transfer_failed(
                now, limit=settings.pull_failures, pause=settings.pull_pause_seconds
            )

    def _failed(self, worker: Worker, error: WorkerError) -> None:
        """Count a failed call towards the worker's breaker. A full queue (503) is not a fault."""
        if isinstance(error, WorkerFailed) and error.status == 503:
            return
        if worker.turn_failed(
            time.monotonic(),
            limit=self._settings.breaker_failures,
            pause=self._settings.breaker_pause_seconds,
        ):
            log.event("breaker_open", worker=worker.name, error=str(error))

    # Tokenise and plan.

    async def _tokenise(
        self, turn: Turn, workers: tuple[Worker, ...]
    ) -> tuple[_Prompt | None, Reason]:
        """Token ids of the prompt, or None and why they are not known."""
        body = turn.body
        if has_media(body.get("messages")):
            return None, Reason.MEDIA
        ids: list[int] | None = None
        with self._leg(turn, "tokenise"):
            for worker in workers:
                try:
                    ids = await self._rendered(worker, body)
                    break
                except (WorkerFailed, WorkerUnreachable) as error:
                    self._failed(worker, error)
                    log.event("tokenise_failed", request=turn.request_id, error=str(error))
        if ids is None:
            return None, Reason.NOT_TOKENISED
        tokens = PromptTokens(turn.identity.namespace, ids)
        return _Prompt(tokens, orjson.dumps(ids)), Reason.NEW_SESSION

    async def _rendered(self, worker: Worker, body: dict[str, Any]) -> list[int] | None:
        timeout = self._settings.tokenise_timeout_seconds
        if worker.render is not False:
            try:
                answer = await self._client.call(
                    worker,
                    tokenise.RENDER_PATH,
                    orjson.dumps(tokenise.render_request(body)),
                    timeout=timeout,
                    repeatable=True,
                )
                worker.render = True
                return tokenise.token_ids(answer)
            except WorkerRefused as refusal:
                if not tokenise.render_is_off(refusal.status, _object(refusal.body)):
                    raise
                worker.render = False
                log.event("render_unavailable", worker=worker.name)
        request = tokenise.tokenize_request(body)
        if request is None:
            return None
        answer = await self._client.call(
            worker,
            tokenise.TOKENIZE_PATH,
            orjson.dumps(request),
            timeout=timeout,
            repeatable=True,
        )
        return tokenise.token_ids(answer)

    async def _plan(
        self, turn: Turn, prompt: _Prompt | None, miss: Reason, prefill: Worker
    ) -> TurnPlan:
        if not self.reuse_on:
            return ColdPrefill(Reason.REUSE_DISABLED)
        match: Match | None = None
        if prompt is not None:
            try:
                match, miss = await self._claim(turn, prompt.tokens, prefill)
            except TableUnavailable:
                miss = Reason.TABLE_UNAVAILABLE
        holding = match.holding if match else None
        if holding is not None and holding.handle is not None:
            turn.claimed = holding
        plan = plan_turn(
            match=match,
            holder=self._pool.holder(
                holding.worker if holding else "", holding.engine_id if holding else ""
            ),
            miss=miss,
            limits=self._limits,
            pull_allowed=prefill.pulls_allowed(time.monotonic()),
        )
        if turn.claimed is not None and not _spends(plan):
            # Most likely its process is gone, and prefill learns that in milliseconds. But a turn
            # that ended before the restart was noticed carries the old epoch and a live pin.
            self._release_later(turn, turn.claimed)
            turn.claimed = None
        return plan

    async def _claim(
        self, turn: Turn, prompt: PromptTokens, prefill: Worker
    ) -> tuple[Match | None, Reason]:
        identity = turn.identity
        with self._table_operation("find"):
            candidates = await self._table.find(identity, prompt)
        if not self._settings.verify_tokens:
            match = _unverified(prompt, candidates)
        else:
            match = best_match(prompt, candidates)
        if match is None or not wants_claim(match, named=bool(identity.conversation)):
            return None, Reason.NEW_SESSION
        holder = self._pool.holder(match.holding.worker, match.holding.engine_id)
        allowed = prefill.pulls_allowed(time.monotonic())
        if obstacle := unusable_now(match.holding, holder, pull_allowed=allowed):
            return None, obstacle
        claiming = asyncio.ensure_future(self._table.claim(identity, match.holding))
        try:
            with self._table_operation("claim"):
                won = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # The client left while Redis was deciding: if the holding is ours, it is given back.
            self._in_background(self._release_if_won(turn, claiming, match.holding), "unclaim")
            raise
        if not won:
            self._metrics.claims_lost.inc()
            return None, Reason.CLAIM_LOST
        return match, Reason.NEW_SESSION

    def _adopt(self, turn: Turn, plan: TurnPlan) -> None:
        turn.route = plan.route
        turn.reason = plan.reason
        if isinstance(plan, PrefillWithPull):
            turn.planned_pull = plan.tokens

    # Prefill leg.

    async def _prefill(
        self, turn: Turn, plan: TurnPlan, prompt: _Prompt | None, worker: Worker | None
    ) -> dict[str, Any] | None:
        """Prefill's handle for decode, or None when decode must compute the prompt itself."""
        if isinstance(plan, DecodeOnly) or worker is None:
            return None
        turn.stage = "prefill"
        pull = plan if isinstance(plan, PrefillWithPull) else None
        release = plan.release if isinstance(plan, ColdPrefill) else None
        tried: list[str] = []
        while True:
            warm = pull is not None or release is not None
            turn.prefill_worker = worker.name
            try:
                with _busy(worker), self._leg(turn, "prefill"):
                    if warm:
                        answer = await self._warm_call(turn, worker, prompt, pull, release)
                    else:
                        answer = await self._prefill_call(turn, worker, prompt, None, None)
            except WorkerRefused:
                worker.answered()
                if prompt is None:
                    raise  # prefill saw the client's own request: its verdict stands
                # Prefill will not take ids that it produced itself (context limit, say). Decode
                # sees the client's request and answers with its own words.
                self._fall_to_decode(turn, Reason.PREFILL_FAILED)
                return None
            except (WorkerFailed, WorkerUnreachable) as error:
                log.event(
                    "prefill_failed",
                    request=turn.request_id,
                    worker=worker.name,
                    warm=warm,
                    error=str(error),
                )
                self._metrics.cold_retries.labels(
                    "warm_prefill" if warm else "prefill", type(error).__name__
                ).inc()
                self._failed(worker, error)
                if warm:
                    worker.pull_failed(
                        time.monotonic(),
                        limit=self._settings.pull_failures,
                        pause=self._settings.pull_pause_seconds,
                    )
                    if pull is not None:
                        turn.route, turn.reason = ColdPrefill.route, Reason.PULL_FAILED
                    pull = release = None
                    if turn.claimed is not None:
                        # A failed read frees nothing on decode.
                        answered = isinstance(error, WorkerFailed)
                        self._release_later(
                            turn,
                            turn.claimed,
                            avoid=worker.name,
                            pause=0 if answered else _ABORT_SETTLES,
                        )
                        turn.claimed = None
                else:
                    tried.append(worker.name)
                    if len(tried) >= 2:
                        self._fall_to_decode(turn, Reason.PREFILL_FAILED)
                        return None
                    if not self._retries.spend():
                        self._metrics.retries_refused.inc()
                        self._fall_to_decode(turn, Reason.PREFILL_FAILED)
                        return None
                again = self._pool.choose(Role.PREFILL, avoid=tried, now=time.monotonic())
                if again is None or again.name in tried:
                    self._fall_to_decode(turn, Reason.PREFILL_FAILED)
                    return None
                worker = again
                continue
            break
        if warm:
            turn.claimed = None
            worker.pull_succeeded()
            if release is not None:
                self._metrics.releases.labels("with_prefill").inc()
        worker.answered()
        handle = wire.usable_prefill_handle(answer.get("kv_transfer_params"))
        if handle is None:
            self._fall_to_decode(turn, Reason.PREFILL_KEPT_NOTHING)
            return None
        total, pulled, local = wire.reported_reuse(handle)
        turn.reused_tokens, turn.pulled_tokens, turn.prefill_cached_tokens = total, pulled, local
        return handle

    async def _warm_call(
        self,
        turn: Turn,
        worker: Worker,
        prompt: _Prompt | None,
        pull: PrefillWithPull | None,
        release: Holding | None,
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
            self._in_background(
                self._abandoned_prefill(turn, worker, call, holding), "abandoned prefill"
            )
            raise

    async def _abandoned_prefill(
        self,
        turn: Turn,
        worker: Worker,
        call: asyncio.Future[dict[str, Any]],
        holding: Holding | None,
    ) -> None:
        try:
            with _busy(worker):
                async with asyncio.timeout(self._settings.abandoned_prefill_seconds):
                    await call
            self._metrics.stranded_prefills.labels("client_left").inc()
        except (WorkerError, TimeoutError):
            if holding is not None:
                await self._release(str(turn.body["model"]), holding, pause=_ABORT_SETTLES)

    async def _prefill_call(
        self,
        turn: Turn,
        worker: Worker,
        prompt: _Prompt | None,
        pull: PrefillWithPull | None,
        release: Holding | None,
    ) -> dict[str, Any]:
        transfer = wire.transfer_for_prefill(pull, release)
        settings = self._settings
        warm = pull is not None or release is not None
        watched = pull is not None and self._canary.chosen()
        if prompt is not None:
            path, body = (
                COMPLETIONS_PATH,
                wire.prefill_body(turn.body, prompt.json, transfer, ask_ids=watched),
            )
        else:
            path, body = CHAT_PATH, wire.prefill_chat_body(turn.body, transfer)
        answer = await self._client.call(
            worker,
            path,
            body,
            # A cold prefill rides along with a release: it needs a cold prefill's time.
            timeout=settings.warm_prefill_timeout_seconds
            if pull is not None
            else settings.cold_prefill_timeout_seconds,
            headers={"X-Request-Id": f"{turn.request_id}-p{turn.attempts}"},
            repeatable=not warm,  # a warm prefill may have been read: its handle is spent
        )
        if watched and prompt is not None and (first := wire.first_token(answer)) is not None:
            cold = wire.cold_replay_body(turn.body, prompt.json)
            self._in_background(
                self._canary.compare(worker, cold, first, turn.request_id), "canary"
            )
        return answer

    def _fall_to_decode(self, turn: Turn, reason: Reason) -> None:
        turn.route, turn.reason = DecodeOnly.route, reason
        turn.reused_tokens, turn.pulled_tokens, turn.prefill_cached_tokens = 0, None, None

    # Decode leg.

    async def _decode(
        self,
        turn: Turn,
        worker: Worker,
        handle: dict[str, Any] | None,
        prompt: _Prompt | None,
        sink: Sink,
    ) -> None:
        keep = handle is not None and prompt is not None and self.reuse_on
        body = wire.decode_body(
            turn.body,
            handle,
            ids_json=prompt.json if prompt else None,
            keep=keep,
            ask_ids=worker.plugin is not True,
        )
        kept_prompt = prompt.tokens if prompt and keep else None
        headers = {"X-Request-Id": f"{turn.request_id}-d{turn.attempts}"}
        if turn.streamed:
            await self._decode_stream(turn, worker, body, headers, kept_prompt, sink)
        else:
            await self._decode_whole(turn, worker, body, headers, kept_prompt, sink)

    async def _decode_whole(
        self,
        turn: Turn,
        worker: Worker,
        body: bytes,
        headers: dict[str, str],
        prompt: PromptTokens | None,
        sink: Sink,
    ) -> None:
        call = asyncio.ensure_future(
            self._client.call(
                worker,
                CHAT_PATH,
                body,
                timeout=self._settings.first_byte_timeout_seconds,
                headers=headers,
            )
        )
        try:
            with self._leg(turn, "decode"):
                answer = await asyncio.shield(call)
        except (WorkerFailed, WorkerUnreachable) as error:
            raise _Repeatable(error) from error
        except asyncio.CancelledError:
            self._in_background(self._last_words(turn, worker, call), "last words")
            raise
        worker.answered()
        self._handed_over(turn, worker)
        await self._carry_through(
            self._keep(turn, worker, prompt, wire.ending_of_answer(turn.body, answer)), "keep"
        )
        clean = wire.client_answer(answer, client_asked_ids=bool(turn.body.get("return_token_ids")))
        self._first_content(turn)
        await sink.begin("application/json", turn.headers())
        await sink.write(orjson.dumps(clean), last=True)

    async def _last_words(
        self, turn: Turn, worker: Worker, call: asyncio.Future[dict[str, Any]]
    ) -> None:
        """Abort decode's call, unless its answer is there: then give back what it kept."""
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                answer = await call
        except (WorkerError, TimeoutError):
            return
        await self._unkeep(turn, worker, wire.ending_of_answer(turn.body, answer))

    async def _unkeep(self, turn: Turn, worker: Worker, ending: wire.Ending) -> None:
        """Release what decode kept for a client that has left: its turn is not in the table."""
        handle = usable_handle(ending.handle)
        if handle is not None:
            await self._release(str(turn.body["model"]), self._holding(worker, None, handle))

    async def _decode_stream(
        self,
        turn: Turn,
        worker: Worker,
        body: bytes,
        headers: dict[str, str],
        prompt: PromptTokens | None,
        sink: Sink,
    ) -> None:
        settings = self._settings
        splitter = EventSplitter()
        held: list[bytes] = []
        begun = kept = False
        sent = time.monotonic()
        try:
            async with self._client.stream(
                worker,
                CHAT_PATH,
                body,
                first_byte_timeout=settings.first_byte_timeout_seconds,
                headers=headers,
            ) as response:
                timeout = settings.first_byte_timeout_seconds
                try:
                    while True:
                        data = await self._client.read_some(worker, response, timeout=timeout)
                        block = splitter.feed(data) if data else splitter.flush()
                        if block:
                            if not begun:
                                self._handed_over(turn, worker)
                                held.append(block)
                                if not self._committed(worker, block):
                                    continue
                                block = b"".join(held)
                                turn.legs["decode"] = time.monotonic() - sent
                                self._first_content(turn)
                                await sink.begin(
                                    response.content_type or "text/event-stream",
                                    turn.headers(),
                                )
                                begun = True
                                timeout = settings.chunk_timeout_seconds
                            if not kept and (
                                TURN_EVENT_PREFIX in block or block.endswith(_DONE_END)
                            ):
                                block, event = take_turn_event(block)
                                kept = True
                                await self._carry_through(
                                    self._keep(turn, worker, prompt, wire.ending_of_event(event)),
                                    "keep",
                                )
                            if block.startswith(b'data: {"error"'):
                                self._metrics.stream_errors.inc()
                                turn.kept = "stream_error"
                                log.event(
                                    "stream_error", request=turn.request_id, worker=worker.name
                                )
                            if block:
                                await sink.write(block)
                        if not data:
                            break
                except asyncio.CancelledError:
                    if not kept and (rest := self._client.arrived(response)):
                        _, event = take_turn_event(splitter.feed(rest))
                        ending = wire.ending_of_event(event)
                        self._in_background(self._unkeep(turn, worker, ending), "unkeep")
                    raise
                if not begun:
                    raise WorkerFailed(worker.name, 200, "ended its stream without content")
                worker.answered()
        except (WorkerFailed, WorkerUnreachable) as error:
            if not begun:
                raise _Repeatable(error) from error
            self._metrics.stream_errors.inc()
            log.event("stream_broken", request=turn.request_id, error=str(error))
            turn.kept = "stream_error"
            # Status 200 is out: say it in the stream, as vLLM itself does.
            await sink.write(
                b'data: {"error":{"message":"The model worker stopped answering.",'
                b'"type":"api_error","param":null,"code":"worker_failed"}}\n\n' + _DONE_END
            )
        await sink.write(b"", last=True)

    def _committed(self, worker: Worker, block: bytes) -> bool:
        """Has the answer begun in earnest? Raises what an error event says."""
        for event in split_events(block):
            data = event_data(event)
            if data is None:
                continue
            if error := stream_error(data):
                code = error.get("code")
                if type(code) is int and 400 <= code < 500:
                    raise WorkerRefused(worker.name, code, data, "application/json")
                raise WorkerFailed(worker.name, 0, "reported an error in its stream")
            if carries_content(data):
                return True
        return False

    # What decode kept.

    async def _keep(
        self, turn: Turn, worker: Worker, prompt: PromptTokens | None, ending: wire.Ending
    ) -> None:
        """Store decode's handle, or note why there is none, or release what cannot be stored."""
        handle = usable_handle(ending.handle)
        if prompt is None:
            if handle is not None:
                self._release_later(turn, self._holding(worker, None, handle))
                turn.kept = "released"
            self._metrics.commits.labels("not_kept").inc()
            return
        worker.plugin = ending.from_plugin
        fingerprint = None
        absent: Reason | None = None
        if handle is None:
            if ending.pin_refused:
                absent = Reason.PIN_REFUSED
            elif turn.streamed and not ending.from_plugin:
                absent = Reason.STREAM_WITHOUT_HANDLE
            else:
                absent = Reason.DECODE_KEPT_NOTHING
        else:
            fingerprint = held_tokens(
                prompt,
                ending.output_ids,
                handle["remote_num_tokens"],
                ids_complete=ending.from_plugin,
            )
            if fingerprint is None:
                absent = Reason.TOKENS_UNKNOWN
        if absent is not None:
            if handle is not None:
                self._release_later(turn, self._holding(worker, None, handle))
            tombstone = Holding(
                new_holding_id(), worker.name, worker.epoch, prompt.fingerprint, None, absent
            )
            turn.kept = absent
            await self._store(turn, tombstone)
            return
        assert handle is not None
        worker.handle_seen(str(handle["remote_engine_id"]))
        holding = self._holding(worker, fingerprint, handle)
        stored = await self._store(turn, holding)
        if stored is None:
            # The record may appear in the table yet: whoever claims it must find the blocks there.
            turn.kept = "unknown"
            return
        turn.kept = "stored" if stored else "released"
        if not stored:
            self._release_later(turn, holding)

    def _holding(self, worker: Worker, fingerprint: Any, handle: dict[str, Any]) -> Holding:
        return Holding(new_holding_id(), worker.name, worker.epoch, fingerprint, handle)

    async def _store(self, turn: Turn, holding: Holding) -> bool | None:
        """Was it stored? None when nobody can tell."""
        settings = self._settings
        ttl = settings.session_ttl_seconds
        granted = holding.handle.get("kvloop_lease_seconds") if holding.handle else None
        if isinstance(granted, (int, float)) and granted > 0:
            ttl = min(ttl, granted - settings.expiry_margin_seconds)
        stored: bool | None = False
        if ttl > 0:
            try:
                with self._table_operation("commit"):
                    stored = await self._table.commit(turn.identity, holding, ttl_seconds=ttl)
            except TableUnavailable as error:
                log.event("commit_failed", request=turn.request_id, error=str(error))
                stored = False if error.certain else None
        if holding.handle is not None:
            self._metrics.commits.labels("stored" if stored else "not_stored").inc()
        else:
            self._metrics.commits.labels(str(holding.absent)).inc()
        return stored

    async def _release_if_won(
        self, turn: Turn, claiming: asyncio.Future[bool], holding: Holding
    ) -> None:
        try:
            won = await claiming
        except TableUnavailable:
            return
        if won and holding.handle is not None:
            await self._release(str(turn.body["model"]), holding)

    def _release_later(
        self, turn: Turn, holding: Holding, *, avoid: str = "", pause: float = 0
    ) -> None:
        work = self._release(str(turn.body["model"]), holding, avoid=avoid, pause=pause)
        self._in_background(work, "release")

    async def _release(
        self, model: str, holding: Holding, *, avoid: str = "", pause: float = 0
    ) -> None:
        """Have a prefill worker tell decode that the blocks are free."""
        await asyncio.sleep(pause)
        result = "no_prefill_worker"
        worker = self._pool.choose(Role.PREFILL, avoid=[avoid])
        if worker is None or not worker.pulls_allowed(time.monotonic()):
            # Nobody can carry it now; the pin outlives most pauses.
            await asyncio.sleep(self._settings.pull_pause_seconds)
            worker = self._pool.choose(Role.PREFILL, avoid=[avoid])
        if worker is not None and worker.pulls_allowed(time.monotonic()):
            try:
                await self._client.call(
                    worker,
                    COMPLETIONS_PATH,
                    wire.release_body(model, holding),
                    timeout=_RELEASE_TIMEOUT,
                )
                result = "sent"
                worker.pull_succeeded()
            except WorkerError as error:
                result = "failed"
                worker.pull_failed(
                    time.monotonic(),
                    limit=self._settings.pull_failures,
                    pause=self._settings.pull_pause_seconds,
                )
                log.event("release_failed", holding=holding.id, error=str(error))
        self._metrics.releases.labels(result).inc()

    def abandon(self, turn: Turn) -> None:
        """The client left. Called by the route after the turn was cancelled."""
        self._metrics.client_disconnects.labels(turn.stage).inc()
        if turn.stage == "decode" and not turn.handed_over:
            # Decode may not have seen the request: then prefill waits for its lease.
            self._metrics.stranded_prefills.labels("client_left").inc()

    # Book-keeping.

    def _first_content(self, turn: Turn) -> None:
        turn.stage = "relay"
        turn.ttft = time.monotonic() - turn.started

    def finished(self, turn: Turn, outcome: str) -> None:
        """Count and log a turn, once, however it ended."""
        metrics = self._metrics
        metrics.turns.labels(turn.route or "none", str(turn.reason), outcome).inc()
        if turn.ttft is not None:
            metrics.ttft.labels(turn.route).observe(turn.ttft)
        for leg, seconds in turn.legs.items():
            metrics.leg_seconds.labels(leg, turn.route or "none").observe(seconds)
        if turn.prompt_tokens and turn.ttft is not None:
            tokens = metrics.prompt_tokens
            tokens.labels("computed").inc(max(0, turn.prompt_tokens - turn.reused_tokens))
            if turn.pulled_tokens is None or turn.prefill_cached_tokens is None:
                tokens.labels("reused").inc(turn.reused_tokens)
            else:
                tokens.labels("pulled").inc(turn.pulled_tokens)
                tokens.labels("prefill_cache").inc(turn.prefill_cached_tokens)
        log.event(
            "turn",
            request=turn.request_id,
            session=turn.identity.label,
            route=turn.route,
            reason=str(turn.reason),
            outcome=outcome,
            streamed=turn.streamed,
            prompt_tokens=turn.prompt_tokens,
            reused_tokens=turn.reused_tokens,
            pulled_tokens=turn.pulled_tokens,
            planned_pull=turn.planned_pull,
            prefill_cached_tokens=turn.prefill_cached_tokens,
            prefill=turn.prefill_worker,
            decode=turn.decode_worker,
            attempts=turn.attempts,
            kept=turn.kept,
            ttft_ms=_ms(turn.ttft),
            total_ms=_ms(time.monotonic() - turn.started),
            legs_ms={leg: _ms(seconds) for leg, seconds in turn.legs.items()},
        )

    @contextmanager
    def _leg(self, turn: Turn, name: str) -> Any:
        start = time.monotonic()
        try:
            yield
        finally:
            turn.legs[name] = time.monotonic() - start

    @contextmanager
    def _table_operation(self, name: str) -> Any:
        start = time.monotonic()
        try:
            yield
        except TableUnavailable:
            self._metrics.table_failures.labels(name).inc()
            raise
        finally:
            self._metrics.table_seconds.labels(name).observe(time.monotonic() - start)

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.event("background_failed", task=task.get_name(), error=repr(error))

    async def _carry_through(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Finish ``work`` even if the turn is cancelled meanwhile: half done, it would leak."""
        task = self._in_background(work, name)
        await asyncio.shield(task)

    def _handed_over(self, turn: Turn, worker: Worker) -> None:
        if not turn.handed_over:
            turn.handed_over = True
            worker.transfer_succeeded()


def _spends(plan: TurnPlan) -> bool:
    """Does performing this plan pull or release what was claimed?"""
    return isinstance(plan, PrefillWithPull) or plan.release is not None


@contextmanager
def _busy(worker: Worker) -> Any:
    worker.outstanding += 1
    try:
        yield
    finally:
        worker.outstanding -= 1


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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
