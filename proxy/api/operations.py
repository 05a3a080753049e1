"""[io] What operators and clients ask besides turns: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException

from proxy import __version__
from proxy.errors import openai_error
from proxy.metrics import Metrics
from proxy.session.table import SessionTable
from proxy.turn.admission import Admission
from proxy.workers.health import ModelList
from proxy.workers.pool import Pool, Role


def build(
    pool: Pool,
    models: ModelList,
    table: SessionTable,
    metrics: Metrics,
    admission: Admission,
    reuse_on: Callable[[], bool],
    background_tasks: Callable[[], int],
) -> FastAPI:
    """The documented surface (``/docs``), apart from the generating routes."""
    app = FastAPI(
        title="kvloop",
        version=__version__,
        description="Stateful prefill/decode proxy. POST /v1/chat/completions is served beside "
        "these routes, as OpenAI's API defines it.",
    )

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Is this process alive? Says nothing about workers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Can turns be answered? 200 when a decode worker is healthy, else (or draining) 503.

        Without prefill workers or Redis turns are still answered, only without reuse: they show
        here and in the metrics, and do not take the proxy out of service.
        """
        serving = pool.has(Role.DECODE) and not admission.draining
        state: dict[str, Any] = {
            "ready": serving,
            "draining": admission.draining,
            "table": await table.ping(),
            "reuse": reuse_on(),
            "workers": [
                {
                    "name": worker.name,
                    "role": worker.role,
                    "healthy": worker.healthy,
                    "block_size": worker.block_size,
                    "kv_blocks": worker.kv_blocks,
                    "pin_limit_blocks": worker.pin_limit_blocks,
                    "outstanding": worker.outstanding,
                    "error": worker.last_error or None,
                }
                for worker in pool.workers
            ],
        }
        return JSONResponse(state, status_code=200 if serving else 503)

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        """Models that the decode workers serve."""
        if not models.known:
            return JSONResponse(
                {
                    "error": {
                        "message": "No decode worker has answered yet.",
                        "type": "overloaded_error",
                        "param": None,
                        "code": "no_worker",
                    }
                },
                status_code=503,
                headers={"Retry-After": "5"},
            )
        return JSONResponse(models.page())

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus text format."""
        metrics.in_flight.set(admission.in_flight)
        metrics.queued.set(admission.queued)
        metrics.background_tasks.set(background_tasks())
        metrics.event_loop_tasks.set(len(asyncio.all_tasks()))
        for worker in pool.workers:
            labels = (worker.name, str(worker.role))
            metrics.worker_healthy.labels(*labels).set(int(worker.healthy))
            metrics.worker_outstanding.labels(*labels).set(worker.outstanding)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(StarletteHTTPException)
    async def in_openai_shape(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"Unknown path: {request.url.path[:200]}",
            405: f"{request.method} is not allowed on {request.url.path[:200]}",
        }.get(error.status_code, str(error.detail))
        return Response(
            openai_error(message, type="invalid_request_error"),
            status_code=error.status_code,
            media_type="application/json",
            headers=getattr(error, "headers", None),
        )

    return app
