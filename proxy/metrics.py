"""Every metric: name, help, labels, unit. Code elsewhere feeds values and knows no names.

``docs/metrics.md`` says of each what question it answers; a test compares the two.

Label sets are bounded: routes, reasons and results are closed lists, workers come from settings.
Series of rare events exist from the start: ``increase()`` cannot see the step from nothing to 1.

Several processes: with ``PROMETHEUS_MULTIPROC_DIR`` set prometheus-client keeps the values in
files and ``page`` adds all processes up. So there are no custom collectors here, and each gauge
says how it is added up (``multiprocess_mode``).
"""

from __future__ import annotations

import os
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from proxy.retention import EDGES

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FAST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_GAP_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5, 30)

TOKEN_SOURCES = ("computed", "prefill_cache", "pulled", "reused", "decode_local")
RETURN_RESULTS = ("pulled", "prefill_cache", "appended", "missed")
CANARY_RESULTS = ("equal", "different", "failed")
RELEASE_RESULTS = ("sent", "with_prefill", "failed", "no_prefill_worker")
RETRY_LEGS = ("prefill", "warm_prefill", "decode")
RETRY_CAUSES = ("WorkerFailed", "WorkerUnreachable")
TABLE_OPERATIONS = ("find", "claim", "commit")
TABLE_FAILURES = (*TABLE_OPERATIONS, "evict", "ledger")
EVICTION_REASONS = ("budget", "session_deleted")
REFUSED_CAUSES = ("draining", "queue_full", "queue_timeout")
STRANDED_CAUSES = ("client_left", "decode_failed")
UNPAIRED_CAUSES = ("prefill_failed", "prefill_refused", "prefill_restarted")
PAUSES = ("breaker", "pulls", "transfers")


class Metrics:
    """The metrics of one proxy, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.turns = Counter(
            "kvloop_turns",
            "Turns by the route they took, why, and how they ended.",
            ("route", "reason", "outcome"),
            registry=registry,
        )
        self.returning_turns = Counter(
            "kvloop_returning_turns",
            "Answered turns whose messages hold an earlier answer, by where most of their prompt's "
            "KV came from.",
            ("result",),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvloop_prompt_tokens",
            "Prompt tokens by where their KV came from: computed by prefill, found in prefill's "
            "own cache, pulled from decode, reused (prefill did not say which of the two), or "
            "still on decode, which went on by itself.",
            ("source",),
            registry=registry,
        )
        self.pulls_declined = Counter(
            "kvloop_pulls_declined",
            "Pulls that were planned and that prefill did not make, though it answered.",
            registry=registry,
        )
        self.mismatched_tokens = Counter(
            "kvloop_mismatched_tokens",
            "Tokens of claimed handles that the prompt did not repeat: KV that was kept in vain.",
            registry=registry,
        )
        self.ttft = Histogram(
            "kvloop_ttft_seconds",
            "From the request's last byte to the first content byte sent to the client.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.turn_seconds = Histogram(
            "kvloop_turn_seconds",
            "From the request's last byte to the end of the answer, of turns that ended well.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.itl_seconds = Histogram(
            "kvloop_itl_seconds",
            "Mean time between the pieces of a streamed answer, one observation a turn.",
            ("route",),
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self.longest_gap_seconds = Histogram(
            "kvloop_longest_gap_seconds",
            "Longest time between two pieces of a streamed answer, one observation a turn.",
            ("route",),
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self.leg_seconds = Histogram(
            "kvloop_leg_seconds",
            "Duration of one call to a worker: tokenise, prefill, decode (to its first content).",
            ("leg", "route"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.cold_estimate_seconds = Counter(
            "kvloop_reuse_cold_estimate_seconds",
            "Prefill time that turns with reuse would have taken cold, estimated from recent cold "
            "prefills of like size.",
            registry=registry,
        )
        self.reuse_spent_seconds = Counter(
            "kvloop_reuse_spent_seconds",
            "Prefill time that the same turns did take.",
            registry=registry,
        )
        self.reuse_unestimated = Counter(
            "kvloop_reuse_unestimated_turns",
            "Turns with reuse in neither of the two sums: no cold prefill was seen yet.",
            registry=registry,
        )
        self.commits = Counter(
            "kvloop_commits",
            "What became of decode's KV after a turn: stored, or why not.",
            ("result",),
            registry=registry,
        )
        self.releases = Counter(
            "kvloop_releases",
            "Claimed handles that were given back to decode unused.",
            ("result",),
            registry=registry,
        )
        self.retained_blocks = Gauge(
            "kvloop_retained_blocks",
            "KV blocks that the decode worker keeps for ended turns or will keep for turns under "
            "way. Every proxy shows the same number: the ledger is shared.",
            ("worker",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.retention_budget_blocks = Gauge(
            "kvloop_retention_budget_blocks",
            "Most blocks that may be retained on the decode worker.",
            ("worker",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.evictions = Counter(
            "kvloop_evictions",
            "Holdings given up before their lease ended: for the budget, or because their session "
            "was deleted.",
            ("reason",),
            registry=registry,
        )
        self.retained_block_seconds = Counter(
            "kvloop_retained_block_seconds",
            "Blocks times the seconds for which they were retained, when they go.",
            ("worker",),
            registry=registry,
        )
        self.leases_expired = Counter(
            "kvloop_leases_expired",
            "Holdings that nobody came for before decode's lease ended.",
            ("worker",),
            registry=registry,
        )
        self.turn_gap_seconds = Histogram(
            "kvloop_turn_gap_seconds",
            "From the end of a turn to the next turn of its conversation.",
            buckets=EDGES,
            registry=registry,
        )
        self.claims_lost = Counter(
            "kvloop_claims_lost", "Handles that another turn claimed first.", registry=registry
        )
        self.cold_retries = Counter(
            "kvloop_cold_retries",
            "Legs repeated without reuse after a failure, unseen by the client.",
            ("leg", "cause"),
            registry=registry,
        )
        self.stream_errors = Counter(
            "kvloop_stream_errors",
            "Streams that ended with an error after content had been sent.",
            registry=registry,
        )
        self.client_disconnects = Counter(
            "kvloop_client_disconnects",
            "Clients that left before their answer was complete, by what was going on.",
            ("stage",),
            registry=registry,
        )
        self.stranded_prefills = Counter(
            "kvloop_stranded_prefills",
            "Prefills whose handle decode never got: prefill keeps their blocks for its lease "
            "(30 s).",
            ("cause",),
            registry=registry,
        )
        self.push_unpaired = Counter(
            "kvloop_push_unpaired",
            "Decode legs that waited for prefill's writes and will never get them: decode keeps "
            "their blocks until its process ends.",
            ("cause",),
            registry=registry,
        )
        self.refused_turns = Counter(
            "kvloop_refused_turns",
            "Turns refused for want of a place, or because the proxy is being stopped.",
            ("cause",),
            registry=registry,
        )
        self.retries_refused = Counter(
            "kvloop_retries_refused",
            "Failures that were not repeated because the retry budget was spent.",
            registry=registry,
        )
        self.in_flight = Gauge(
            "kvloop_turns_in_flight",
            "Turns under way.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.queued = Gauge(
            "kvloop_turns_queued",
            "Turns waiting for a place.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.background_tasks = Gauge(
            "kvloop_background_tasks",
            "Work that outlives its turn: releases, prefills finished for a client that left.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.event_loop_tasks = Gauge(
            "kvloop_event_loop_tasks",
            "All asyncio tasks of this process. Growing while turns in flight do not: a leak.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.http_errors = Counter(
            "kvloop_http_errors", "Error answers sent to clients.", ("status",), registry=registry
        )
        self.forwarded = Counter(
            "kvloop_forwarded",
            "Requests of other routes that one worker answered alone.",
            ("api", "outcome"),
            registry=registry,
        )
        self.refused_callers = Counter(
            "kvloop_refused_callers",
            "Requests without a valid API key.",
            ("cause",),
            registry=registry,
        )
        self.throttled_requests = Counter(
            "kvloop_throttled_requests",
            "Requests over their tenant's limits (429).",
            ("limit",),
            registry=registry,
        )
        self.table_seconds = Histogram(
            "kvloop_table_seconds",
            "Duration of one session-table operation.",
            ("operation",),
            buckets=_FAST_SECONDS,
            registry=registry,
        )
        self.table_failures = Counter(
            "kvloop_table_failures",
            "Session-table operations that failed or timed out.",
            ("operation",),
            registry=registry,
        )
        self.table_up = Gauge(
            "kvloop_table_up",
            "1 while Redis answers.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.table_keys = Gauge(
            "kvloop_table_keys",
            "Keys in the Redis database that holds the session table.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.table_memory = Gauge(
            "kvloop_table_memory_bytes",
            "Memory that this Redis server uses.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.reuse_enabled = Gauge(
            "kvloop_reuse_enabled",
            "1 while turns may reuse KV; 0 when switched off (kvloop reuse off, or the setting).",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.canary_checks = Counter(
            "kvloop_canary_checks",
            "Warm turns whose first token was computed again from nothing: equal, different, or "
            "failed (no comparison).",
            ("result",),
            registry=registry,
        )
        self.worker_healthy = Gauge(
            "kvloop_worker_healthy",
            "1 while the worker is given turns.",
            ("worker", "role"),
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.worker_outstanding = Gauge(
            "kvloop_worker_outstanding_turns",
            "Turns sent to the worker and not finished, by this proxy.",
            ("worker", "role"),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.worker_paused = Gauge(
            "kvloop_worker_paused",
            "1 while something of the worker is left alone after failures: all turns (breaker), "
            "pulls by this prefill worker, or transfers to this decode worker.",
            ("worker", "role", "what"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._start_series()

    def _start_series(self) -> None:
        for counter, values in (
            (self.returning_turns, RETURN_RESULTS),
            (self.prompt_tokens, TOKEN_SOURCES),
            (self.canary_checks, CANARY_RESULTS),
            (self.releases, RELEASE_RESULTS),
            (self.table_failures, TABLE_FAILURES),
            (self.evictions, EVICTION_REASONS),
            (self.refused_turns, REFUSED_CAUSES),
            (self.stranded_prefills, STRANDED_CAUSES),
            (self.push_unpaired, UNPAIRED_CAUSES),
        ):
            for value in values:
                counter.labels(value)
        for leg, cause in product(RETRY_LEGS, RETRY_CAUSES):
            self.cold_retries.labels(leg, cause)
        for operation in TABLE_OPERATIONS:
            self.table_seconds.labels(operation)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format; those of all processes if there are several."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
