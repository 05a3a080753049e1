"""[io] Calls to one worker. Raises the ``WorkerError`` kinds, nothing else.

Closing the connection is how a request is aborted on vLLM: every path out of here closes it, unless
the answer was complete.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
from pydantic import SecretStr

from proxy.errors import WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.workers.http1 import (
    Broken,
    ConnectFailed,
    Connections,
    HttpError,
    Late,
    Response,
    Through,
)
from proxy.workers.pool import Worker

_NO_HEADERS: dict[str, str] = {}


class WorkerClient:
    """Shared connections to all workers."""

    def __init__(
        self,
        *,
        connect_timeout_seconds: float,
        api_key: SecretStr | None = None,
        ca_file: str | None = None,
    ) -> None:
        key = f"authorization: Bearer {api_key.get_secret_value()}\r\n" if api_key else ""
        self._connections = Connections(
            connect_timeout=connect_timeout_seconds, fields=key, ca_file=ca_file
        )

    async def close(self) -> None:
        self._connections.close()

    async def get(self, worker: Worker, path: str, *, timeout: float) -> bytes:
        """Body of a 200, for probes. ``WorkerUnreachable`` or ``WorkerFailed`` otherwise.

        On a connection of its own: whether one is to be had is part of a probe's question.
        """
        response, answer = await self._whole(
            worker, "GET", path, None, _NO_HEADERS, timeout, fresh=True, keep=False
        )
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
        """POST, and the JSON object of a 200. ``repeatable``: see ``post``."""
        answer = await self.post(
            worker, path, body, timeout=timeout, headers=headers, repeatable=repeatable
        )
        try:
            value = orjson.loads(answer)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise WorkerFailed(worker.name, 200, "answered no JSON object")
        return value

    async def post(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        timeout: float,
        headers: dict[str, str] | None = None,
        repeatable: bool = False,
    ) -> bytes:
        """POST, and the body of a 200.

        ``repeatable``: the call may reach the worker twice without harm, so a connection that was
        closed under it before a byte came back is answered with one more try on a fresh one.
        """
        headers = headers or _NO_HEADERS
        try:
            response, answer = await self._whole(worker, "POST", path, body, headers, timeout)
        except WorkerUnreachable as error:
            cause = error.__cause__
            if not repeatable or not isinstance(cause, Broken) or not cause.unanswered:
                raise
            response, answer = await self._whole(
                worker, "POST", path, body, headers, timeout, fresh=True
            )
        if response.status != 200:
            raise _refusal(worker, response, answer)
        return answer

    async def _whole(
        self,
        worker: Worker,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: float,
        fresh: bool = False,
        keep: bool = True,
    ) -> tuple[Response, bytes]:
        connections = self._connections
        origin = connections.origin(worker.url)
        head = origin.head(method, path, body, headers)
        try:
            response = await connections.request(
                origin, head, body, whole=True, timeout=timeout, fresh=fresh, keep=keep
            )
            try:
                return response, await response.whole(timeout)
            finally:
                response.close()
        except HttpError as error:
            raise _unreachable(worker, error, f"no whole answer in {timeout:g} s") from error

    def stream(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        first_byte_timeout: float,
        headers: dict[str, str] | None = None,
    ) -> _Stream:
        """POST whose 200 answer is read piece by piece; leaving the block closes the connection."""
        return _Stream(self, worker, path, body, first_byte_timeout, headers or _NO_HEADERS)

    @asynccontextmanager
    async def forward(
        self,
        worker: Worker,
        method: str,
        path: str,
        body: bytes | None,
        *,
        headers: dict[str, str],
        first_byte_timeout: float,
    ) -> AsyncIterator[tuple[int, str, Callable[[float], AsyncIterator[bytes]]]]:
        """Any request, any answer below 500: its status, its content type and its body, piece by
        piece, with the longest silence between two pieces as argument.

        A connection that was closed under the request before a byte came back is answered with one
        more try on a fresh one: nothing that is forwarded changes a worker.
        """
        async with AsyncExitStack() as stack:
            what = (worker, method, path, body, headers, first_byte_timeout)
            try:
                response = await stack.enter_async_context(self._opened(*what))
            except WorkerUnreachable as error:
                cause = error.__cause__
                if not isinstance(cause, Broken) or not cause.unanswered:
                    raise
                response = await stack.enter_async_context(self._opened(*what, fresh=True))
            if response.status >= 500:
                raise WorkerFailed(worker.name, response.status)

            async def pieces(timeout: float) -> AsyncIterator[bytes]:
                while data := await self.read_some(worker, response, timeout=timeout):
                    yield data

            yield response.status, response.content_type or "application/json", pieces

    @asynccontextmanager
    async def _opened(self, *what: Any, fresh: bool = False) -> AsyncIterator[Response]:
        response = await self._open(*what, fresh=fresh)
        try:
            yield response
        finally:
            response.close()

    async def _open(
        self,
        worker: Worker,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: float,
        *,
        fresh: bool = False,
    ) -> Response:
        """A response whose status is known; whoever has it closes it."""
        connections = self._connections
        origin = connections.origin(worker.url)
        head = origin.head(method, path, body, headers)
        response: Response | None = None
        try:
            response = await connections.request(
                origin, head, body, whole=False, timeout=timeout, fresh=fresh
            )
            await response.head(timeout)
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, HttpError):
                raise _unreachable(worker, error, f"no answer in {timeout:g} s") from error
            raise
        return response

    async def read_some(
        self,
        worker: Worker,
        response: Response,
        *,
        timeout: float,
        through: Through | None = None,
    ) -> bytes:
        """Whatever has arrived, at least one byte; empty at the end of the stream.

        ``through`` is called with each piece as it comes; what it takes is not returned.
        """
        try:
            return await response.some(timeout, through)
        except Late as error:
            raise _unreachable(worker, error, f"silent for {timeout:g} s") from error
        except HttpError as error:
            raise WorkerUnreachable(worker.name, f"stream broke: {error}") from error

    def ended(self, response: Response) -> bool:
        """Has all of the stream arrived and been read?"""
        return response.ended and not response.unread

    def arrived(self, response: Response) -> bytes:
        """What has arrived and was not read yet."""
        return response.arrived()


class _Stream:
    """``async with``: a 200's response. A class: a generator costs each turn several times more."""

    __slots__ = ("_call", "_client", "_response")

    def __init__(
        self,
        client: WorkerClient,
        worker: Worker,
        path: str,
        body: bytes,
        timeout: float,
        headers: dict[str, str],
    ) -> None:
        self._client = client
        self._call = worker, path, body, timeout, headers

    async def __aenter__(self) -> Response:
        worker, path, body, timeout, headers = self._call
        response = await self._client._open(worker, "POST", path, body, headers, timeout)
        if response.status != 200:
            try:
                answer = await response.whole(timeout)
            except HttpError as error:
                raise _unreachable(worker, error, f"no whole answer in {timeout:g} s") from error
            finally:
                response.close()
            raise _refusal(worker, response, answer)
        self._response = response
        return response

    async def __aexit__(self, *how: object) -> None:
        self._response.close()


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
