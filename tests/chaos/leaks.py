"""What a fault left behind, counted from outside: on workers, in Redis, in the kernel, in proxies.

Five things that an ended turn must not leave: a running request, pinned blocks that no record in
the table owns, a claimed handle that was neither pulled nor released, an open connection, a task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

import aiohttp
import psutil
import redis.asyncio as redis_asyncio

from proxy.session.holding import decode
from tests.chaos.worker import ChaosWorker

Link = tuple[Any, Any]
PinId = tuple[str, str]
"""Engine id and request id: what a handle names."""


@dataclass(frozen=True)
class Leaks:
    """Counts; all zero means that nothing was left."""

    running: int = 0
    """Requests on workers, and turns that proxies still count."""
    pins: int = 0
    """Handles that decode keeps blocks for and that were never in the table."""
    claimed: int = 0
    """Handles that were taken out of the table, and that decode still keeps blocks for."""
    connections: int = 0
    """Between clients and proxies, and between proxies and workers."""
    tasks: int = 0
    """In proxies: background work, and event-loop tasks beyond those of an idle proxy."""

    @property
    