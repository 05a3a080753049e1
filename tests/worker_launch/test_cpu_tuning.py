"""The CPU tuning, as far as it can be seen without vLLM; its gain shows on real workers."""

from __future__ import annotations

import queue
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
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


class AgentConfig:
    def __init__(self) -> None:
        self._delay = -1

    @property
    def pthrDelay(self) -> int:
        return self._delay

    @pthrDelay.setter
    def pthrDelay(self, microseconds: int) -> None:
        self._delay = microseconds


class Agent:
    """As NIXL's Python agent: takes the config class from ``nixlBind`` and sets no delay."""

    def __init__(self) -> None:
        self.config = sys.modules["nixl._api"].nixlBind.nixlAgentConfig()
        self.config.pthrDelay = 0


class AgentWithoutDelay:
    def __init__(self) -> None:
        pass


class Platform:
    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        return [[0, 1]]


class Scheduler:
    def has_finished_requests(self) -> bool:
        return self.connector is not None  # type: ignore[attr-defined, no-any-return]


class SchedulerWithoutPins:
    def has_finished_requests(self) -> bool:
        return False


class EngineCoreProc:
    def __init__(self) -> None:
        self.input_queue = queue.Queue[Any]()
        self.scheduler = scheduler()

    def is_running(self) -> bool:
        return True

    def _process_engine_step(self) -> bool:
        model_executed = False
        if not model_executed and self.scheduler.has_requests():
            time.sleep(0.001)
        return model_executed


class EngineWithOtherStep(EngineCoreProc):
    def _process_engine_step(self) -> bool:
        return False


class EngineWithoutQueue(EngineCoreProc):
    def __init__(self) -> None:
        pass


Modules = dict[str, ModuleType]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """What ``apply`` imports, as stand-ins of the known shape, and the switch set."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.nixl_utils": {"NixlWrapper": Agent},
        "vllm.platforms": {},
        "vllm.platforms.cpu": {"CpuPlatform": type("CpuPlatform", (), dict(vars(Platform)))},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine": {},
        "vllm.v1.engine.core": {"EngineCoreProc": derived(EngineCoreProc)},
        "nixl": {},
        "nixl._api": {
            "nixlBind": SimpleNamespace(nixlAgentConfig=AgentConfig),
            "nixl_agent": Agent,
        },
    }
    made = {}
    for name, values in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(values)
        monkeypatch.setitem(sys.modules, name, made[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    monkeypatch.setenv(cpu_tuning.SWITCH, "1")
    return made


def derived(engine: type[EngineCoreProc]) -> type[EngineCoreProc]:
    """A class with the same step in its own dictionary, so that wrapping it touches no other."""
    step = {"_process_engine_step": engine._process_engine_step}
    return type("EngineCoreProc", (engine,), step)


def test_each_mend_takes_hold_once(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread rests, no core is reserved, and the engine waits, also after a second call."""
    cpu_tuning.apply()
    step = modules["vllm.v1.engine.core"].EngineCoreProc._process_engine_step
    cpu_tuning.apply()
    assert Agent().config.pthrDelay == cpu_tuning.PROGRESS_DELAY_US
    assert modules["vllm.platforms.cpu"].CpuPlatform.discover_numa_topology() == []
    engine = modules["vllm.v1.engine.core"].EngineCoreProc
    assert engine._process_engine_step is step
    waits: list[float] = []
    monkeypatch.setattr(cpu_tuning, "_wait_for_item", lambda items, limit: waits.append(limit))
    assert engine()._process_engine_step() is False
    assert waits == [cpu_tuning.PINNED_POLL_S]


def test_a_delay_that_nixl_sets_itself_is_kept(modules: Modules) -> None:
    """Only the spinning 0 is replaced."""
    cpu_tuning.apply()
    config = modules["nixl._api"].nixlBind.nixlAgentConfig()
    config.pthrDelay = 70
    assert config.pthrDelay == 70


@pytest.mark.parametrize(
    ("module", "name", "value", "word"),
    [
        ("vllm.distributed.nixl_utils", "NixlWrapper", None, "not installed"),
        ("nixl._api", "nixlBind", SimpleNamespace(nixlAgentConfig=object), "pthrDelay"),
        ("nixl._api", "nixl_agent", AgentWithoutDelay, "superfluous"),
        ("vllm.platforms.cpu", "CpuPlatform", object, "discover_numa_topology"),
        ("vllm.v1.engine.core", "EngineCoreProc", EngineWithOtherStep, "_process_engine_step"),
        ("vllm.v1.engine.core", "EngineCoreProc", derived(EngineWithoutQueue), "input_queue"),
        ("vllm.v1.core.sched.scheduler", "Scheduler", SchedulerWithoutPins, "scheduler"),
    ],
)
def test_an_unknown_shape_is_refused(
    modules: Modules, module: str, name: str, value: object, word: str
) -> None:
    """A worker with half of the mends would look healthy and stall, so it must not start."""
    setattr(modules[module], name, value)
    with pytest.raises(cpu_tuning.UnknownVllm, match=word):
        cpu_tuning.apply()
