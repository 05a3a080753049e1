"""[io] Our HTTP protocol with two limits that uvicorn lacks: size of a request's head, and time.

httptools gathers a head for as long as a client sends one, and uvicorn starts no clock before the
head is complete. A complete head that is too large is the app's to refuse; here it is one that does
not end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.api.http import protocol
from proxy.errors import openai_error
from proxy.settings import Settings


def limited_http(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol class for these settings."""

    class Limited(_LimitedHttp):
        max_head_bytes = settings.max_header_bytes
        head_seconds = settings.client_read_timeout_seconds

    return Limited


class _LimitedHttp(protocol):  # type: ignore[misc]  # known to uvicorn as an unnamed class
    max_head_bytes: int
    head_seconds: float
    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(
                    b"431 Request Header Fields Too Large",
                    f"The request's headers are larger than {self.max_head_bytes} bytes.",
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", "The request's headers did not arrive in time.")

    def _refuse(self, status: bytes, message: str) -> None:
        self._stop_timer()
        body = openai_error(message, type="invalid_request_error")
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        self.transport.close()
