"""[io] What operators and clients ask besides turns: models, health, readiness, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException

from proxy import __version__
from proxy.api import sessions, workers
from proxy.api.forward import JSON_ROUTES
from proxy.api.http import caller_of
from proxy.api.openapi import add_routes
from proxy.dialects import DIALECTS
from proxy.errors import ClientError, KvloopError, NoWorker, http_answer, openai_error
from proxy.workers.pool import Role

if TYPE_CHECKING:
    from proxy.app import App

_NOT_YET: dict[int | str, dict[str, Any]] = {
    503: {"description": "No decode worker has answered yet."}
}


def build(app: App) -> FastAPI:
    """The documented surface (``/docs``), apart from the generating routes."""
    client_side = FastAPI(
        title="kvloop",
        version=__version__,
        description="Stateful prefill/decode proxy before vLLM workers.",
    )
    add_probes(client_side, app, for_operators=not app.callers.required)
    in_openai_shape(client_side)

    @client_side.get("/v1/models", responses=_NOT_YET)
    async def list_models() -> JSONResponse:
        """Models that the decode workers serve."""
        if not app.models.known:
            raise NoWorker("No decode worker has answered yet.")
        return JSONResponse(app.models.page())

    @client_side.get(
        "/v1/models/{model:path}", responses={404: {"description": "No such model."}, **_NOT_YET}
    )
    async def one_model(model: str) -> JSONResponse:
        """One of them."""
        if not app.models.known:
            raise NoWorker("No decode worker has answered yet.")
        for entry in app.models.page()["data"]:
            if entry.get("id") == model:
                return JSONResponse(entry)
        raise ClientError(
            f"The model '{model[:200]}' does not exist.",
            status=404,
            param="model",
            code="model_not_found",
        )

    sessions.add_client_routes(client_side, app, _tenant_of)
    described = client_side.openapi

    def with_workers_routes() -> dict[str, Any]:
        return add_routes(described(), DIALECTS, JSON_ROUTES, keyed=app.callers.required)

    client_side.openapi = with_workers_routes  # type: ignore[method-assign]
    return client_side


def _tenant_of(request: Request) -> str:
    """Whose request this is."""
    return caller_of(request.scope).tenant


def add_probes(surface: FastAPI, app: App, *, for_operators: bool = True) -> None:
    """``/health``, ``/ready`` and, for operators, ``/metrics``.

    Where clients have to show a key, their port names no workers and gives no numbers.
    """
    pool, metrics = app.pool, app.metrics

    @surface.get("/health")
    async def health() -> dict[str, str]:
        """Is this process alive? Says nothing about workers."""
        return {"status": "ok"}

    @surface.get("/ready", responses={503: {"description": "No turn can be answered now."}})
    async def ready() -> JSONResponse:
        """Can turns be answered? 200 when a decode worker is healthy, else (or draining) 503.

        Without prefill workers or Redis turns are still answered, only without reuse: they show
        here and in the metrics, and do not take the proxy out of service.
        """
        admission = app.conductor.admission
        serving = pool.has(Role.DECODE) and not admission.draining
        status = 200 if serving else 503
        if not for_operators:
            return JSONResponse(
                {"ready": serving, "draining": admission.draining}, status_code=status
            )
        state: dict[str, Any] = {
            "ready": serving,
            "draining": admission.draining,
            "table": await app.table.ping(),
            "reuse": app.conductor.reuse_on,
            "workers": workers.describe(pool),
            "pairs": workers.blocked_pairs(pool),
        }
        return JSONResponse(state, status_code=status)

    if not for_operators:
        return

    @surface.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Prometheus text format."""
        app.gauges.refresh()
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)


def in_openai_shape(surface: FastAPI) -> None:
    """Every error of these routes has OpenAI's shape."""

    @surface.exception_handler(StarletteHTTPException)
    async def of_the_framework(request: Request, error: HTTPException) -> Response:
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

    @surface.exception_handler(RequestValidationError)
    async def of_a_field(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        # The first part says where ("body", "query"), the rest names the field.
        field = ".".join(str(part) for part in problem["loc"][1:]) or "body"
        return Response(
            openai_error(
                f"'{field}': {problem['msg']}.", type="invalid_request_error", param=field
            ),
            status_code=400,
            media_type="application/json",
        )

    @surface.exception_handler(KvloopError)
    async def of_ours(request: Request, error: KvloopError) -> Response:
        status, body, kind, headers = http_answer(error)
        return Response(body, status_code=status, media_type=kind, headers=headers)
