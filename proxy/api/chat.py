"""[io] ``POST /v1/chat/completions``: parse, check, identify, hand to the conductor, answer."""

from __future__ import annotations

import time
from uuid import uuid4

from proxy import log
from proxy.api.http import ClientGone, Exchange
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
    """The route; called with each exchange."""

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

    async def __call__(self, exchange: Exchange) -> None:
        headers = dict(exchange.headers)
        request_id = _request_id(headers)
        try:
            data = await exchange.body(limit=self._limit, timeout=self._read_timeout)
            turn = self._admit(data, headers, request_id)
        except KvloopError as error:
            await self._fail(exchange, error, {"X-Request-Id": request_id})
            return
        except ClientGone:
            return
        outcome = "error"
        try:
            with self._stalls.watching(exchange):
                await exchange.while_connected(self._conductor.perform(turn, exchange))
            outcome = "stream_error" if turn.kept == "stream_error" else "ok"
        except ClientGone:
            outcome = "client_left"
            self._conductor.abandon(turn)
        except ClientStalled:
            outcome = "client_stalled"
            self._conductor.abandon(turn)
            exchange.cut()
        except KvloopError as error:
            await self._fail(exchange, error, turn.headers())
        except Exception:
            log.exception("turn_crashed", request=request_id)
            if exchange.begun:
                exchange.cut()
            else:
                await self._fail(exchange, KvloopError(), {"X-Request-Id": request_id})
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

    async def _fail(self, exchange: Exchange, error: KvloopError, headers: dict[str, str]) -> None:
        status, body, content_type, extra = http_answer(error)
        self._metrics.http_errors.labels(str(status)).inc()
        await exchange.begin(content_type, {**headers, **extra}, status)
        await exchange.write(body, last=True)


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's X-Request-Id if it is harmless in a header and a log, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid4().hex
