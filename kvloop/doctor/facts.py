"""[pure] What the doctor can know, and how it is read from what was answered.

None means "could not be known", never "no".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def metric_total(page: str, name: str) -> float | None:
    """Sum of a metric's samples over all labels; None if there is no such metric."""
    values = [float(value) for found, _, value in _SAMPLE.findall(page) if found == name]
    return sum(values) if values else None


def metric_label(page: str, name: str, label: str) -> str | None:
    """A label of the first sample of a metric."""
    for found, labels, _ in _SAMPLE.findall(page):
        if found == name:
            return dict(_LABEL.findall(labels)).get(label)
    return None


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """A worker's ``kv-transfer-config``, and the variables that choose its transport."""

    connector: str | None = None
    role: str | None = None
    policy: str | None = None
    bidirectional: bool = False
    ttl_seconds: float = 480
    backends: tuple[str, ...] = ("UCX",)
    buffer_device: str | None = None
    ucx_tls: str | None = None
    fi_provider: str | None = None
    source: str = ""

    @classmethod
    def of(
        cls, config: Mapping[str, Any], environment: Mapping[str, str], source: str
    ) -> TransferConfig:
        extra = config.get("kv_connector_extra_config") or {}
        return cls(
            connector=config.get("kv_connector"),
            role=config.get("kv_role"),
            policy=config.get("kv_load_failure_policy", "fail"),
            bidirectional=extra.get("bidirectional_kv_xfer") is True,
            ttl_seconds=float(extra.get("decoder_kv_blocks_ttl", 480)),
            backends=tuple(extra.get("backends", ("UCX",))),
            buffer_device=config.get("kv_buffer_device"),
            ucx_tls=environment.get("UCX_TLS"),
            fi_provider=environment.get("FI_PROVIDER"),
            source=source,
        )


def config_of_command(
    argv: Sequence[str], environment: Mapping[str, str], port: int
) -> TransferConfig | None:
    """The configuration of a vLLM process on this machine, if it is the one on ``port``."""
    options = dict(pairwise(argv))
    if options.get("--port") != str(port) or "--kv-transfer-config" not in options:
        return None
    try:
        config = json.loads(options["--kv-transfer-config"])
    except ValueError:
        return None
    return TransferConfig.of(config, environment, "the process on this machine")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker, as it answers without being given work."""

    role: str
    url: str
    error: str | None = None
    """Why it could not be asked; then nothing else is known."""
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    metrics: str = ""
    config: TransferConfig | None = None
    clock_ahead_seconds: float | None = None

    @property
    def block_size(self) -> int | None:
        text = metric_label(self.metrics, "vllm:cache_config_info", "block_size")
        return int(text) if text and text.isdigit() else None

    @property
    def has_our_connector(self) -> bool:
        return metric_total(self.metrics, "vllm:kvloop_pin_limit_blocks") is not None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes and seconds that a reader's counters grew by during one leg."""

    bytes: float
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Leg:
    """One request of the probe. ``error`` None: it was answered with 200."""

    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """A tiny conversation: prefill, decode, and the next turn's prefill. None: not got so far."""

    prefill: Leg | None = None
    decode: Leg | None = None
    pull: Leg | None = None
    prefill_side_channel: tuple[str, int] | None = None
    decode_side_channel: tuple[str, int] | None = None
    plugin: bool | None = None
    """Decode's stream carried our event."""
    handle: bool | None = None
    """Decode kept its blocks and said where."""
    pin_refused: str | None = None
    ttl_seconds: float | None = None
    """Measured, where decode runs on this machine and shares its clock."""
    asked_tokens: int = 0
    pulled_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ProxyFacts:
    url: str
    error: str | None = None
    ready: bool = False
    table: bool = False
    workers: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class RedisFacts:
    error: str | None = None
    version: str = ""
    round_trip_seconds: float = 0.0
    max_memory: int = 0
    eviction: str = ""
    persistent: bool = False
    clock_ahead_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """This machine. ``efa_domains`` None: there is no ``fi_info`` to ask."""

    gpu: bool = False
    infiniband: bool = False
    efa_domains: int | None = None
    memlock_unlimited: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether a TCP connection from here to a worker's side channel came about."""

    worker: str
    host: str
    port: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    prefill: WorkerFacts
    decode: WorkerFacts
    probe: ProbeFacts
    node: NodeFacts
    session_expiry_seconds: float
    pull_threshold: int
    proxy: ProxyFacts | None = None
    redis: RedisFacts | None = None
    reach: tuple[Reach, ...] = field(default=())
