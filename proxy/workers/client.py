"""[io] HTTP calls to one worker. Raises the ``WorkerError`` kinds, nothing else.

Closing the connection is how a request is aborted on vLLM: every path out of here closes it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import orjson
from pydantic import SecretStr

from proxy.errors import WorkerFailed, WorkerRefused, WorkerUnreachable
from proxy.workers.pool import Worker

_KEEPALIVE_SECONDS = 3
"""Below vLLM's 5 (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``): the side that closes first must be ours, or a
request meets a socket the worker is just closing."""

_JSON = {"Content-Type": "application/json"}
_RETRYABLE = (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError)


class WorkerClient:
    """Shared connections to all workers."""

    def __init__(
        self,
        *,
        connect_timeout_seconds: float,
        api_key: SecretStr | None = None,
        ca_file: str | None = None,
    ) -> None:
        self._connect_timeout = connect_timeout_seconds
        key = {"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the default of 100 would cap concurrent streams
                keepalive_timeout=_KEEPALIVE_SECONDS,
                ttl_dns_cache=10,
                ssl=ssl.create_default_context(cafile=ca_file) if ca_file else True,
            ),
            headers=key,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            trust_env=False,  # worker traffic never goes through a proxy from the environment
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, worker: Worker, path: str, *, timeout: float) -> bytes:
        """Body of a 200. ``WorkerUnreachable`` or ``WorkerFailed`` otherwise."""
        async with self._open(worker, "GET", path, None, {}, timeout) as response:
            body = await self._read(worker, response, timeout)
            if response.status != 200:
                raise WorkerFailed(worker.name, response.status)
            return body

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
        try:
            return await self._call_once(worker, path, body, timeout, headers)
        except WorkerUnreachable as error:
            if not repeatable or not isinstance(error.__cause__, _RETRYABLE):
                raise
            return await self._call_once(worker, path, body, timeout, headers)

    async def _call_once(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        timeout: float,
        headers: dict[str, str] | None,
    ) -> dict[str, Any]:
        async with self._open(worker, "POST", path, body, headers or {}, timeout) as response:
            answer = await self._read(worker, response, timeout)
            await self._check(worker, response, answer)
        try:
            value = orjson.loads(answer)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise WorkerFailed(worker.name, response.status, "answered no JSON object")
        return value

    @asynccontextmanager
    async def stream(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        first_byte_timeout: float,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST whose 200 answer is read piece by piece; leaving the block closes the connection."""
        async with self._open(
            worker, "POST", path, body, headers or {}, first_byte_timeout
        ) as response:
            if response.status != 200:
                answer = await self._read(worker, response, first_byte_timeout)
                await self._check(worker, response, answer)
            yield response

    async def read_some(
        self, worker: Worker, response: aiohttp.ClientResponse, *, timeout: float
    ) -> bytes:
        """Whatever has arrived, at least one byte; empty at the end of the stream."""
        try:
            async with asyncio.timeout(timeout):
                return await response.content.readany()
        except TimeoutError as error:
            raise WorkerUnreachable(
                worker.name, f"silent for {timeout:g} s", timed_out=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnreachable(worker.name, f"stream broke: {_kind(error)}") from error

    def arrived(self, response: aiohttp.ClientResponse) -> bytes:
        """What has arrived and was not read yet."""
        with suppress(aiohttp.ClientError, OSError, RuntimeError):
            return response.content.read_nowait()
        return b""

    @asynccontextmanager
    async def _open(
        self,
        worker: Worker,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if body is not None:
            headers = {**_JSON, **headers}
        try:
            async with asyncio.timeout(timeout):
                response = await self._session.request(
                    method, worker.url + path, data=body, headers=headers, allow_redirects=False
                )
        except TimeoutError as error:
            connecting = isinstance(error, aiohttp.ClientError)
            message = "no connection in time" if connecting else f"no answer in {timeout:g} s"
            raise WorkerUnreachable(worker.name, message, timed_out=not connecting) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnreachable(worker.name, _kind(error)) from error
        try:
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _read(
        self, worker: Worker, response: aiohttp.ClientResponse, timeout: float
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await response.read()
        except TimeoutError as error:
            raise WorkerUnreachable(
                worker.name, f"no whole answer in {timeout:g} s", timed_out=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnreachable(worker.name, _kind(error)) from error

    async def _check(self, worker: Worker, response: aiohttp.ClientResponse, answer: bytes) -> None:
        if 400 <= response.status < 500:
            kind = response.headers.get("Content-Type", "application/json")
            raise WorkerRefused(worker.name, response.status, answer, kind)
        if response.status != 200:
            raise WorkerFailed(worker.name, response.status)

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
        piece, with the longest silence between two pieces as argument."""
        async with self._open(worker, method, path, body, headers, first_byte_timeout) as response:
            if response.status >= 500:
                raise WorkerFailed(worker.name, response.status)

            async def pieces(timeout: float) -> AsyncIterator[bytes]:
                while data := await self.read_some(worker, response, timeout=timeout):
                    yield data

            kind = response.headers.get("Content-Type", "application/json")
            yield response.status, kind, pieces


def refused_connection(error: BaseException) -> bool:
    """Did nobody listen at the worker's address?"""
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientConnectorError) and isinstance(
        cause.os_error, ConnectionRefusedError
    )


def _kind(error: BaseException) -> str:
    return type(error).__name__
