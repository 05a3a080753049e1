"""[io] Ending tasks that run until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_SECONDS = 0.2


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    Once is not enough: before Python 3.12 ``asyncio.wait_for`` drops a cancellation that comes in
    the moment in which what it waits for is done, and the Redis client uses it for every command. A
    loop that lost its cancellation goes on, and whoever waits for its end waits for ever.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        await asyncio.gather(*ended, return_exceptions=True)  # what they raised is of no interest
