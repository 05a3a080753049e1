"""[io] One process of the proxy: its ports, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator

import uvicorn

from proxy import log
from proxy.api.protocol import limited_http
from proxy.app import App
from proxy.settings import Settings, SettingsError

_LINGER_SECONDS = 1.0
"""Least time between the signal and the end: a request that was on its way when the signal came is
refused with a 503, which a client can read, where a closing socket would reset its connection."""
_CUT_SECONDS = 2
"""After the drain: for streams that are cut to close their workers' connections."""
_COLLECT_EVERY = 10_000
"""Objects. A turn leaves hardly any cycles; Python's own 700 is less than one turn makes."""


def admin_socket(settings: Settings) -> socket.socket:
    """The operators' port. Raises ``SettingsError`` when it is taken."""
    address = (settings.admin_host, settings.admin_port_or_next)
    family = socket.AF_INET6 if ":" in settings.admin_host else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        raise SettingsError(
            f"kvloop: admin_host, admin_port: cannot listen on {address[0]} port {address[1]}: "
            f"{error.strerror} (KVLOOP_ADMIN_PORT or --admin-port)"
        ) from None


class _AdminServer:
    """The operators' port, served by the same loop."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def serve_beside(self, app: App) -> None:
        config = uvicorn.Config(
            app.admin,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CUT_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="admin server")
        host, port = self._socket.getsockname()[:2]
        log.event("admin_listening", host=host, port=port)

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)


def _spare_the_collector() -> None:
    """Code and settings never become garbage: they are not looked through again and again.

    There are 76,000 such objects; measured, a full collection of them stops all streams for 50 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)


class Server(uvicorn.Server):
    """uvicorn that drains: while streams finish it still listens, and new turns get their 503.

    uvicorn's own way closes the listening socket first, so that new requests meet a refused
    connection, and raises the signal again at the end, so that the exit code is not 0.
    """

    def __init__(self, app: App, settings: Settings, admin: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http=limited_http(settings),
                lifespan="on",
                log_config=None,
                access_log=False,  # the turn log says more, once a turn
                server_header=False,
                proxy_headers=False,  # nothing here looks at the client's address
                date_header=False,
                timeout_graceful_shutdown=_CUT_SECONDS,
                ssl_certfile=settings.tls_cert_file,
                ssl_keyfile=settings.tls_key_file,
                h11_max_incomplete_event_size=None,
            )
        )
        self._app = app
        self._admin = _AdminServer(admin)
        self._drain_seconds = settings.drain_seconds
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._admin.serve_beside(self._app)
            _spare_the_collector()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets=sockets)
        await self._admin.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _asked_to_stop(self) -> None:
        """The first signal drains; a second one stops at once."""
        if self._drain is not None or not self.started:
            self.should_exit = True
            return
        self._drain = asyncio.create_task(self._drain_and_exit(), name="drain")

    async def _drain_and_exit(self) -> None:
        try:
            async with asyncio.timeout(self._drain_seconds):
                await asyncio.gather(self._app.drain(), asyncio.sleep(_LINGER_SECONDS))
        except TimeoutError:
            log.event("drain_timeout", cut=self._app.conductor.admission.in_flight)
        self.should_exit = True

    def serve_until_stopped(self, sockets: list[socket.socket] | None = None) -> int:
        """Serve, on ``sockets`` if there are any; the exit code of the process."""
        self.run(sockets)
        return 0 if self.started else 3  # as uvicorn.run does
