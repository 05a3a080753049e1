"""[io] The probe loop: asks each worker how it is and tells the pool.

``/health`` decides about service. ``/metrics`` and ``/v1/models`` are read when a worker comes
(back) into service and now and then after: block size, KV capacity, process start time (a new one
means that every block the old process held is gone), served models.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import orjson

from proxy import log
from proxy.errors import WorkerError
from proxy.tasks import end
from proxy.workers.client import WorkerClient, refused_connection
from proxy.workers.pool import Role, Worker

_FACTS_EVERY = 5
"""Probes between two readings of /metrics and /v1/models: a restart shows within 10 s, and sooner
by the engine id of the next handle."""

_START_TIME = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)", re.M)
_CACHE_INFO = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.M)
_PIN_LIMIT = re.compile(rb"^vllm:kvloop_pin_limit_blocks(?:\{[^}]*\})? ([0-9.e+]+)", re.M)
_PINNED = re.compile(rb"^vllm:kvloop_pinned_blocks(?:\{[^}]*\})? ([0-9.e+]+)", re.M)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself; None or empty where it says nothing."""

    epoch: str
    block_size: int | None
    kv_blocks: int | None
    pin_limit_blocks: int | None = None
    pinned_blocks: int | None = None


def read_facts(metrics: bytes) -> WorkerFacts:
    """Facts from a vLLM ``/metrics`` page."""
    start = _START_TIME.search(metrics)
    info = _CACHE_INFO.search(metrics)
    # One engine each with data parallelism; the worker's numbers are their sums.
    pin_limit = sum(int(float(value)) for value in _PIN_LIMIT.findall(metrics))
    pinned = [int(float(value)) for value in _PINNED.findall(metrics)]
    labels = dict(_LABEL.findall(info.group(1))) if info else {}
    return WorkerFacts(
        epoch=start.group(1).decode() if start else "",
        block_size=_integer(labels.get(b"block_size")),
        kv_blocks=_integer(labels.get(b"num_gpu_blocks")),
        pin_limit_blocks=pin_limit or None,
        pinned_blocks=sum(pinned) if pinned else None,
    )


def _integer(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None


class ModelList:
    """The models that decode workers serve, as ``/v1/models`` shows them."""

    def __init__(self) -> None:
        self._by_worker: dict[str, list[dict[str, Any]]] = {}
        self._names: set[Any] = set()

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
        workers: list[Worker],
        models: ModelList,
        *,
        interval: float,
        timeout: float,
        failures: int,
    ) -> None:
        self._client = client
        self._workers = workers
        self._models = models
        self._interval = interval
        self._timeout = timeout
        self._failures = failures
        self._tasks: list[asyncio.Task[None]] = []
        self._unasked = len(workers)
        self._all_asked = asyncio.Event()

    async def first_round(self) -> None:
        """Return when every worker has been asked once; each question has its time limit."""
        await self._all_asked.wait()

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._watch(worker), name=f"health {worker.name}")
            for worker in self._workers
        ]

    async def stop(self) -> None:
        await end(self._tasks)

    async def _watch(self, worker: Worker) -> None:
        probes = 0
        while True:
            await self.probe(worker, facts=probes % _FACTS_EVERY == 0)
            probes += 1
            if probes == 1:
                self._unasked -= 1
                if not self._unasked:
                    self._all_asked.set()
            await asyncio.sleep(self._interval)

    async def probe(self, worker: Worker, *, facts: bool) -> None:
        try:
            await self._client.get(worker, "/health", timeout=self._timeout)
            if facts or not worker.healthy:
                await self._learn(worker)
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
            )

    async def _learn(self, worker: Worker) -> None:
        facts = read_facts(await self._client.get(worker, "/metrics", timeout=self._timeout))
        if worker.epoch and facts.epoch and facts.epoch != worker.epoch:
            log.event("worker_restarted", worker=worker.name, role=worker.role)
            worker.engine_id = ""
            worker.render = worker.plugin = None
        worker.epoch = facts.epoch
        worker.block_size = facts.block_size
        worker.kv_blocks = facts.kv_blocks
        worker.pin_limit_blocks = facts.pin_limit_blocks
        worker.pinned_blocks = facts.pinned_blocks
        worker.facts_read += 1
        if worker.role is Role.DECODE:
            page = orjson.loads(await self._client.get(worker, "/v1/models", timeout=self._timeout))
            if isinstance(page, dict) and isinstance(page.get("data"), list):
                self._models.update(worker.name, [e for e in page["data"] if isinstance(e, dict)])
