"""Ending background tasks."""

from __future__ import annotations

import asyncio

from proxy.tasks import end


async def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    """As ``asyncio.wait_for`` of Python 3.11 makes tasks do now and then."""
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end([task])
    assert task.cancelled()
    await end([task])
    await end([])
