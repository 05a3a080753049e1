"""[io] Decode's part of a turn: send, relay, and hand over what decode says of its KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from proxy import log
from proxy.dialects.base import Dialect
from proxy.errors import WorkerError, WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.relay.sse import EventSplitter, event_data, split_events
from proxy.session.fingerprint import PromptTokens
from proxy.turn import wire
from proxy.turn.keeping import Keeping
from proxy.turn.parts import Parts
from proxy.turn.record import Prompt, Sink, Turn
from proxy.workers.pool import Worker
from proxy.workers.worker import rank_of

_LAST_WORDS_SECONDS = 0.05
"""How long a plain answer may still arrive after its client left: decode may have finished and
pinned blocks in that very moment, and only the answer says which."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What the two legs of a push turn share: the request id, fields of the body, and how many
    seconds longer decode's first byte may take, because prefill has only begun."""

    request_id: str
    shared: Mapping[str, Any]
    wait: float


class Repeatable(Exception):
    """Decode failed before any content reached the client."""

    def __init__(self, error: WorkerError) -> None:
        super().__init__(str(error))
        self.error = error


class DecodeLeg:
    """Performs decode legs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._keeping = Keeping(parts)

    async def perform(
        self,
        turn: Turn,
        worker: Worker,
        handle: dict[str, Any] | None,
        prompt: Prompt | None,
        sink: Sink,
        *,
        append: bool = False,
        pair: Pair | None = None,
    ) -> None:
        """Answer through ``sink``. ``append``: without a handle, on what decode has itself.

        ``pair``: prefill pushes. Nothing is kept then: nobody could read it.
        """
        transfers = (handle is not None or append) and pair is None
        keep = transfers and prompt is not None and self._parts.keeps(worker)
        lease = 0.0
        if keep and prompt is not None:
            lease = self._parts.retention.lease(turn)
            self._parts.retention.decode_begins(turn, worker, len(prompt.tokens))
        body = turn.dialect.decode_body(
            turn.body,
            handle,
            ids_json=prompt.json if prompt else None,
            lease_seconds=lease,
            ask_ids=worker.plugin is not True,
            caller=turn.caller,
            worker=worker.name,
            append=append,
            shared=pair.shared if pair else None,
        )
        kept_prompt = prompt.tokens if prompt and keep else None
        first_byte = self._parts.settings.first_byte_timeout_seconds + (pair.wait if pair else 0)
        with turn.trace.span("decode"):
            headers = {
                "X-Request-Id": pair.request_id if pair else f"{turn.request_id}-d{turn.attempts}",
                **turn.trace.headers(),
            }
            if append and turn.claimed and (rank := rank_of(turn.claimed.engine_id)) is not None:
                headers["X-data-parallel-rank"] = str(rank)  # each rank has its own prefix cache
            if turn.streamed:
                await self._decode_stream(
                    turn, worker, body, headers, kept_prompt, sink, first_byte
                )
            else:
                await self._decode_whole(turn, worker, body, headers, kept_prompt, sink, first_byte)

    async def _decode_whole(
        self,
        turn: Turn,
        worker: Worker,
        body: bytes,
        headers: dict[str, str],
        prompt: PromptTokens | None,
        sink: Sink,
        first_byte_timeout: float,
    ) -> None:
        call = asyncio.ensure_future(
            self._parts.client.call(
                worker,
                turn.dialect.path,
                body,
                timeout=first_byte_timeout,
                headers=headers,
            )
        )
        try:
            with turn.leg("decode"):
                answer = await asyncio.shield(call)
        except (WorkerFailed, WorkerUnreachable) as error:
            raise Repeatable(error) from error
        except asyncio.CancelledError:
            self._parts.background.start(self._last_words(turn, worker, call), "last words")
            raise
        worker.answered()
        self._handed_over(turn, worker)
        ending = turn.dialect.ending_of_answer(turn.body, answer)
        _correct(turn, ending)
        await self._parts.background.carry_through(
            self._keeping.keep(turn, worker, prompt, ending), "keep"
        )
        clean = turn.dialect.client_answer(turn.body, answer)
        turn.first_content()
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
        await self._keeping.unkeep(turn, worker, turn.dialect.ending_of_answer(turn.body, answer))

    async def _decode_stream(
        self,
        turn: Turn,
        worker: Worker,
        body: bytes,
        headers: dict[str, str],
        prompt: PromptTokens | None,
        sink: Sink,
        first_byte_timeout: float,
    ) -> None:
        settings = self._parts.settings
        dialect = turn.dialect
        splitter = EventSplitter()
        held: list[bytes] = []
        begun = kept = over = False
        sent = time.monotonic()

        def relayed(data: bytes) -> bool:
            """Plain content goes straight to the client; all else takes the way below."""
            if (
                not begun
                or not splitter.whole(data)
                or dialect.may_end(data)
                or dialect.reports_error(data)
                or not sink.offer(data)
            ):
                return False
            turn.next_content()
            return True

        try:
            async with self._parts.client.stream(
                worker,
                turn.dialect.path,
                body,
                first_byte_timeout=first_byte_timeout,
                headers=headers,
            ) as response:
                timeout = first_byte_timeout
                try:
                    while True:
                        data = await self._parts.client.read_some(
                            worker, response, timeout=timeout, through=relayed
                        )
                        block = splitter.feed(data) if data else splitter.flush()
                        if block:
                            if begun and not block.startswith(dialect.last_events):
                                turn.next_content()
                            if not begun:
                                self._handed_over(turn, worker)
                                held.append(block)
                                if not _committed(dialect, worker, block):
                                    continue
                                block = b"".join(held)
                                turn.legs["decode"] = time.monotonic() - sent
                                turn.first_content()
                                await sink.begin(
                                    response.content_type or "text/event-stream",
                                    turn.headers(),
                                )
                                begun = True
                                timeout = settings.chunk_timeout_seconds
                            if not kept and dialect.may_end(block):
                                block, ending = dialect.take_ending(block)
                                kept = True
                                _correct(turn, ending)
                                await self._parts.background.carry_through(
                                    self._keeping.keep(turn, worker, prompt, ending), "keep"
                                )
                            if dialect.reports_error(block):
                                self._parts.metrics.stream_errors.inc()
                                turn.kept = "stream_error"
                                log.event(
                                    "stream_error", request=turn.request_id, worker=worker.name
                                )
                            if block:
                                # Its end goes along with the last piece, if it has come too.
                                over = (
                                    kept
                                    and not splitter.pending
                                    and self._parts.client.ended(response)
                                )
                                await sink.write(block, last=over)
                        if not data or over:
                            break
                except asyncio.CancelledError:
                    if not kept and (rest := self._parts.client.arrived(response)):
                        _, ending = dialect.take_ending(splitter.feed(rest))
                        self._parts.background.start(
                            self._keeping.unkeep(turn, worker, ending), "unkeep"
                        )
                    raise
                if not begun:
                    raise WorkerFailed(worker.name, 200, "ended its stream without content")
                worker.answered()
        except (WorkerFailed, WorkerUnreachable) as error:
            if not begun:
                raise Repeatable(error) from error
            self._parts.metrics.stream_errors.inc()
            log.event("stream_broken", request=turn.request_id, error=str(error))
            turn.kept = "stream_error"
            # Status 200 is out: say it in the stream, as vLLM itself does.
            await sink.write(dialect.broken_stream())
        if not over:
            await sink.write(b"", last=True)

    def _handed_over(self, turn: Turn, worker: Worker) -> None:
        if not turn.handed_over:
            turn.handed_over = True
            worker.transfer_succeeded()


def _correct(turn: Turn, ending: wire.Ending) -> None:
    """Replace what decode was expected to find in its cache by what it says it found."""
    work = turn.decode_work
    if work is None or not isinstance(ending.handle, dict):
        return
    _, pulled, local = wire.reported_reuse(ending.handle)
    if pulled is None or local is None:
        return
    if work.moved:
        turn.decode_work = replace(work, moved=max(1, pulled))
    else:
        computed = max(1, turn.prompt_tokens - local)
        turn.decode_work = replace(work, computed=computed, context=turn.prompt_tokens - computed)


def _committed(dialect: Dialect, worker: Worker, block: bytes) -> bool:
    """Has the answer begun in earnest? Raises what an error event says."""
    for event in split_events(block):
        data = event_data(event)
        if data is None:
            continue
        error = dialect.stream_error(data)
        if error is not None:
            code = error.get("code")
            if type(code) is int and 400 <= code < 500:
                raise WorkerRefused(worker.name, code, data, "application/json")
            raise WorkerFailed(worker.name, 0, "reported an error in its stream")
        if dialect.carries_content(data):
            return True
    return False
