"""[io] Ask workers, proxy, Redis and this machine what they can say without being given work."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import socket
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvloop.doctor.facts import (
    NodeFacts,
    ProxyFacts,
    Reach,
    RedisFacts,
    TransferConfig,
    WorkerFacts,
    config_of_command,
)

_ENVIRONMENT_OF_INTEREST = ("UCX_TLS", "FI_PROVIDER")
"""Nothing else of a process's environment is looked at: it may hold secrets."""

_EFA_TOOLS = "/opt/amazon/efa/bin"


async def worker(session: aiohttp.ClientSession, role: str, url: str) -> WorkerFacts:
    try:
        async with session.get(url + "/health") as response:
            if response.status != 200:
                return WorkerFacts(role, url, error=f"GET /health answers {response.status}")
            ahead = _ahead(response.headers.get("Date"))
        version = (await _json(session, url + "/version") or {}).get("version")
        listed = (await _json(session, url + "/v1/models") or {}).get("data") or []
        async with session.get(url + "/metrics") as response:
            metrics = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return WorkerFacts(role, url, error=str(error) or type(error).__name__)
    return WorkerFacts(
        role,
        url,
        version=version,
        models=tuple(str(entry.get("id")) for entry in listed),
        max_model_len=listed[0].get("max_model_len") if listed else None,
        metrics=metrics,
        config=await _told_config(session, url) or local_config(url),
        clock_ahead_seconds=ahead,
    )


async def metrics_again(session: aiohttp.ClientSession, known: WorkerFacts) -> WorkerFacts:
    """The worker with a fresh metrics page, for which our connector's gauges are awaited."""
    for _ in range(10):
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.get(known.url + "/metrics") as response:
                known = replace(known, metrics=await response.text())
        if known.has_our_connector:
            break
        await asyncio.sleep(0.2)
    return known


async def _json(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    async with session.get(url) as response:
        if response.status != 200:
            return None
        with contextlib.suppress(ValueError, aiohttp.ContentTypeError):
            value = await response.json(content_type=None)
            return value if isinstance(value, dict) else None
    return None


async def _told_config(session: aiohttp.ClientSession, url: str) -> TransferConfig | None:
    """From /server_info, which only a worker in dev mode has."""
    info = await _json(session, url + "/server_info?config_format=json")
    config = ((info or {}).get("vllm_config") or {}).get("kv_transfer_config")
    return TransferConfig.of(config, {}, "/server_info") if isinstance(config, dict) else None


def _ahead(date: str | None) -> float | None:
    if date is None:
        return None
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(date).timestamp() - time.time()
    return None


def is_local(host: str) -> bool:
    """Whether an address is one of this machine's own: only those can be bound to."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def local_config(url: str) -> TransferConfig | None:
    """The configuration of the worker behind ``url``, if its process is one that we may look at."""
    parts = urlsplit(url)
    if parts.port is None or not is_local(parts.hostname or ""):
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            if "--kv-transfer-config" not in argv:
                continue
            raw = (process / "environ").read_bytes().decode("utf-8", "replace").split("\0")
            variables = dict(entry.split("=", 1) for entry in raw if "=" in entry)
            chosen = {k: v for k, v in variables.items() if k in _ENVIRONMENT_OF_INTEREST}
            if found := config_of_command(argv, chosen, parts.port):
                return found
    return None


async def node() -> NodeFacts:
    gpu, infiniband = _devices()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NodeFacts(gpu, infiniband, await _efa_domains(), soft == resource.RLIM_INFINITY)


def _devices() -> tuple[bool, bool]:
    return Path("/dev/nvidiactl").exists(), Path("/dev/infiniband").is_dir()


async def _efa_domains() -> int | None:
    tool = shutil.which("fi_info") or shutil.which("fi_info", path=_EFA_TOOLS)
    if tool is None:
        return None
    process = await asyncio.create_subprocess_exec(
        *(tool, "-p", "efa", "-t", "FI_EP_RDM"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    lines = output.decode("utf-8", "replace").splitlines()
    return len({line.strip() for line in lines if line.strip().startswith("domain:")})


async def proxy(session: aiohttp.ClientSession, url: str) -> ProxyFacts:
    try:
        async with session.get(url + "/ready") as response:
            state = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return ProxyFacts(url, error=str(error) or type(error).__name__)
    if not isinstance(state, dict) or "workers" not in state:
        return ProxyFacts(url, error="GET /ready is not answered by a kvloop proxy")
    return ProxyFacts(
        url,
        ready=state.get("ready") is True,
        table=state.get("table") is True,
        workers=tuple(state["workers"]),
    )


async def redis(url: str, timeout: float) -> RedisFacts:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client = Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
    try:
        await client.ping()
        began = time.perf_counter()
        await client.ping()
        round_trip = time.perf_counter() - began
        seconds, microseconds = await client.time()
        info = await client.info()
    except (RedisError, OSError, TimeoutError) as error:
        return RedisFacts(error=f"{type(error).__name__}: cannot be asked")
    finally:
        await client.aclose()
    return RedisFacts(
        version=f"{info.get('server_name', 'redis')} "
        f"{info.get('valkey_version') or info.get('redis_version')}",
        round_trip_seconds=round_trip,
        max_memory=int(info.get("maxmemory", 0)),
        eviction=str(info.get("maxmemory_policy", "")),
        persistent=bool(info.get("aof_enabled")),
        clock_ahead_seconds=seconds + microseconds / 1e6 - time.time(),
    )


async def reach(worker_role: str, at: tuple[str, int], timeout: float) -> Reach:
    host, port = at
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        return Reach(worker_role, host, port, error=str(error) or "no answer in time")
    writer.close()
    return Reach(worker_role, host, port)
