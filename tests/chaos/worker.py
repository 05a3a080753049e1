"""A scripted worker whose answer is a function of the KV it decodes from, and that can misbehave.

Prefill remembers for each handle which tokens its blocks hold: those read from decode, then its
own. Decode answers with a digest of what it reads from there. So a wrong, late or second read shows
as a wrong answer at the client, as it does with vLLM.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.chaos.steps import Step, Steps, last_words
from tests.fakes.worker import Cluster, FakeWorker, _error, tokenise

_GARBAGE = -1
"""Stands for whatever lies in blocks that have been freed."""

_read_from_decode: ContextVar[list[int]] = ContextVar("read_from_decode")
_asked_as: ContextVar[str] = ContextVar("asked_as", default="")

PREFILL_LEASE = 30.0
_HELD_BACK = 0.02
"""Seconds for which at most a worker goes on later when somebody has acted on a turn's step: before
and after its own answer are then about as likely."""


def answer_to(tokens: list[int]) -> str:
    """What decode says when these tokens are in its KV: 4 to 35 letters."""
    digest = hashlib.blake2b(str(tokens).encode(), digest_size=24).hexdigest()
    return digest[: 4 + int(digest[:2], 16) % 32]


def right_answer(messages: list[dict[str, Any]]) -> str:
    """The answer of a worker that computes everything itself."""
    return answer_to(tokenise({"messages": messages}))


@dataclass
class Mischief:
    """How the HTTP server misbehaves. Shares are probabilities from 0 to 1."""

    hang: bool = False
    """Accept and answer nothing, probes included, until it is switched off."""
    never: bool = False
    """Accept turns and never answer them: a dead engine behind a living HTTP server."""
    status: int = 0
    """Answer turns with this status."""
    share: float = 1.0
    """Of the turns that ``status``, ``reset``, ``lose_answer``, ``cut_answer`` and ``garbage``
    concern."""
    reset: bool = False
    """Reset the connection instead of an answer."""
    lose_answer: bool = False
    """Do the work, then reset the connection before a byte of the answer."""
    cut_answer: bool = False
    """The same after the first half of the answer."""
    garbage: bool = False
    """Status 200, and a body that is no answer."""
    die_mid_stream: float = 0.0
    """Share of streams that break off after some words."""
    fall_silent: float = 0.0
    """Share of streams that say nothing more after some words; their connections stay."""
    delay: float = 0.0
    """Seconds before anything is answered."""


class ChaosCluster(Cluster):
    """Also: what the blocks of prefill's handles hold, and for how long; whose pins are whose."""

    def __init__(self) -> None:
        super().__init__()
        self.prefilled: dict[tuple[str, str], tuple[list[int], float]] = {}
        self.pinned_for: dict[tuple[str, str], tuple[str, float]] = {}
        """The X-Request-Id of the turn that left the pin, and when."""
        self.steps = Steps()


class ChaosWorker(FakeWorker):
    """A fake with ``mischief``."""

    cluster: ChaosCluster

    def __init__(
        self, cluster: ChaosCluster, role: str, dice: random.Random, **options: Any
    ) -> None:
        super().__init__(cluster, role, **options)
        self.mischief = Mischief()
        self.middlewares = (self._misbehave,)
        self._dice = dice
        self._woken = asyncio.Event()
        self._silent_at: int | None = None

    @contextmanager
    def misbehaving(self, **mischief: Any) -> Iterator[None]:
        """Misbehave inside the block."""
        self.mischief = Mischief(**mischief)
        self._woken.clear()
        try:
            yield
        finally:
            self.mischief = Mischief()
            self._woken.set()

    def pins_beyond(self, seconds: float) -> set[tuple[str, str]]:
        """Handles whose blocks are kept for longer than that: (engine id, request id)."""
        now = time.monotonic() + seconds
        return {
            key
            for key, pin in self.cluster.pins.items()
            if key[0] == self.engine_id and pin.expires > now
        }

    async def kill(self) -> None:
        """SIGKILL: the engine is gone, and every connection with it."""
        self.cluster.engines.discard(self.engine_id)
        assert self._runner is not None
        if self._runner.server is not None:
            for connection in self._runner.server.connections:
                _reset(connection.transport)  # type: ignore[attr-defined]
        await self.stop()

    async def come_back(self) -> None:
        """A new process on the same address."""
        self.engine_id += "'"
        self.started_at += 1000
        self.requests.clear()
        await self.start()

    # Misbehaviour.

    @web.middleware
    async def _misbehave(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        mischief = self.mischief
        turn = request.method == "POST"
        concerned = turn and self._dice.random() < mischief.share
        if mischief.hang:
            await self._woken.wait()
        if mischief.never and turn:
            await asyncio.Event().wait()
        if mischief.delay:
            await asyncio.sleep(mischief.delay * self._dice.random() * 2)
        if concerned and mischief.reset:
            _reset(request.transport)
            return web.Response()
        if concerned and mischief.status:
            # The body is read first, as vLLM does: a reset would look like another fault.
            await request.read()
            return web.Response(
                status=mischief.status,
                text=_error("out of order", "InternalServerError", mischief.status),
                content_type="application/json",
            )
        if concerned and mischief.garbage:
            await request.read()
            return web.Response(text="<html>", content_type="text/html")
        if concerned and mischief.lose_answer:
            transport = request.transport
            if transport is not None:
                # Nothing that the handler writes may get out.
                transport.write = lambda data: None  # type: ignore[method-assign]
                transport.writelines = lambda data: None  # type: ignore[method-assign]
            response = await self._answered(request, handler)
            _reset(transport)
            return response
        if concerned and mischief.cut_answer:
            response = await self._answered(request, handler)
            if isinstance(response, web.Response) and isinstance(response.body, bytes):
                half = web.StreamResponse(status=response.status)
                half.content_length = len(response.body)
                await half.prepare(request)
                await half.write(response.body[: len(response.body) // 2])
                _break_off(request.transport)
                return half
            return response
        return await self._answered(request, handler)

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A mistake in the fake itself must not pass for one of the faults played."""
        leg = request.headers.get("X-Request-Id", "")
        _asked_as.set(leg)
        turn = leg.rpartition("-")[0]
        try:
            if request.method != "POST" or not self.cluster.steps.awaited:
                return await handler(request)
            if request.path.endswith(("/tokenize", "/render")):
                await self._reached(Step.TOKENISE, request, last_words(await request.json()))
                return await handler(request)
            if self.role == "decode":
                await self._reached(Step.DECODE, request, turn)
                response = await handler(request)
                await self._reached(Step.KEPT, request, turn)
                return response
            await self._reached(Step.PREFILL if turn else Step.RELEASE, request, turn)
            response = await handler(request)
            if turn:
                await self._reached(Step.BETWEEN, request, turn)
            return response
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            self.cluster.faults.append(f"its own mistake: {error!r}")
            raise

    async def _reached(self, step: Step, request: web.Request, turn: str) -> None:
        if request.transport is None:
            return
        port = request.transport.get_extra_info("peername")[1]
        if self.cluster.steps.reached(step, turn, port):
            await asyncio.sleep(self._dice.random() * _HELD_BACK)

    async def _saying(self, request: web.Request, number: int, pieces: int) -> None:
        if number == self._silent_at:
            await asyncio.Event().wait()
        if number == pieces // 2 and self.cluster.steps.awaited:
            await self._reached(Step.MIDDLE, request, _asked_as.get().rpartition("-")[0])

    # KV.

    async def _prefilled(
        self, body: dict[str, Any], prompt: list[int], *, chat: bool
    ) -> web.Response:
        _read_from_decode.set([])
        return await super()._prefilled(body, prompt, chat=chat)

    def _pull(self, params: dict[str, Any], prompt: list[int], local: int) -> int:
        key = (params["remote_engine_id"], params["remote_request_id"])
        pin = self.cluster.pins.get(key)
        count = super()._pull(params, prompt, local)
        if count:
            read = pin.tokens[:count] if pin else []
            _read_from_decode.set([*read, *[_GARBAGE] * (count - len(read))])
        return count

    def _handle(self, tokens: list[int], *, is_prefill: bool, lease: float = 0) -> dict[str, Any]:
        handle = super()._handle(tokens, is_prefill=is_prefill, lease=lease)
        key = (handle["remote_engine_id"], handle["remote_request_id"])
        if not is_prefill:
            self.cluster.pinned_for[key] = _asked_as.get(), time.time()
        else:
            read = _read_from_decode.get()
            held = [*read, *tokens[len(read) :]]
            self.cluster.prefilled[key] = (held, time.monotonic() + PREFILL_LEASE)
        return handle

    def _kv(self, params: dict[str, Any] | None, prompt: list[int]) -> list[int]:
        """The tokens that decode works on. ``LookupError`` when prefill's engine is gone."""
        if not params or not params.get("do_remote_prefill"):
            return prompt
        key = (params["remote_engine_id"], params["remote_request_id"])
        if key[0] not in self.cluster.engines:
            raise LookupError
        held, expires = self.cluster.prefilled.pop(key, ([], 0.0))
        if expires < time.monotonic():
            self.cluster.faults.append("decode read blocks that prefill had freed")
            return [_GARBAGE] * len(prompt)
        return held

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self.role == "prefill":
            return await super()._chat(request)
        body = await self._read(request)
        params = body.get("kv_transfer_params")
        prompt = (params or {}).get("prompt_token_ids") or tokenise(body)
        # A worker for this one request: all is shared but the knobs.
        one = copy.copy(self)
        self.open_requests += 1
        try:
            one.knobs = replace(self.knobs)
            try:
                one.knobs.answer = answer_to(self._kv(params, prompt))
            except LookupError:
                # As vLLM: a stream has begun by then and carries the error.
                if not body.get("stream"):
                    raise
                one.knobs.stream_error_first = 1
            if body.get("stream"):
                if self._dice.random() < self.mischief.die_mid_stream:
                    one.knobs.die_after_chunks = self._dice.randrange(len(one.knobs.answer))
                if self._dice.random() < self.mischief.fall_silent:
                    one._silent_at = self._dice.randrange(len(one.knobs.answer))
                return await one._stream(request, body, params, prompt)
            await asyncio.sleep(self.knobs.chunk_delay * len(one.knobs.answer))
            return one._whole(body, params, prompt)
        except LookupError:
            raise web.HTTPInternalServerError(
                text=_error("Internal server error", "InternalServerError", 500),
                content_type="application/json",
            ) from None
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open_requests -= 1

    async def _completions(self, request: web.Request) -> web.Response:
        self.open_requests += 1
        try:
            return await super()._completions(request)
        finally:
            self.open_requests -= 1


def _break_off(transport: asyncio.Transport | None) -> None:
    """End the connection when what was written has gone out."""
    if transport is not None:
        transport.close()


def _reset(transport: asyncio.Transport | None) -> None:
    """End the connection with RST, as the kernel does for a killed process with unread data."""
    if transport is None:
        return
    link = transport.get_extra_info("socket")
    if link is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
