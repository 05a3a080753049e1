"""[io] The probe loop: asks each worker how it is and tells the pool.

``/health`` decides about service. Each probe also reads the load from ``/metrics``. What a worker
is (``read_facts``, vLLM version, served models, transfer settings) is read when it comes (back)
into service and now and then after; a new process start time means that every block the old
process held is gone. ``/server_info`` answers only in vLLM's development mode: what it alone says
stays unknown elsewhere.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import orjson

from proxy import log
from proxy.errors import WorkerError, WorkerFailed
from proxy.tasks import end
from proxy.workers.client import WorkerClient, refused_connection
from proxy.workers.pool import Role, Worker

_FACTS_EVERY = 5
"""Probes between two readings of /metrics and /v1/models: a restart shows within 10 s, and sooner
by the engine id of the next handle."""

_START_TIME = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)", re.M)
_CACHE_INFO = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.M)
_PIN_LIMIT = re.compile(rb"^vllm:kvloop_pin_limit_blocks(?:\{[^}]*\})? ([0-9.e+]+)", re.M)
_LOAD = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
    rb"(?:\{[^}]*\})? ([0-9.e+-]+)",
    re.M,
)
_PINNED = re.compile(rb"^vllm:kvloop_pinned_blocks(?:\{[^}]*\})? ([0-9.e+]+)", re.M)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself; None or empty where it says nothing."""

    epoch: str
    block_size: int | None
    kv_blocks: int | None
    pin_limit_blocks: int | None = None
    prefix_caching: bool | None = None
    cache_dtype: str = ""
    engines: int | None = None
    pinned_blocks: int | None = None


def read_facts(metrics: bytes) -> WorkerFacts:
    """Facts from a vLLM ``/metrics`` page."""
    start = _START_TIME.search(metrics)
    infos = _CACHE_INFO.findall(metrics)
    # One engine each with data parallelism; the worker's numbers are their sums.
    pin_limit = sum(int(float(value)) for value in _PIN_LIMIT.findall(metrics))
    pinned = [int(float(value)) for value in _PINNED.findall(metrics)]
    labels = dict(_LABEL.findall(infos[0])) if infos else {}
    caching = labels.get(b"enable_prefix_caching")
    return WorkerFacts(
        epoch=start.group(1).decode() if start else "",
        block_size=_integer(labels.get(b"block_size")),
        kv_blocks=_integer(labels.get(b"num_gpu_blocks")),
        pin_limit_blocks=pin_limit or None,
        prefix_caching=None if caching is None else caching == b"True",
        cache_dtype=labels.get(b"cache_dtype", b"").decode(),
        engines=len(infos) or None,
        pinned_blocks=sum(pinned) if pinned else None,
    )


def read_load(metrics: bytes) -> tuple[int, int, float]:
    """Requests running and waiting, and the share of KV blocks in use: of the fullest engine."""
    running = waiting = 0
    usage = 0.0
    for name, value in _LOAD.findall(metrics):
        if name == b"num_requests_running":
            running += int(float(value))
        elif name == b"num_requests_waiting":
            waiting += int(float(value))
        else:
            usage = max(usage, float(value))
    return running, waiting, usage


def read_transfer(server_info: Any) -> dict[str, Any]:
    """The transfer settings in ``/server_info?config_format=json``; empty where there are none.

    Written as fields of ``Worker``.
    """
    config = server_info.get("vllm_config", server_info) if isinstance(server_info, dict) else {}
    transfer = config.get("kv_transfer_config") if isinstance(config, dict) else None
    if not isinstance(transfer, dict):
        return {}
    extra = transfer.get("kv_connector_extra_config")
    both_ways = extra.get("bidirectional_kv_xfer") if isinstance(extra, dict) else None
    name = transfer.get("kv_connector")
    modes = {"NixlConnector": "pull", "NixlPullConnector": "pull", "NixlPushConnector": "push"}
    return {
        "bidirectional": bool(both_ways),
        "transfer_mode": modes.get(name, "") if isinstance(name, str) else "",
        "load_failure_policy": str(transfer.get("kv_load_failure_policy") or ""),
    }


def _integer(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None


class ModelList:
    """The models that decode workers serve, as ``/v1/models`` shows them."""

    def __init__(self) -> None:
        self._by_worker: dict[str, list[dict[str, Any]]] = {}
        self._names: set[Any] = set()

    def forget(self, worker: str) -> None:
        self._by_worker.pop(worker, None)
        self._names = {e.get("id") for each in self._by_worker.values() for e in each}

    def update(self, worker: str, entries: list[dict[str, Any]]) -> None:
        self._by_worker[worker] = entries
        self._names = {e.get("id") for each in self._by_worker.values() for e in each}

    @property
    def known(self) -> bool:
        return bool(self._by_worker)

    def serves(self, model: str) -> bool:
        return model in self._names

    def page(self) -> dict[str, Any]:
        merged = {e.get("id"): e for entries in self._by_worker.values() for e in entries}
        return {"object": "list", "data": list(merged.values())}


class HealthLoop:
    """One task per worker, so that a hanging one delays no other."""

    def __init__(
        self,
        client: WorkerClient,
        models: ModelList,
        *,
        interval: float,
        timeout: float,
        failures: int,
    ) -> None:
        self._client = client
        self._models = models
        self._interval = interval
        self._timeout = timeout
        self._failures = failures
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unasked: set[str] = set()
        self._all_asked = asyncio.Event()

    async def first_round(self) -> None:
        """Return when every worker has been asked once; each question has its time limit."""
        if self._unasked:
            await self._all_asked.wait()

    def watch(self, worker: Worker) -> None:
        """Probe this worker from now on."""
        self._unasked.add(worker.name)
        self._all_asked.clear()
        self._tasks[worker.name] = asyncio.create_task(
            self._watch(worker), name=f"health {worker.name}"
        )

    def forget(self, worker: Worker) -> None:
        """It has left the pool."""
        if task := self._tasks.pop(worker.name, None):
            task.cancel()
        self._models.forget(worker.name)
        self._unasked.discard(worker.name)
        if not self._unasked:
            self._all_asked.set()

    async def stop(self) -> None:
        await end(self._tasks.values())

    async def _watch(self, worker: Worker) -> None:
        probes = 0
        while True:
            await self.probe(worker, facts=probes % _FACTS_EVERY == 0)
            probes += 1
            if worker.name in self._unasked:
                self._unasked.discard(worker.name)
                if not self._unasked:
                    self._all_asked.set()
            await asyncio.sleep(self._interval)

    async def probe(self, worker: Worker, *, facts: bool) -> None:
        try:
            await self._client.get(worker, "/health", timeout=self._timeout)
            page = await self._client.get(worker, "/metrics", timeout=self._timeout)
            worker.load_seen(*read_load(page))
            if facts or not worker.healthy:
                await self._learn(worker, page)
        except WorkerError as error:
            refused = refused_connection(error)
            if worker.probe_failed(str(error), refused=refused, limit=self._failures):
                log.event("worker_down", worker=worker.name, role=worker.role, error=str(error))
            return
        if worker.probe_succeeded():
            log.event(
                "worker_up",
                worker=worker.name,
                role=worker.role,
                block_size=worker.block_size,
                kv_blocks=worker.kv_blocks,
                version=worker.version,
                retains=worker.retains,
            )

    async def _learn(self, worker: Worker, page: bytes) -> None:
        facts = read_facts(page)
        new = not worker.healthy or facts.epoch != worker.epoch
        if worker.epoch and facts.epoch and facts.epoch != worker.epoch:
            log.event("worker_restarted", worker=worker.name, role=worker.role)
            worker.restarted()
        worker.epoch = facts.epoch
        worker.block_size = facts.block_size
        worker.kv_blocks = facts.kv_blocks
        worker.pin_limit_blocks = facts.pin_limit_blocks
        worker.pinned_blocks = facts.pinned_blocks
        worker.facts_read += 1
        worker.prefix_caching = facts.prefix_caching
        worker.cache_dtype = facts.cache_dtype
        worker.engines = facts.engines
        if facts.kv_blocks and facts.block_size:
            worker.prefixes.sized(facts.kv_blocks * facts.block_size * (facts.engines or 1))
        models = await self._optional(worker, "/v1/models")
        if isinstance(models.get("data"), list):
            entries = [entry for entry in models["data"] if isinstance(entry, dict)]
            worker.models = frozenset(str(entry.get("id")) for entry in entries)
            if worker.role is Role.DECODE:
                self._models.update(worker.name, entries)
        if not new:
            return  # the rest cannot change while the process lives
        version = await self._optional(worker, "/version")
        worker.version = str(version.get("version") or "")
        info = await self._optional(worker, "/server_info?config_format=json")
        for field, value in read_transfer(info).items():
            setattr(worker, field, value)

    async def _optional(self, worker: Worker, path: str) -> dict[str, Any]:
        """A JSON object that the worker may not serve; then an empty one."""
        try:
            page = orjson.loads(await self._client.get(worker, path, timeout=self._timeout))
        except (WorkerFailed, orjson.JSONDecodeError):
            return {}
        return page if isinstance(page, dict) else {}
