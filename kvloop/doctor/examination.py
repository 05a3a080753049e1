"""[io] The whole examination: gather, converse, gather what the conversation pointed to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from kvloop.doctor import gather, probe
from kvloop.doctor.facts import Facts, ProbeFacts


@dataclass(frozen=True, slots=True)
class Request:
    """What to examine. Addresses without a slash at the end."""

    prefill: str
    decode: str
    proxy: str | None = None
    redis: str | None = None
    api_key: str | None = None
    session_expiry_seconds: float = 450
    pull_threshold: int = 64
    probe_tokens: int = 1024
    probe: bool = True
    timeout_seconds: float = 60


async def gather_facts(request: Request) -> Facts:
    headers = {"Authorization": f"Bearer {request.api_key}"} if request.api_key else {}
    short = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
        async with aiohttp.ClientSession(headers=headers, timeout=short, trust_env=False) as quick:
            prefill, decode, node = await asyncio.gather(
                gather.worker(quick, "prefill", request.prefill),
                gather.worker(quick, "decode", request.decode),
                gather.node(),
            )
            proxy = await gather.proxy(quick, request.proxy) if request.proxy else None
        redis = await gather.redis(request.redis, 5) if request.redis else None
        spoken = ProbeFacts()
        if request.probe and prefill.error is None and decode.error is None:
            spoken = await probe.converse(
                session,
                prefill,
                decode,
                tokens=max(request.probe_tokens, request.pull_threshold + 16),
                timeout=request.timeout_seconds,
            )
            # A worker shows some metrics only after its first request.
            decode = await gather.metrics_again(session, decode)
    channels = (("prefill", spoken.prefill_side_channel), ("decode", spoken.decode_side_channel))
    reach = [await gather.reach(role, at, 5) for role, at in channels if at is not None]
    return Facts(
        prefill=prefill,
        decode=decode,
        probe=spoken,
        node=node,
        session_expiry_seconds=request.session_expiry_seconds,
        pull_threshold=request.pull_threshold,
        proxy=proxy,
        redis=redis,
        reach=tuple(reach),
    )
