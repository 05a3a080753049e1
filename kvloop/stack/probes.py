"""[io] Does a part answer? Two questions, each asked once; the supervisor asks again."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from kvloop.stack.plan import ReadyWhen

_LARGEST_BODY = 2**20
"""Bytes; a readiness answer has a line for each worker."""


async def answers(ready_when: ReadyWhen, target: str, timeout_seconds: float) -> bool:
    """Whether the part at ``target`` is ready now. A part that cannot be asked is not."""
    try:
        async with asyncio.timeout(timeout_seconds):
            match ready_when:
                case ReadyWhen.HTTP_OK:
                    return await _get(target) is not None
                case ReadyWhen.PROXY_SERVES:
                    return _all_healthy(await _get(target))
                case ReadyWhen.REDIS_PONG:
                    return await _redis_pong(target)
                case ReadyWhen.FINISHED:
                    return False
    except (OSError, EOFError, TimeoutError):
        return False


def _all_healthy(body: bytes | None) -> bool:
    if body is None:
        return False
    try:
        workers = json.loads(body).get("workers", ())
        return all(worker.get("healthy", True) for worker in workers)
    except (ValueError, AttributeError):
        # Not the proxy's answer; its 200 is all there is to go by.
        return True


async def _get(url: str) -> bytes | None:
    """The body of a 200, else None. HTTP/1.0, so that the body ends with the connection."""
    # By hand: an HTTP client takes longer to import than this takes to run.
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        fields = head.split(maxsplit=2)
        if len(fields) < 2 or fields[1] != b"200":
            return None
        return await reader.read(_LARGEST_BODY)
    finally:
        writer.close()


async def _redis_pong(url: str) -> bool:
    reader, writer = await asyncio.open_unix_connection(urlsplit(url).path)
    try:
        writer.write(b"*1\r\n$4\r\nPING\r\n")
        await writer.drain()
        return (await reader.readline()).startswith(b"+PONG")
    finally:
        writer.close()
