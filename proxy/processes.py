"""[io] ``--workers N``: a parent that starts N processes on one port and keeps them running.

Each child has a listening socket of its own on the same port (``SO_REUSEPORT``), among which the
kernel spreads new connections. The parent holds the sockets: while a dead child is replaced, its
clients' new connections wait instead of being refused. It serves nothing itself. What the children
share is Redis (one private server for all if none is given) and the files in which
prometheus-client keeps their metrics, so that any of them can show the sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import Process

from prometheus_client import multiprocess

from proxy import log
from proxy.server import admin_socket
from proxy.session.private_store import PrivateStore
from proxy.settings import Settings, SettingsError

_SOON_SECONDS = 10.0
"""A child that dies within this time of its start did not serve: settings, memory, a bug."""
_SOON_LIMIT = 3
"""Such deaths in a row after which the proxy ends, for whoever supervises it to see."""
_FAILED = 3
"""Exit code of a proxy that could not start, as uvicorn has it."""


def run(settings: Settings) -> int:
    """Serve with ``settings.workers`` processes until told to stop; the exit code."""
    sockets = _listen(settings)
    admin = admin_socket(settings)
    with tempfile.TemporaryDirectory(prefix="kvloop-metrics-") as metrics:
        return asyncio.run(_Parent(settings, sockets, admin, metrics).run())


def _listen(settings: Settings) -> list[socket.socket]:
    """One socket for each process. They listen once their process does."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # Without SO_REUSEPORT: with it, a second proxy on this port would take half the clients.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise SettingsError(
                f"kvloop: host, port: cannot listen on {settings.host} port {settings.port}: "
                f"{error.strerror} (KVLOOP_PORT or --port)"
            ) from None
        address = probe.getsockname()  # a port of 0 has become a real one
    sockets: list[socket.socket] = []
    for _ in range(settings.workers):
        each = socket.socket(family, kind, protocol)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind(address)
        sockets.append(each)
    return sockets


class _Parent:
    def __init__(
        self,
        settings: Settings,
        sockets: list[socket.socket],
        admin: socket.socket,
        metrics: str,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._admin = admin
        self._metrics = metrics
        self._children: dict[int, Process] = {}
        self._stopping = False
        self._failed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        store = None
        settings = self._settings
        if settings.redis_url is None:
            store = PrivateStore()
            settings = settings.model_copy(update={"redis_url": await store.start()})
        host, port = self._sockets[0].getsockname()[:2]
        log.event("parent_started", workers=settings.workers, host=host, port=port)
        try:
            codes = await asyncio.gather(
                *(self._keep_running(number, settings) for number in range(settings.workers))
            )
        finally:
            if store is not None:
                await store.stop()
        return _FAILED if self._failed else max(codes)

    def _stop(self) -> None:
        """Each signal is passed on: a child drains at the first and ends at the second."""
        self._stopping = True
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)

    async def _keep_running(self, number: int, settings: Settings) -> int:
        soon = 0
        code = 0
        while not self._stopping:
            started = time.monotonic()
            child = await self._start(number, settings)
            code = await child.wait()
            del self._children[number]
            multiprocess.mark_process_dead(child.pid, self._metrics)  # type: ignore[no-untyped-call]
            if self._stopping:
                break
            lived = time.monotonic() - started
            soon = soon + 1 if lived < _SOON_SECONDS else 0
            log.event("process_died", pid=child.pid, code=code, after_seconds=round(lived, 1))
            if soon >= _SOON_LIMIT:
                log.event("giving_up", deaths=soon)
                self._failed = True
                self._stop()
        # Nobody will accept here: who connects must find the others, or be refused.
        self._sockets[number].close()
        return code

    async def _start(self, number: int, settings: Settings) -> Process:
        files = self._sockets[number].fileno(), self._admin.fileno()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy.child", *map(str, files)),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=files,
            process_group=0,  # Ctrl-C reaches the parent only, which passes it on once
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics},
        )
        self._children[number] = child
        assert child.stdin is not None
        child.stdin.write(settings.model_dump_json().encode() + b"\n")
        if self._stopping:
            child.send_signal(signal.SIGTERM)  # told to stop while this one was being started
        return child
