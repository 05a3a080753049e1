"""[io] A generating route: parse, check, identify, hand to the conductor, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from hashlib import blake2b
from os import urandom
from typing import Any

from proxy import log
from proxy.api.callers import Callers
from proxy.api.http import (
    ClientGone,
    Receive,
    Response,
    Scope,
    Send,
    body_is_there,
    caller_of,
    read_body,
    until_client_leaves,
)
from proxy.api.stalls import ClientStalled, StallWatch
from proxy.api.validate import parse_object
from proxy.dialects.base import Dialect
from proxy.errors import ClientError, KvloopError, WorkerRefused, http_answer
from proxy.metrics import Metrics
from proxy.session.identity import Caller, IdentityError, identify
from proxy.settings import Settings
from proxy.turn.conductor import Conductor
from proxy.turn.record import Turn
from proxy.workers.health import ModelList
from proxy.workers.pool import Pool, Role

_MAX_REQUEST_ID = 128


class GeneratingRoute:
    """One dialect's route as an ASGI application."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        settings: Settings,
        conductor: Conductor,
        pool: Pool,
        models: ModelList,
        metrics: Metrics,
        stalls: StallWatch,
        callers: Callers,
    ) -> None:
        self._dialect = dialect
        self._settings = settings
        self._conductor = conductor
        self._pool = pool
        self._models = models
        self._metrics = metrics
        self._stalls = stalls
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        headers = dict(scope["headers"])
        request_id = request_id_of(headers)
        log.request_id.set(request_id)
        try:
            with self._callers.admitted(caller_of(scope)):
                await self._serve(scope, receive, response, headers, request_id)
        except KvloopError as error:
            await self._fail(response, error, {"X-Request-Id": request_id})
        except ClientGone:
            return

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        response: Response,
        headers: Mapping[bytes, bytes],
        request_id: str,
    ) -> None:
        """Raises ``KvloopError`` for a request that became no turn, ``ClientGone``."""
        limit = self._settings.max_body_bytes
        try:
            if body_is_there(receive):
                data = await read_body(scope, receive, limit=limit)
            else:
                async with asyncio.timeout(self._settings.client_read_timeout_seconds):
                    data = await read_body(scope, receive, limit=limit)
        except TimeoutError:
            late = ClientError(
                "The request body did not arrive in time.", status=408, code="request_timeout"
            )
            await self._fail(response, late, {"X-Request-Id": request_id, "Connection": "close"})
            return
        turn = self._admit(data, headers, request_id, caller_of(scope))
        self._conductor.begin(turn, headers)
        outcome = "error"
        try:
            with self._stalls.watching(response):
                await until_client_leaves(self._conductor.perform(turn, response), receive)
            outcome = "stream_error" if turn.kept == "stream_error" else "ok"
        except ClientGone:
            outcome = "client_left"
            self._conductor.abandon(turn)
        except ClientStalled:
            outcome = "client_stalled"
            self._conductor.abandon(turn)
            response.cut()
        except KvloopError as error:
            await self._fail(response, error, turn.headers())
        except Exception:
            log.exception("turn_crashed", request=request_id)
            if response.begun:
                raise
            await self._fail(response, KvloopError(), {"X-Request-Id": request_id})
        finally:
            self._conductor.finished(turn, outcome)

    def _admit(
        self, data: bytes, headers: Mapping[bytes, bytes], request_id: str, caller: Caller
    ) -> Turn:
        started = time.monotonic()
        body = parse_object(data)
        self._dialect.check(body)
        if self._settings.isolate_tenants:
            salt(body, caller)
        try:
            identity = identify(body, headers, tenant=caller.tenant)
        except IdentityError as error:
            raise ClientError(str(error), param=error.field) from None
        model = body["model"]
        if self._models.known and not self._models.serves(model):
            raise ClientError(
                f"The model '{model[:200]}' does not exist.",
                status=404,
                param="model",
                code="model_not_found",
            )
        decodes = [each.name for each in self._pool.workers if each.role is Role.DECODE]
        return Turn(
            body=body,
            identity=identity,
            request_id=request_id,
            started=started,
            dialect=self._dialect,
            caller=caller,
            bound_to=self._dialect.bound_to(body, caller, decodes),
        )

    async def _fail(self, response: Response, error: KvloopError, headers: dict[str, str]) -> None:
        status, body, content_type, extra = http_answer(error, self._dialect.error_shape)
        if isinstance(error, WorkerRefused):
            body = self._dialect.refusal(status, body)
        self._metrics.http_errors.labels(str(status)).inc()
        await response.begin(content_type, {**headers, **extra}, status)
        await response.write(body, last=True)


def salt(body: dict[str, Any], caller: Caller) -> None:
    """Give the request a cache salt of its tenant's, so that the workers' own prefix caches tell
    nobody, by their speed, what another tenant has sent."""
    if caller.tenant:
        given = str(body.get("cache_salt") or "")
        text = f"{caller.tenant}\0{given}".encode("utf-8", "surrogatepass")
        body["cache_salt"] = blake2b(text, digest_size=16, person=b"kvloop salt").hexdigest()


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's X-Request-Id if it is harmless in a header and a log, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return urandom(16).hex()
