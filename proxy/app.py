"""[io] The composition root: opens what the process needs, wires the parts, closes them again."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING

from fastapi import FastAPI

from proxy import log
from proxy.api import admin, operations
from proxy.api.callers import Callers
from proxy.api.forward import ForwardRoutes
from proxy.api.generate import GeneratingRoute
from proxy.api.http import Receive, Response, Scope, Send
from proxy.api.live import Live
from proxy.api.stalls import StallWatch
from proxy.dialects import DIALECTS
from proxy.dialects.messages import MESSAGES
from proxy.errors import ClientError, anthropic_shape, http_answer, openai_shape
from proxy.gauges import StateGauges
from proxy.metrics import Metrics
from proxy.session.identity import NOBODY
from proxy.session.ledger import Ledger
from proxy.session.private_store import PrivateStore
from proxy.session.table import SessionTable
from proxy.settings import Settings, SettingsError
from proxy.switch import ReuseSwitch
from proxy.tenants import KeysError
from proxy.turn.conductor import Conductor
from proxy.workers.client import WorkerClient
from proxy.workers.health import HealthLoop, ModelList
from proxy.workers.pool import Pool, Role
from proxy.workers.roster import Roster
from proxy.workers.sources import Sources

if TYPE_CHECKING:
    from proxy.tracing import Tracing

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/redoc", "/openapi.json"})
"""Answered without an API key: they serve nobody's data. ``/metrics`` exists here only while there
are no keys."""


class App:
    """The proxy as an ASGI application.

    Routes that workers answer go straight to their handlers; everything else to FastAPI. ``start``
    and ``stop`` are driven by the server's lifespan, or directly by a test.
    """

    def __init__(self, settings: Settings, *, know_workers_first: bool = False) -> None:
        """``know_workers_first``: ``start`` returns when each worker has been asked how it is."""
        self.settings = settings
        self._know_workers_first = know_workers_first
        self.metrics = Metrics()
        self.models = ModelList()
        self.pool = Pool()
        try:
            self.callers = Callers(settings, self.metrics)
        except KeysError as error:
            raise SettingsError(f"kvloop: wrong settings\n  {error}") from None
        self._private_store: PrivateStore | None = None
        self.tracing = _tracing(settings)

    async def start(self) -> None:
        settings = self.settings
        url = settings.redis_url
        if url is None:
            self._private_store = PrivateStore()
            url = await self._private_store.start()
        self.table = SessionTable(url, timeout_seconds=settings.table_timeout_seconds)
        self.ledger = Ledger(self.table)
        self.client = WorkerClient(
            connect_timeout_seconds=settings.connect_timeout_seconds,
            api_key=settings.worker_api_key,
            ca_file=settings.worker_ca_file,
        )
        self.health = HealthLoop(
            self.client,
            self.models,
            interval=settings.health_interval_seconds,
            timeout=settings.health_timeout_seconds,
            failures=settings.health_failures,
        )
        self.conductor = Conductor(
            settings=settings,
            pool=self.pool,
            client=self.client,
            table=self.table,
            ledger=self.ledger,
            metrics=self.metrics,
            tracing=self.tracing,
        )
        self.conductor.retention.start()
        self.switch = ReuseSwitch(
            self.table, self.conductor, self.metrics, allowed=settings.reuse_enabled
        )
        self.switch.start()
        self.gauges = StateGauges(self.metrics, self.pool, self.conductor, self.table)
        self.gauges.start()
        self._stalls = StallWatch(settings.client_write_timeout_seconds)
        self._stalls.start()
        self._generating = {
            dialect.path: GeneratingRoute(
                dialect,
                settings=settings,
                conductor=self.conductor,
                pool=self.pool,
                models=self.models,
                metrics=self.metrics,
                stalls=self._stalls,
                callers=self.callers,
            )
            for dialect in DIALECTS
        }
        self._forward = ForwardRoutes(
            settings=settings,
            pool=self.pool,
            client=self.client,
            metrics=self.metrics,
            stalls=self._stalls,
            callers=self.callers,
            admission=self.conductor.admission,
        )
        self.live = Live(self)
        sources = Sources(
            [(url, Role.PREFILL) for url in settings.prefill_urls]
            + [(url, Role.DECODE) for url in settings.decode_urls],
            settings.workers_file,
        )
        self.roster = Roster(
            sources,
            self.pool,
            self.health,
            self.table,
            interval=settings.discovery_interval_seconds,
            keep_leaving=settings.decode_kv_ttl_seconds,
        )
        await self.roster.start()
        if self._know_workers_first:
            await self.health.first_round()
        log.event(
            "started",
            prefill=list(settings.prefill_urls),
            decode=list(settings.decode_urls),
            table="private" if self._private_store else "redis",
            reuse=settings.reuse_enabled,
        )
        if not settings.verify_tokens:
            log.event("verification_is_off", note="answers may be wrong; for tests only")

    async def stop(self) -> None:
        await self.roster.stop()
        self.live.close()
        await self.switch.stop()
        await self._stalls.stop()
        await self.gauges.stop()
        await self.health.stop()
        await self.conductor.retention.stop()
        await self.conductor.close()
        await self.client.close()
        await self.table.close()
        if self._private_store is not None:
            await self._private_store.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @cached_property
    def admin(self) -> FastAPI:
        """The operators' surface. Made when first used, as is the next one: describing forty
        routes takes a tenth of a second, and most tests ask none of them."""
        return admin.build(self)

    @cached_property
    def _operations(self) -> FastAPI:
        return operations.build(self)

    async def drain(self) -> None:
        """Refuse new turns, say so on ``/ready``, and return when no turn is left."""
        log.event("draining", in_flight=self.conductor.admission.in_flight)
        self.conductor.admission.drain()
        await self.conductor.admission.idle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        try:
            size = len(scope["raw_path"])
            for name, value in scope["headers"]:
                size += len(name) + len(value)
            if size > self.settings.max_header_bytes:
                raise ClientError(
                    f"The request's headers are larger than {self.settings.max_header_bytes} "
                    "bytes.",
                    status=431,
                    code="headers_too_large",
                )
            if path not in OPEN_PATHS:
                required = self.callers.required
                caller = self.callers.resolve(dict(scope["headers"])) if required else NOBODY
                scope.setdefault("state", {})["caller"] = caller
        except ClientError as error:
            await self._refuse(error, path, Response(send))
            return
        if method == "POST" and (route := self._generating.get(path)):
            await route(scope, receive, send)
        elif self._forward.serves(method, path):
            await self._forward(scope, receive, send)
        else:
            await self._operations(scope, receive, send)

    async def _refuse(self, error: ClientError, path: str, response: Response) -> None:
        shape = anthropic_shape if path.startswith(MESSAGES.path) else openai_shape
        status, body, kind, _ = http_answer(error, shape)
        self.metrics.http_errors.labels(str(status)).inc()
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        await response.begin(kind, headers, status)
        await response.write(body, last=True)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except Exception as error:
                    log.exception("start_failed")
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _tracing(settings: Settings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    from proxy import tracing  # OpenTelemetry is optional

    return tracing.Tracing(tracing.exporting(settings))
