"""[io] Our numbers beside NIXL's, on their way from the engine to ``/metrics``.

vLLM collects a connector's stats on the scheduler side after each step, adds them to the workers'
and hands the sum to the API server, which feeds Prometheus. The carrier is a dict of lists of
observations: counters add up, of a gauge the last one counts.

Names begin with ``vllm:`` because vLLM takes down exactly the collectors with that word when it
starts again in the same process.
"""

from __future__ import annotations

from typing import Any

from worker_launch import vllm_compat
from worker_launch.connector.pin_decision import Refusal

_nixl = vllm_compat.nixl_parts()
_NixlStats: Any = _nixl.stats
_NixlPromMetrics: Any = _nixl.prom_metrics

PINNED_BLOCKS = "kvloop_pinned_blocks"
PINNED_REQUESTS = "kvloop_pinned_requests"
PIN_LIMIT_BLOCKS = "kvloop_pin_limit_blocks"
USABLE_BLOCKS = "kvloop_usable_blocks"
GAUGES = {
    PINNED_BLOCKS: "KV blocks that finished decode requests keep for their next turn.",
    PINNED_REQUESTS: "Finished decode requests that keep blocks.",
    PIN_LIMIT_BLOCKS: "Most blocks that may be pinned; a request beyond is not kept.",
    USABLE_BLOCKS: "KV blocks of this engine.",
}

PINS = "kvloop_pins"
PINS_RELEASED = "kvloop_pins_released"
PINS_EXPIRED = "kvloop_pins_expired"
COUNTERS = {
    PINS: "Finished decode requests whose blocks were kept.",
    PINS_RELEASED: "Pins that prefill read or released.",
    PINS_EXPIRED: "Pins whose lease ran out unused.",
}

REFUSED = {refusal: f"kvloop_pins_refused_{refusal.value}" for refusal in Refusal}
REFUSED_METRIC = "kvloop_pins_refused"
REFUSED_HELP = "Finished decode requests whose blocks were not kept, by reason."

_KEYS = (*GAUGES, *COUNTERS, *REFUSED.values())


class KvloopConnectorStats(_NixlStats):  # type: ignore[misc]  # vLLM's class, known at run time
    """NIXL's stats and ours."""

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in _KEYS})

    @classmethod
    def around(cls, stats: Any) -> KvloopConnectorStats:
        """A worker's stats, with room for the scheduler's: vLLM adds the second to the first."""
        joined = cls()
        joined.data.update(stats.data)
        return joined

    def add(self, key: str) -> None:
        self.data[key].append(1)

    def set(self, key: str, value: int) -> None:
        self.data[key] = [value]

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data.get(key) for key in _KEYS)

    def reduce(self) -> dict[str, int | float]:
        """NIXL's line for the log, and the pins where there are any to speak of."""
        numbers: dict[str, int | float] = super().reduce()
        if self.data.get(PINNED_BLOCKS):
            numbers["Pinned blocks"] = self.data[PINNED_BLOCKS][-1]
        refused = sum(len(self.data.get(key, ())) for key in REFUSED.values())
        if refused:
            numbers["Refused pins"] = refused
        return numbers


class KvloopPromMetrics(_NixlPromMetrics):  # type: ignore[misc]  # as above
    """NIXL's metrics and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._gauges = {
            key: self._gauge_cls(
                name=f"vllm:{key}",
                documentation=text,
                labelnames=labelnames,
                # Several API servers write the same engine's value; the newest is the right one.
                multiprocess_mode="mostrecent",
            )
            for key, text in GAUGES.items()
        }
        self._counters = {
            key: self._counter_cls(name=f"vllm:{key}", documentation=text, labelnames=labelnames)
            for key, text in COUNTERS.items()
        }
        self._refused = self._counter_cls(
            name=f"vllm:{REFUSED_METRIC}",
            documentation=REFUSED_HELP,
            labelnames=[*labelnames, "reason"],
        )
        for labels in per_engine_labelvalues.values():
            # A series that exists from the start can be told from one that was never reported.
            for counter in self._counters.values():
                counter.labels(*labels)
            for refusal in Refusal:
                self._refused.labels(*labels, refusal.value)
            # Nothing is pinned before the first step; the sizes are not known yet.
            for key in (PINNED_BLOCKS, PINNED_REQUESTS):
                self._gauges[key].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for key, gauge in self._gauges.items():
            if values := transfer_stats_data.get(key):
                gauge.labels(*labels).set(values[-1])
        for key, counter in self._counters.items():
            if values := transfer_stats_data.get(key):
                counter.labels(*labels).inc(sum(values))
        for refusal, key in REFUSED.items():
            if values := transfer_stats_data.get(key):
                self._refused.labels(*labels, refusal.value).inc(sum(values))
