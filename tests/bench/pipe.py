"""The least that any relay in this process model costs: bytes from one socket to another.

``python -m tests.bench.pipe --port N --to M``. No HTTP, no prefill, nothing looked at: what kvloop
and other routers cost beyond this is theirs, and this is the kernel's and the event loop's.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvloop


class Half(asyncio.Protocol):
    """One side; what it reads the other side writes."""

    def __init__(self, other: Half | None = None) -> None:
        self.other = other
        self.early = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Front(Half):
    """A client's side: connects to the worker."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self.other = await loop.create_connection(lambda: Half(self), "127.0.0.1", self._port)
        self.other.transport.write(self.early)


async def serve(port: int, to: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Front(to), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--to", type=int, required=True)
    chosen = options.parse_args()
    uvloop.run(serve(chosen.port, chosen.to))


if __name__ == "__main__":
    main()
