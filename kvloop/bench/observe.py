"""[io] What workers and our own proxies say of themselves, read and never relied on.

A page or a metric that is missing makes a figure unknown; it never fails a run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvloop.bench.records import Sample, Transfer, WorkerInfo
from kvloop.doctor.facts import metric_label, metric_total

_BYTES = "vllm:nixl_bytes_transferred_sum"
_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
_PINNED = "vllm:kvloop_pinned_blocks"
_USAGE = "vllm:kv_cache_usage_perc"
_CACHE = "vllm:cache_config_info"
_PATIENCE = aiohttp.ClientTimeout(total=5)


@dataclass(frozen=True)
class Counters:
    """A worker's NIXL counters as a reader; what it never counted is zero."""

    bytes: float
    seconds: float

    def since(self, before: Counters) -> Transfer:
        return Transfer(self.bytes - before.bytes, self.seconds - before.seconds)


async def page(session: aiohttp.ClientSession, url: str, path: str = "/metrics") -> str | None:
    try:
        async with session.get(url + path, timeout=_PATIENCE) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


async def counters(session: aiohttp.ClientSession, urls: Sequence[str]) -> Counters | None:
    """Sums over these workers; None if one did not answer."""
    pages = await asyncio.gather(*(page(session, url) for url in urls))
    if not pages or any(text is None for text in pages):
        return None
    return Counters(
        sum(metric_total(text, _BYTES) or 0.0 for text in pages if text),
        sum(metric_total(text, _SECONDS) or 0.0 for text in pages if text),
    )


async def worker(session: aiohttp.ClientSession, url: str, role: str) -> WorkerInfo:
    """What a worker's ``/metrics`` and ``/version`` say."""
    text = await page(session, url) or ""
    version = await page(session, url, "/version")
    try:
        number = str(json.loads(version or "{}").get("version", ""))
    except ValueError:
        number = ""
    caching = metric_label(text, _CACHE, "enable_prefix_caching")
    return WorkerInfo(
        name=url.split("://", 1)[-1],
        role=role,
        block_size=_number(metric_label(text, _CACHE, "block_size")),
        blocks=_number(metric_label(text, _CACHE, "num_gpu_blocks")),
        prefix_cache=None if caching is None else caching.lower() == "true",
        version=number,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


async def sample(
    session: aiohttp.ClientSession, url: str, now: float, workload: str
) -> Sample | None:
    text = await page(session, url)
    if text is None:
        return None
    return Sample(
        now,
        url.split("://", 1)[-1],
        metric_total(text, _PINNED),
        metric_total(text, _USAGE),
        workload,
    )


def legs_by_request(log: Path) -> Mapping[str, Mapping[str, float]]:
    """Request id -> seconds of each call to a worker, from a proxy's turn log."""
    found: dict[str, Mapping[str, float]] = {}
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        if '"turn"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        legs = event.get("legs_ms")
        if event.get("event") == "turn" and isinstance(legs, dict):
            found[str(event.get("request"))] = {
                str(leg): value / 1000
                for leg, value in legs.items()
                if isinstance(value, int | float)
            }
    return found
