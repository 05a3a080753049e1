"""[io] Calls to one worker. Raises the ``WorkerError`` kinds, nothing else.

Closing the connection is how a request is aborted on vLLM: every path out of here closes it, unless
the answer was complete.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from proxy.errors import WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.workers.http1 import Broken, ConnectFailed, Connections, HttpError, Late, Response
from proxy.workers.pool import Worker

_NO_HEADERS: dict[str, str] = {}


class WorkerClient:
    """Shared connections to all workers."""

    def __init__(self, *, connect_timeout_seconds: float) -> None:
        self._connections = Connections(connect_timeout=connect_timeout_seconds)

    async def close(self) -> None:
        self._connections.close()

    async def get(self, worker: Worker, path: str, *, timeout: float) -> bytes:
        """Body of a 200. ``WorkerUnreachable`` or ``WorkerFailed`` otherwise."""
        response, answer = await self._whole(worker, "GET", path, None, _NO_HEADERS, timeout, False)
        if response.status != 200:
            raise WorkerFailed(worker.name, response.status)
        return answer

    async def call(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        timeout: float,
        headers: dict[str, str] | None = None,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """POST, and the JSON object of a 200.

        ``repeatable``: the call may reach the worker twice without harm, so a connection that was
        closed under it before a byte came back is answered with one more try on a fresh one.
        """
        headers = headers or _NO_HEADERS
        try:
            response, answer = await self._whole(
                worker, "POST", path, body, headers, timeout, False
            )
        except WorkerUnreachable as error:
            cause = error.__cause__
            if not repeatable or not isinstance(cause, Broken) or not cause.unanswered:
                raise
            response, answer = await self._whole(worker, "POST", path, body, headers, timeout, True)
        if response.status != 200:
            raise _refusal(worker, response, answer)
        try:
            value = orjson.loads(answer)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise WorkerFailed(worker.name, response.status, "answered no JSON object")
        return value

    async def _whole(
        self,
        worker: Worker,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: float,
        fresh: bool,
    ) -> tuple[Response, bytes]:
        connections = self._connections
        origin = connections.origin(worker.url)
        head = origin.head(method, path, body, headers)
        try:
            response = await connections.request(
                origin, head, body, whole=True, timeout=timeout, fresh=fresh
            )
            try:
                return response, await response.whole(timeout)
            finally:
                response.close()
        except HttpError as error:
            raise _unreachable(worker, error, f"no whole answer in {timeout:g} s") from error

    @asynccontextmanager
    async def stream(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        first_byte_timeout: float,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[Response]:
        """POST whose 200 answer is read piece by piece; leaving the block closes the connection."""
        connections = self._connections
        origin = connections.origin(worker.url)
        head = origin.head("POST", path, body, headers or _NO_HEADERS)
        try:
            response = await connections.request(
                origin, head, body, whole=False, timeout=first_byte_timeout
            )
        except HttpError as error:
            raise _unreachable(worker, error, "") from error
        try:
            try:
                await response.head(first_byte_timeout)
                answer = b"" if response.status == 200 else await response.whole(first_byte_timeout)
            except HttpError as error:
                late = f"no answer in {first_byte_timeout:g} s"
                raise _unreachable(worker, error, late) from error
            if response.status != 200:
                raise _refusal(worker, response, answer)
            yield response
        finally:
            response.close()

    async def read_some(self, worker: Worker, response: Response, *, timeout: float) -> bytes:
        """Whatever has arrived, at least one byte; empty at the end of the stream."""
        try:
            return await response.some(timeout)
        except Late as error:
            raise _unreachable(worker, error, f"silent for {timeout:g} s") from error
        except HttpError as error:
            raise WorkerUnreachable(worker.name, f"stream broke: {error}") from error

    def arrived(self, response: Response) -> bytes:
        """What has arrived and was not read yet."""
        return response.arrived()


def refused_connection(error: BaseException) -> bool:
    """Did nobody listen at the worker's address?"""
    cause = error.__cause__
    return isinstance(cause, ConnectFailed) and cause.refused


def _unreachable(worker: Worker, error: HttpError, late: str) -> WorkerUnreachable:
    if isinstance(error, Late) and not error.connecting:
        return WorkerUnreachable(worker.name, late, timed_out=True)
    return WorkerUnreachable(worker.name, str(error))


def _refusal(worker: Worker, response: Response, answer: bytes) -> WorkerRefused | WorkerFailed:
    if 400 <= response.status < 500:
        kind = response.content_type or "application/json"
        return WorkerRefused(worker.name, response.status, answer, kind)
    return WorkerFailed(worker.name, response.status)
