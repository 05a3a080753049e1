"""Every metric: name, help, labels, unit. Code elsewhere feeds values and knows no names.

Label sets are bounded: routes, reasons and results are closed lists, workers come from settings.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FAST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


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
        self.prompt_tokens = Counter(
            "kvloop_prompt_tokens",
            "Prompt tokens by where their KV came from: computed by prefill, found in prefill's "
            "own cache, pulled from decode, or reused (prefill did not say which of the two).",
            ("source",),
            registry=registry,
        )
        self.ttft = Histogram(
            "kvloop_ttft_seconds",
            "From the request's last byte to the first content byte sent to the client.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.leg_seconds = Histogram(
            "kvloop_leg_seconds",
            "Duration of one call to a worker: tokenise, prefill, decode (to its first content).",
            ("leg", "route"),
            buckets=_SECONDS,
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
            "kvloop_turns_in_flight", "Turns under way in this process.", registry=registry
        )
        self.queued = Gauge("kvloop_turns_queued", "Turns waiting for a place.", registry=registry)
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
        self.reuse_enabled = Gauge(
            "kvloop_reuse_enabled",
            "1 while turns may reuse KV; 0 when switched off (kvloop reuse off, or the setting).",
            registry=registry,
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
        )
        self.worker_outstanding = Gauge(
            "kvloop_worker_outstanding_turns",
            "Turns sent to the worker and not finished, by this proxy.",
            ("worker", "role"),
            registry=registry,
        )
