"""[io] The little of HTTP that the hot path needs, directly on ASGI.

No framework stands between a worker's bytes and a client's socket: no middleware that buffers, no
task per chunk, and a client that leaves is noticed at every stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from proxy.errors import ClientError
from proxy.session.identity import NOBODY, Caller

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def caller_of(scope: Scope) -> Caller:
    """Whose request it is. The app puts it there before any route sees the request; routes that
    FastAPI serves find it as ``request.state.caller``."""
    caller = scope.get("state", {}).get("caller", NOBODY)
    assert isinstance(caller, Caller)
    return caller


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole request body. Raises ``ClientError`` (413) over ``limit`` bytes, ``ClientGone``."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> ClientError:
    return ClientError(
        f"The request body is larger than {limit} bytes.", status=413, code="request_too_large"
    )


class Response:
    """An answer in the making: ``begin`` once, ``write`` until ``last``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.writing_since = 0.0
        """Monotonic time at which the write now under way began; 0 between writes."""

    async def begin(self, content_type: str, headers: dict[str, str], status: int = 200) -> None:
        self.begun = True
        fields = [(b"content-type", content_type.encode())]
        fields += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        if content_type.startswith("text/event-stream"):
            # Middle boxes that buffer would undo streaming (nginx reads this header).
            fields += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        # A stamp for ``stalls``: a timer for each chunk would cost more than the chunk.
        self.writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.writing_since = 0.0

    def cut(self) -> None:
        """Drop the connection at once: closing it politely waits for what the client never takes.

        ASGI has no such call; uvicorn's ``send`` belongs to the object that holds the transport.
        """
        transport = getattr(getattr(self._send, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()


async def until_client_leaves(work: Awaitable[None], receive: Receive) -> None:
    """Run ``work``; cancel it when the client disconnects, and then raise ``ClientGone``.

    The request body must have been read: what ``receive`` gives next can only be a disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="client watcher")
    try:
        await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
