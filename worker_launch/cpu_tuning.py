"""[io] Lets a pair of vLLM CPU workers share a few cores: no spinning, no stalls.

vLLM's CPU backend and NIXL's progress thread are written for a worker that owns its cores. Two
workers on one small machine then starve each other. Three mends, each for one cause; all of them
are off unless ``KVLOOP_CPU_TUNING=1``, and none is meant for a GPU worker.

``apply`` belongs in every process of the worker (entry point group ``vllm.general_plugins``). It
checks what it is about to wrap and raises ``UnknownVllm`` when vLLM or NIXL has changed shape,
because a worker that runs with half of this would look healthy and stall under load.
"""

from __future__ import annotations

import inspect
import logging
import os
import queue
from typing import Any

SWITCH = "KVLOOP_CPU_TUNING"

# How long NIXL's progress thread sleeps when no file descriptor wakes it, in microseconds. Data
# wakes it at once through the descriptors; the sleep is only NIXL's fallback for wake-ups that UCX
# loses.
PROGRESS_DELAY_US = 5_000

# How long an engine that has nothing but pins waits for a new request before it looks at its
# transfers again, in seconds. It delays nothing but the freeing of a pin that was read, released or
# has expired.
PINNED_POLL_S = 0.2

logger = logging.getLogger("vllm.kvloop")


class UnknownVllm(RuntimeError):
    """vLLM or NIXL does not look like the version this module was written for."""


def apply() -> None:
    """Tune this process, if the environment asks for it. Safe to call more than once."""
    if os.environ.get(SWITCH) != "1":
        return
    _rest_the_progress_thread()
    _leave_threads_unpinned()
    _rest_while_only_pins_remain()


def _rest_the_progress_thread() -> None:
    """Give NIXL's progress thread a sleep.

    The Python ``nixl_agent`` writes ``pthrDelay = 0`` into its agent config, and the UCX backend
    hands that to poll(2) as the timeout: the thread spins, one whole core for each idle worker. The
    config class is replaced by a subclass that turns that 0 into ``PROGRESS_DELAY_US``.
    """
    from vllm.distributed import nixl_utils

    # Looking it up makes vLLM import NIXL, after it has set the limits that UCX reads at that
    # moment.
    if nixl_utils.NixlWrapper is None:
        raise UnknownVllm("NIXL is not installed, but the CPU tuning was asked for")
    from nixl import _api

    bindings: Any = getattr(_api, "nixlBind", None)
    stock = getattr(bindings, "nixlAgentConfig", None)
    if stock is None or not hasattr(stock, "pthrDelay"):
        raise UnknownVllm("nixl._api.nixlBind.nixlAgentConfig has no pthrDelay")
    if "pthrDelay" not in inspect.getsource(_api.nixl_agent.__init__):
        raise UnknownVllm(
            "nixl_agent does not set pthrDelay any more: this mend may be superfluous"
        )
    if getattr(stock, "kvloop_rests", False):
        return
    stock_delay = stock.pthrDelay

    class RestingAgentConfig(stock):  # type: ignore[misc, valid-type]
        kvloop_rests = True

        @property
        def pthrDelay(self) -> int:
            return int(stock_delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            stock_delay.__set__(self, microseconds or PROGRESS_DELAY_US)

    bindings.nixlAgentConfig = RestingAgentConfig


def _leave_threads_unpinned() -> None:
    """Keep the NIXL connector from moving the computing thread to the machine's last core.

    On CPU the connector's worker calls ``sched_setaffinity(0, last core of every NUMA node)`` to
    give the transfers a core of their own. But the caller is the thread that runs the model, and
    all threads that it starts later (NIXL, UCX) inherit the mask. With two workers on one machine
    both models and both sets of transfer threads then share that one core while the others are
    free. The connector pins nothing when the platform names no cores.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.__dict__.get("discover_numa_topology")
    if not isinstance(stock, classmethod):
        raise UnknownVllm("CpuPlatform.discover_numa_topology is not a class method")

    def no_reserved_cores(cls: type) -> list[list[int]]:
        return []

    CpuPlatform.discover_numa_topology = classmethod(no_reserved_cores)


def _rest_while_only_pins_remain() -> None:
    """Let the engine loop sleep while all that it has is pinned blocks.

    A finished request whose blocks are pinned stays in ``scheduler.requests``, so
    ``has_requests()`` is true, the loop never blocks on its input queue, and the engine takes an
    empty step every millisecond until the lease ends (480 s by default on D). The steps are needed,
    because they notice that a pin was read or has expired, but not a thousand times a second. A new
    request ends the wait at once.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    stock = EngineCoreProc.__dict__.get("_process_engine_step")
    if getattr(stock, "kvloop_rests", False):
        return
    source = inspect.getsource(stock) if stock is not None else ""
    if "self.scheduler.has_requests()" not in source or "return model_executed" not in source:
        raise UnknownVllm("EngineCoreProc._process_engine_step is not the one this module knows")
    if "input_queue = queue.Queue" not in inspect.getsource(EngineCoreProc.__init__):
        raise UnknownVllm("EngineCoreProc has no input_queue of the known kind")
    if "self.connector" not in inspect.getsource(Scheduler.has_finished_requests):
        raise UnknownVllm("the scheduler no longer counts kept requests as finished ones")

    def process_engine_step(self: Any) -> bool:
        model_executed: bool = stock(self)
        if not model_executed and self.is_running() and _only_pins_remain(self.scheduler):
            _wait_for_item(self.input_queue, PINNED_POLL_S)
        return model_executed

    process_engine_step.kvloop_rests = True  # type: ignore[attr-defined]
    EngineCoreProc._process_engine_step = process_engine_step


def _only_pins_remain(scheduler: Any) -> bool:
    """Whether finished requests that the connector keeps are all that holds the engine awake."""
    connector = scheduler.connector
    return bool(
        connector is not None
        and scheduler.has_requests()
        and not scheduler.has_unfinished_requests()
        # The worker still has to be told of requests that finished in this step.
        and not scheduler.finished_req_ids
        and not connector.has_pending_push_work()
    )


def _wait_for_item(items: queue.Queue[Any], timeout: float) -> None:
    """Return when ``items`` has something, or after ``timeout`` seconds. Takes nothing out."""
    with items.not_empty:
        items.not_empty.wait_for(items.queue.__len__, timeout)
