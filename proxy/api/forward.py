"""[io] Routes that one worker answers alone: the request goes there, the answer comes back.

Only the routes listed here exist for clients. A worker serves more (weights, sleeping, adapters,
debugging); those are its operators' and are not reachable through this proxy.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy import log
from proxy.api.callers import Callers
from proxy.api.forms import check_form
from proxy.api.generate import request_id_of, salt
from proxy.api.http import (
    ClientGone,
    Receive,
    Response,
    Scope,
    Send,
    caller_of,
    read_body,
    until_client_leaves,
)
from proxy.api.stalls import ClientStalled, StallWatch
from proxy.api.validate import parse_object
from proxy.dialects.base import parsed, unserved
from proxy.dialects.responses import worker_of
from proxy.errors import (
    ClientError,
    KvloopError,
    NoWorker,
    anthropic_shape,
    http_answer,
    openai_shape,
)
from proxy.metrics import Metrics
from proxy.session.identity import Caller
from proxy.settings import Settings
from proxy.turn import wire
from proxy.turn.admission import Admission
from proxy.turn.parts import busy
from proxy.workers.client import WorkerClient
from proxy.workers.pool import Pool, Role, Worker

JSON_ROUTES = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/chat/completions/batch",
    "/cohere/v2/chat",
)
FORM_ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
SALTED = frozenset(
    {
        "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank",
        "/v1/rerank", "/v2/rerank", "/v1/chat/completions/batch", "/cohere/v2/chat",
    }
)  # fmt: skip
"""Those that use the prefix cache and know the field ``cache_salt``."""
_RESPONSE = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
_STREAM_QUERY = re.compile(rb"(?:stream=(?:true|false)|starting_after=\d{1,9})(?:&|$)")


@dataclass(frozen=True, slots=True)
class _Call:
    """What goes to the worker."""

    method: str
    path: str
    body: bytes | None
    content_type: str
    worker: str = ""
    """Name of the only worker that can answer; empty when any decode worker can."""


class ForwardRoutes:
    """These routes as an ASGI application."""

    def __init__(
        self,
        *,
        settings: Settings,
        pool: Pool,
        client: WorkerClient,
        metrics: Metrics,
        stalls: StallWatch,
        callers: Callers,
        admission: Admission,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._client = client
        self._metrics = metrics
        self._stalls = stalls
        self._callers = callers
        self._admission = admission

    @staticmethod
    def serves(method: str, path: str) -> bool:
        if method == "POST" and (path in JSON_ROUTES or path in FORM_ROUTES):
            return True
        match = _RESPONSE.fullmatch(path)
        return match is not None and method == ("POST" if match[2] else "GET")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        request_id = request_id_of(dict(scope["headers"]))
        started = time.monotonic()
        outcome, worker_name = "error", ""
        try:
            with self._callers.admitted(caller_of(scope)):
                call = await self._prepare(scope, receive)
                worker = self._choose(call)
                worker_name = worker.name
                async with self._admission.place():
                    with busy(worker), self._stalls.watching(response):
                        work = self._relay(worker, call, request_id, response)
                        await until_client_leaves(work, receive)
            outcome = "ok"
        except ClientGone:
            outcome = "client_left"
        except ClientStalled:
            outcome = "client_stalled"
            response.cut()
        except KvloopError as error:
            if response.begun:
                response.cut()  # an answer that stops half way must not look complete
                return
            shape = anthropic_shape if scope["path"].startswith("/v1/messages") else openai_shape
            status, body, kind, extra = http_answer(error, shape)
            self._metrics.http_errors.labels(str(status)).inc()
            await response.begin(kind, {"X-Request-Id": request_id, **extra}, status)
            await response.write(body, last=True)
        finally:
            self._metrics.forwarded.labels(route_label(scope["path"]), outcome).inc()
            log.event(
                "forwarded",
                request=request_id,
                api=route_label(scope["path"]),
                tenant=caller_of(scope).tenant or None,
                outcome=outcome,
                worker=worker_name,
                seconds=round(time.monotonic() - started, 4),
            )

    async def _prepare(self, scope: Scope, receive: Receive) -> _Call:
        caller, path = caller_of(scope), scope["path"]
        limit = self._settings.max_body_bytes
        try:
            async with asyncio.timeout(self._settings.client_read_timeout_seconds):
                data = await read_body(scope, receive, limit=limit)
        except TimeoutError:
            raise ClientError(
                "The request body did not arrive in time.", status=408, code="request_timeout"
            ) from None
        if match := _RESPONSE.fullmatch(path):
            return self._stored_response(scope, match, caller)
        if path in FORM_ROUTES:
            kind = _header(scope, b"content-type")
            check_form(kind, data)
            return _Call("POST", path, data, kind)
        body = wire.client_fields(parse_object(data))
        check_flags(body)
        if path in SALTED and self._settings.isolate_tenants:
            salt(body, caller)
        return _Call("POST", path, orjson.dumps(body), "application/json")

    def _stored_response(self, scope: Scope, match: re.Match[str], caller: Caller) -> _Call:
        decodes = [each.name for each in self._pool.workers if each.role is Role.DECODE]
        worker = worker_of(match[1], caller, decodes)
        query = scope.get("query_string", b"")
        if query and not re.fullmatch(rb"(?:" + _STREAM_QUERY.pattern + rb")+", query):
            raise ClientError("The query may hold 'stream' and 'starting_after' only.")
        path = scope["path"] + ("?" + query.decode() if query else "")
        return _Call(scope["method"], path, None, "application/json", worker)

    def _choose(self, call: _Call) -> Worker:
        if call.worker:
            worker = self._pool.healthy(call.worker)
        else:
            worker = self._pool.choose(Role.DECODE, now=time.monotonic())
        if worker is None:
            raise NoWorker("No decode worker that can serve this is healthy.")
        return worker

    async def _relay(
        self, worker: Worker, call: _Call, request_id: str, response: Response
    ) -> None:
        settings = self._settings
        async with self._client.forward(
            worker,
            call.method,
            call.path,
            call.body,
            headers={"X-Request-Id": request_id, "Content-Type": call.content_type},
            first_byte_timeout=settings.first_byte_timeout_seconds,
        ) as (status, content_type, pieces):
            first = True
            arriving = pieces(settings.chunk_timeout_seconds)
            if call.worker and content_type.startswith("application/json"):
                arriving = _as_the_client_saw_it(arriving)
            async for piece in arriving:
                if first and status == 404 and b'"error"' not in piece:
                    parts = unserved(404)
                    raise ClientError(parts.message, status=404, type=parts.type, code=parts.code)
                if first:
                    await response.begin(content_type, {"X-Request-Id": request_id}, status)
                    first = False
                await response.write(piece)
            if first:
                await response.begin(content_type, {"X-Request-Id": request_id}, status)
            await response.write(b"", last=True)


async def _as_the_client_saw_it(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stored response whole, without the handle that its worker stored with it."""
    data = b"".join([piece async for piece in pieces])
    response = parsed(data)
    yield data if response is None else orjson.dumps(wire.without_transfer(response))


def check_flags(body: Mapping[str, Any]) -> None:
    """The model, when it is named, has a name."""
    model = body.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ClientError(
            "Invalid 'model': it must be a non-empty string.", param="model", code="invalid_value"
        )


def route_label(path: str) -> str:
    """The route of a path, without what a client chose."""
    match = _RESPONSE.fullmatch(path)
    if match:
        return "/v1/responses/{id}" + (match[2] or "")
    return path


def _header(scope: Scope, wanted: bytes) -> str:
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value.decode("latin-1"))
    return ""
