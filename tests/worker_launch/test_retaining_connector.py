"""The connector's book-keeping, on stand-ins for vLLM's classes (see ``vllm_stand_in``)."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from tests.worker_launch import vllm_stand_in
from worker_launch import vllm_compat

MODULES = (
    "worker_launch.connector.retaining_connector",
    "worker_launch.connector.connector_stats",
)


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The connector, imported over the stand-ins and forgotten afterwards."""
    parts = vllm_compat.NixlParts(
        vllm_stand_in.NixlPullConnector,
        vllm_stand_in.NixlStats,
        vllm_stand_in.NixlPromMetrics,
        "scheduler",
    )
    monkeypatch.setattr(vllm_compat, "nixl_parts", lambda: parts)
    for name in MODULES:
        sys.modules.pop(name, None)
    yield importlib.import_module(MODULES[0])
    for name in MODULES:
        sys.modules.pop(name, None)


@dataclass
class EngineRequest:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    aborted: bool = False
    prefill_stats: Any = field(
        default_factory=lambda: SimpleNamespace(
            num_local_cached_tokens=64, num_external_cached_tokens=100
        )
    )


@dataclass
class Engine:
    """A scheduler with 20 usable blocks of which half may be pinned."""

    connector: Any
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def finish(
        self, request: EngineRequest, blocks: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.blocks[request.request_id] = blocks
        self.connector.update_state_after_alloc(request, None, 0)
        kept, params = self.connector.request_finished_all_groups(request, (blocks,))
        return kept, params

    def sent(self, *request_ids: str) -> None:
        self.connector.update_connector_output(SimpleNamespace(finished_sending=set(request_ids)))

    @property
    def scheduler(self) -> vllm_stand_in.PullScheduler:
        scheduler: vllm_stand_in.PullScheduler = self.connector.connector_scheduler
        return scheduler


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(connector_module: ModuleType) -> MakeEngine:
    def make(**extra: Any) -> Engine:
        config = SimpleNamespace(get_from_extra_config=lambda key, default: extra.get(key, default))
        engine = Engine(connector_module.KvloopNixlConnector(config, "scheduler", None))
        pool = SimpleNamespace(num_gpu_blocks=21, null_block=SimpleNamespace(block_id=0))
        manager = SimpleNamespace(
            block_pool=pool, get_block_ids=lambda request_id: (engine.blocks[request_id],)
        )
        engine.connector.bind_kv_cache_manager(manager)
        return engine

    return make


def decode(name: str, **params: Any) -> EngineRequest:
    return EngineRequest(name, {"do_remote_prefill": True, **params})


def test_vllms_name_leads_to_our_class(connector_module: ModuleType) -> None:
    """vLLM asks for the name NixlConnector in its own checks, so ours answers to it."""
    assert connector_module.NixlConnector is connector_module.KvloopNixlConnector


def test_prefill_reports_where_its_tokens_came_from(make_engine: MakeEngine) -> None:
    """Prefill's handle says how many tokens its cache and how many decode supplied."""
    kept, handle = make_engine().finish(EngineRequest("p", {"do_remote_decode": True}), [1, 2])
    assert kept
    assert handle is not None
    assert (handle["kvloop_local_tokens"], handle["kvloop_pulled_tokens"]) == (64, 100)


def test_decode_reports_where_its_prompt_came_from(make_engine: MakeEngine) -> None:
    """A turn without prefill shows what decode's own cache supplied, and is kept with a lease."""
    engine = make_engine()
    kept, handle = engine.finish(EngineRequest("d", {"kvloop": 1}), [1, 2])
    assert kept
    assert handle is not None
    assert (handle["kvloop_local_tokens"], handle["kvloop_pulled_tokens"]) == (64, 100)
    assert "d" in engine.scheduler._reqs_in_batch
    assert "d" in engine.scheduler._reqs_need_send


def test_requests_without_parameters_are_left_alone(make_engine: MakeEngine) -> None:
    """Plain requests are neither tracked nor kept."""
    engine = make_engine()
    assert engine.finish(EngineRequest("x", None), [1]) == (False, None)
    assert engine.scheduler._reqs_in_batch == set()


def test_a_pin_gets_the_asked_lease(make_engine: MakeEngine) -> None:
    """Deadline, handle and workers agree on the lease, which the server's longest one caps; the
    caller that asked for one learns what it got."""
    engine = make_engine(ttl=60)
    for name, asked, expected in (("a", 5, 5), ("b", 999, 60), ("c", None, 60)):
        now = time.perf_counter()
        kept, handle = engine.finish(decode(name, kvloop_lease_seconds=asked), [1])
        assert kept
        assert handle is not None
        deadline = engine.scheduler._reqs_need_send[name]
        assert handle["remote_blocks_expiry_time"] == deadline
        assert now + expected <= deadline < now + expected + 5
        assert handle.get("kvloop_lease_seconds") == (None if asked is None else expected)


def test_a_request_with_neither_flag_is_tracked(make_engine: MakeEngine) -> None:
    """The workers then arm its deadline; untracked, it would be pinned for ever."""
    engine = make_engine()
    engine.finish(EngineRequest("local", {"kvloop": 1}), [1])
    assert "local" in engine.scheduler._reqs_in_batch
    assert "local" in engine.scheduler._reqs_need_send


@pytest.mark.parametrize(
    ("lease", "blocks", "reason"), [(0, 1, "lease_zero"), (None, 11, "over_share")]
)
def test_a_refused_pin_frees_at_once(
    make_engine: MakeEngine, lease: float | None, blocks: int, reason: str
) -> None:
    """The scheduler frees the blocks, the workers forget the request, the caller learns why."""
    engine = make_engine()
    request = decode("a", kvloop_lease_seconds=lease)
    assert engine.finish(request, list(range(1, 1 + blocks))) == (
        False,
        {"kvloop_pin_refused": reason},
    )
    assert "a" not in engine.scheduler._reqs_need_send
    assert "a" in engine.scheduler._reqs_not_processed


def test_pins_never_exceed_their_share(make_engine: MakeEngine) -> None:
    """Ten of twenty blocks may be pinned; shared ones and the null block cost nothing."""
    engine = make_engine()
    assert engine.finish(decode("a"), [0, 1, 2, 3, 4, 5, 6])[0]
    assert engine.finish(decode("b"), [1, 2, 3, 7, 8, 9, 10])[0]
    assert not engine.finish(decode("c"), [11])[0]
    engine.sent("a")
    assert engine.finish(decode("d"), [11])[0]


def test_an_aborted_request_holds_nothing(make_engine: MakeEngine) -> None:
    """vLLM keeps nothing then, and neither do the counts."""
    engine = make_engine()
    request = decode("a")
    request.aborted = True
    engine.finish(request, [1])
    assert engine.connector.get_kv_connector_stats().data["kvloop_pinned_blocks"] == [0]


def test_the_counts_follow_each_pin_to_its_end(make_engine: MakeEngine) -> None:
    """Kept, refused, read or expired: each is counted once, and gauges are the last value."""
    engine = make_engine()
    first = engine.connector.get_kv_connector_stats().data
    assert first["kvloop_usable_blocks"] == [20]
    assert first["kvloop_pin_limit_blocks"] == [10]
    engine.finish(decode("a"), [1, 2])
    engine.finish(decode("b", kvloop_lease_seconds=1e-9), [3])
    engine.finish(decode("c", kvloop_lease_seconds=0), [4])
    engine.sent("a", "b", "never heard of")
    data = engine.connector.get_kv_connector_stats().data
    assert data["kvloop_pins"] == [1, 1]
    assert data["kvloop_pins_released"] == [1]
    assert data["kvloop_pins_expired"] == [1]
    assert data["kvloop_pins_refused_lease_zero"] == [1]
    assert data["kvloop_pinned_blocks"] == [0]
    assert engine.connector.get_kv_connector_stats() is None


def test_a_worker_leaves_room_for_the_schedulers_numbers(connector_module: ModuleType) -> None:
    """vLLM adds the scheduler's stats to the workers', key by key."""
    config = SimpleNamespace(get_from_extra_config=lambda key, default: default)
    worker = connector_module.KvloopNixlConnector(config, "worker", None)
    assert worker.get_kv_connector_stats() is None
    worker.connector_worker.stats = vllm_stand_in.NixlStats({"transfer_duration": [0.5]})
    total = worker.get_kv_connector_stats()
    ours = connector_module.stats.KvloopConnectorStats()
    ours.add("kvloop_pins")
    total.aggregate(ours)
    assert total.data["transfer_duration"] == [0.5]
    assert total.data["kvloop_pins"] == [1]


@pytest.mark.parametrize("fraction", [0, 1.5])
def test_a_senseless_share_stops_the_start(make_engine: MakeEngine, fraction: float) -> None:
    """A bad setting is an error of the start and not of the first request."""
    with pytest.raises(ValueError, match="kvloop_max_pinned_fraction"):
        make_engine(kvloop_max_pinned_fraction=fraction)


def test_the_numbers_reach_prometheus(connector_module: ModuleType) -> None:
    """Gauges show the last value, counters add up, refusals carry their reason."""
    registry = prometheus_client.CollectorRegistry()

    def of(kind: Any) -> Any:
        return lambda **arguments: kind(registry=registry, **arguments)

    metrics = connector_module.KvloopNixlConnector.build_prom_metrics(
        None,
        (of(prometheus_client.Gauge), of(prometheus_client.Counter)),
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    numbers = connector_module.KvloopNixlConnector.build_kv_connector_stats()
    numbers.data["kvloop_pinned_blocks"] = [3, 5]
    numbers.data["kvloop_pins"] = [1, 1]
    numbers.data["kvloop_pins_refused_over_share"] = [1]
    metrics.observe(numbers.data, 0)
    text = prometheus_client.generate_latest(registry).decode()
    labels = 'engine="0",model_name="m"'
    assert f"vllm:kvloop_pinned_blocks{{{labels}}} 5.0" in text
    assert f"vllm:kvloop_pins_total{{{labels}}} 2.0" in text
    assert f'vllm:kvloop_pins_refused_total{{{labels},reason="over_share"}} 1.0' in text
    assert f'vllm:kvloop_pins_refused_total{{{labels},reason="lease_zero"}} 0.0' in text
