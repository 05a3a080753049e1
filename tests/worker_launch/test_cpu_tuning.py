"""The CPU tuning, as far as it can be seen without vLLM; its gain shows on real workers."""

from __future__ import annotations

import queue
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from worker_launch import cpu_tuning
from worker_launch.profiles import CPU_SMALL


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable nothing is touched, not even imported."""
    monkeypatch.delenv(cpu_tuning.SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    cpu_tuning.apply()


def test_the_cpu_profile_asks_for_it() -> None:
    """The variable of the profile is the one that is looked at."""
    assert {item.name: item.value for item in CPU_SMALL.environment}[cpu_tuning.SWITCH] == 1


def scheduler(**changes: Any) -> SimpleNamespace:
    state = {"requests": True, "unfinished": False, "finished": set(), "pushes": False, **changes}
    return SimpleNamespace(
        connector=SimpleNamespace(has_pending_push_work=lambda: state["pushes"]),
        has_requests=lambda: state["requests"],
        has_unfinished_requests=lambda: state["unfinished"],
        finished_req_ids=state["finished"],
    )


@pytest.mark.parametrize(
    ("changes", "rests"),
    [
        ({}, True),
        ({"requests": False}, False),
        ({"unfinished": True}, False),
        ({"finished": {"a"}}, False),
        ({"pushes": True}, False),
    ],
)
def test_the_engine_rests_only_with_nothing_but_pins(changes: dict[str, Any], rests: bool) -> None:
    """A live request, one to report or a transfer in flight keeps the loop at full speed."""
    assert cpu_tuning._only_pins_remain(scheduler(**changes)) is rests


def test_a_new_request_ends_the_rest_at_once() -> None:
    """The wait ends with the first item, which stays in the queue."""
    items: queue.Queue[int] = queue.Queue()
    threading.Timer(0.05, items.put, [1]).start()
    begun = time.monotonic()
    cpu_tuning._wait_for_item(items, timeout=30)
    assert time.monotonic() - begun < 10
    assert items.qsize() == 1
