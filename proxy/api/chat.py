"""[io] ``POST /v1/chat/completions``: parse, check, identify, hand to the conductor, answer."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

from proxy import log
from proxy.api.http import (
    ClientGone,
    Receive,
    Response,
    Scope,
    Send,
    read_body,
    until_client_leaves,
)
from proxy.api.stalls import ClientStalled, StallWatch
from proxy.api.validate import check_chat, parse_object
from proxy.errors import ClientError, KvloopError, http_answer
from proxy.metrics import Metrics
from proxy.session.identity import IdentityError, identify
from proxy.turn.conductor import Conductor
from proxy.turn.record import Turn
from proxy.workers.health import ModelList

_MAX_REQUEST_ID = 128


class ChatRoute:
    """The route as an ASGI application."""

    def __init__(
        self,
        conductor: Conductor,
        models: ModelList,
        metrics: Metrics,
        stalls: StallWatch,
        *,
        max_body_bytes: int,
        read_timeout: float,
    ) -> None:
        self._conductor = conductor
        self._models = models
        self._metrics = metrics
        self._stalls = stalls
        self._limit = max_body_bytes
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        log.request_id.set(request_id)
        try:
            async with asyncio.timeout(self._read_timeout):
                data = await read_body(scope, receive, limit=self._limit)
            turn = self._admit(data, headers, request_id)
            self._conductor.begin(turn, headers)
        except TimeoutError:
            late = ClientError(
                "The request body did not arrive in time.", status=408, code="request_timeout"
            )
            await self._fail(response, late, {"X-Request-Id": request_id, "Connection": "close"})
            return
        except KvloopError as error:
            await self._fail(response, error, {"X-Request-Id": request_id})
            return
        except ClientGone:
            return
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

    def _admit(self, data: bytes, headers: dict[bytes, bytes], request_id: str) -> Turn:
        started = time.monotonic()
        body = parse_object(data)
        check_chat(body)
        try:
            identity = identify(body, headers)
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
        return Turn(body=body, identity=identity, request_id=request_id, started=started)

    async def _fail(self, response: Response, error: KvloopError, headers: dict[str, str]) -> None:
        status, body, content_type, extra = http_answer(error)
        self._metrics.http_errors.labels(str(status)).inc()
        await response.begin(content_type, {**headers, **extra}, status)
        await response.write(body, last=True)


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's X-Request-Id if it is harmless in a header and a log, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid4().hex
