"""[io] The live page on the admin port, and the JSON behind it.

Each process of a proxy has a memory of its own; the page says whose it shows.

``/`` is the page, three files from ``proxy/live``; ``/live/stream`` tells it what happens, as
server-sent events. Nothing is loaded from elsewhere: it works without internet.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from proxy import __version__
from proxy.errors import ClientError, Overloaded
from proxy.workers.pool import Role, Worker

if TYPE_CHECKING:
    from proxy.app import App

_TICK_SECONDS = 1.0
_VIEWERS = 32
"""Open pages. Each costs a few kilobytes a second."""
_TURNS = 150
"""Turns that a page shows at first, and at most a tick."""
_SESSIONS = 60
_FILES = {
    "page.html": ("/", "text/html; charset=utf-8"),
    "page.css": ("/live/page.css", "text/css; charset=utf-8"),
    "page.js": ("/live/page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class Live:
    """What the page is told. ``close`` ends the streams, so that they do not hold up a stop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._closed = asyncio.Event()
        self._viewers = 0

    def close(self) -> None:
        self._closed.set()

    def snapshot(self) -> dict[str, Any]:
        """All that a page shows when it is opened."""
        recent = self._app.conductor.recent
        now = time.time()
        return {
            **self._state(now),
            "version": __version__,
            "turns": recent.newest(_TURNS)[::-1],
            "slices": [each.page() for each in recent.slices(now)],
        }

    def _state(self, now: float) -> dict[str, Any]:
        app = self._app
        admission, recent = app.conductor.admission, app.conductor.recent
        return {
            "now": round(now, 3),
            # Of several processes whichever is free answers the operators' port.
            "process": os.getpid(),
            "processes": app.settings.workers,
            "number": recent.number,
            "in_flight": admission.in_flight,
            "queued": admission.queued,
            "draining": admission.draining,
            "reuse": app.conductor.reuse_on,
            "workers": [self._worker(worker) for worker in app.pool.workers],
            "sessions": [session.page() for session in recent.sessions(_SESSIONS)],
        }

    def _worker(self, worker: Worker) -> dict[str, Any]:
        now = time.monotonic()
        paused = [
            what
            for what, so in (
                ("turns", not worker.in_favour(now)),
                ("pulls", not worker.pulls_allowed(now)),
                ("transfers", not worker.transfers_allowed(now)),
            )
            if so
        ]
        return {
            "name": worker.name,
            "role": worker.role,
            "healthy": worker.healthy,
            "paused": paused,
            "outstanding": worker.outstanding,
            "kv_blocks": worker.kv_blocks,
            "pinned_blocks": worker.pinned_blocks,
            "pin_limit_blocks": worker.pin_limit_blocks,
            "budget_blocks": self._app.conductor.retention.budget(worker)
            if worker.role is Role.DECODE
            else None,
            "error": worker.last_error or None,
        }

    def history(self, session: str) -> list[dict[str, Any]]:
        """The remembered turns of a session, oldest first. Raises ``ClientError`` (404)."""
        found = self._app.conductor.recent.history(session)
        if not found:
            raise ClientError(
                "No turn of this session is remembered.",
                status=404,
                param="session",
                code="unknown_session",
            )
        return found

    async def events(self) -> AsyncIterator[bytes]:
        """One ``snapshot``, then a ``tick`` a second."""
        self._viewers += 1
        try:
            told = self._app.conductor.recent.number
            yield _event("snapshot", self.snapshot())
            while not await self._stopping():
                recent, now = self._app.conductor.recent, time.time()
                tick = self._state(now)
                tick["turns"] = recent.since(told, _TURNS)
                tick["slices"] = [each.page() for each in recent.slices(now)[-2:]]
                told = recent.number
                yield _event("tick", tick)
        finally:
            self._viewers -= 1

    def admit(self) -> None:
        """Raises ``Overloaded`` when too many pages are open."""
        if self._viewers >= _VIEWERS:
            raise Overloaded("Too many live pages are open.", code="too_many", retry_after=10)

    async def _stopping(self) -> bool:
        try:
            async with asyncio.timeout(_TICK_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            return False
        return True


def add_live_page(surface: FastAPI, live: Live) -> None:
    """The page and its data."""
    for name, (path, kind) in _FILES.items():
        body = (resources.files("proxy") / "live" / name).read_bytes()
        surface.add_api_route(path, _file(body, kind), include_in_schema=False)

    @surface.get("/live")
    async def snapshot() -> Response:
        """What the live page shows, once: recent turns, sessions, workers."""
        return Response(orjson.dumps(live.snapshot()), media_type="application/json")

    @surface.get("/live/stream")
    async def stream() -> StreamingResponse:
        """The same as server-sent events: a snapshot, then what is new, every second."""
        live.admit()
        return StreamingResponse(
            live.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @surface.get("/live/sessions/{session}")
    async def history(session: str) -> Response:
        """The remembered turns of one session, oldest first."""
        page = {"turns": live.history(session)}
        return Response(orjson.dumps(page), media_type="application/json")


def _file(body: bytes, kind: str) -> Any:
    async def send() -> Response:
        return Response(body, media_type=kind, headers=_HEADERS)

    return send


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
