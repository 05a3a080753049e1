"""[io] Closes the books on a turn: counted, logged and remembered once, however it ended."""

from __future__ import annotations

import functools
import time
from typing import Any

from proxy import log
from proxy.metrics import Metrics
from proxy.recent import RecentTurns
from proxy.turn.cold_estimate import ColdEstimate
from proxy.turn.plan import ColdPrefill, DecodeLocalAppend, PrefillWithPull
from proxy.turn.record import Turn


class Books:
    """Takes each turn when it is over."""

    def __init__(self, metrics: Metrics, recent: RecentTurns) -> None:
        self._metrics = metrics
        self._recent = recent
        self._estimate = ColdEstimate()
        # Looking up a metric's child costs more than adding to it; there are not many.
        self._of = functools.cache(lambda metric, *labels: metric.labels(*labels))

    def close(self, turn: Turn, outcome: str) -> None:
        """``outcome``: ok, error, stream_error, client_left, client_stalled."""
        total = time.monotonic() - turn.started
        cold = self._estimated_cold(turn)
        self._count(turn, outcome, total)
        story = _story(turn, outcome, total, cold)
        log.event("turn", **story)
        self._recent.add(story, time.time())
        turn.trace.end(story)

    def _estimated_cold(self, turn: Turn) -> float | None:
        """Seconds that the prefill leg would have taken cold; learns from those that were."""
        took = turn.legs.get("prefill")
        if took is None or turn.ttft is None or not turn.prompt_tokens:
            return None
        if turn.route == ColdPrefill.route and not turn.reused_tokens:
            if turn.attempts == 1 and not turn.planned_pull:
                self._estimate.seen(turn.prompt_tokens, took)
            return None
        if turn.route != PrefillWithPull.route:
            return None
        metrics = self._metrics
        # What prefill had itself it would have had without us too.
        cold = self._estimate.seconds(turn.prompt_tokens - (turn.prefill_cached_tokens or 0))
        if cold is None:
            metrics.reuse_unestimated.inc()
        else:
            metrics.cold_estimate_seconds.inc(cold)
            metrics.reuse_spent_seconds.inc(took)
        return cold

    def _count(self, turn: Turn, outcome: str, total: float) -> None:
        metrics, of = self._metrics, self._of
        route = turn.route or "none"
        of(metrics.turns, route, str(turn.reason), outcome).inc()
        metrics.mismatched_tokens.inc(turn.mismatched_tokens)
        for leg, seconds in turn.legs.items():
            of(metrics.leg_seconds, leg, route).observe(seconds)
        if outcome == "ok":
            of(metrics.turn_seconds, route).observe(total)
        if turn.ttft is None:
            return
        of(metrics.ttft, route).observe(turn.ttft)
        if turn.gaps:
            of(metrics.itl_seconds, route).observe(turn.gap_seconds / turn.gaps)
            of(metrics.longest_gap_seconds, route).observe(turn.longest_gap)
        if turn.returning:
            of(metrics.returning_turns, _came_back(turn)).inc()
        if turn.prompt_tokens:
            tokens = metrics.prompt_tokens
            of(tokens, "computed").inc(max(0, turn.prompt_tokens - turn.reused_tokens))
            if turn.route == DecodeLocalAppend.route:
                of(tokens, "decode_local").inc(turn.reused_tokens)
            elif turn.pulled_tokens is None or turn.prefill_cached_tokens is None:
                of(tokens, "reused").inc(turn.reused_tokens)
            else:
                of(tokens, "pulled").inc(turn.pulled_tokens)
                of(tokens, "prefill_cache").inc(turn.prefill_cached_tokens)
                if turn.route == PrefillWithPull.route and not turn.pulled_tokens:
                    metrics.pulls_declined.inc(turn.reused_tokens < turn.planned_pull)


def _came_back(turn: Turn) -> str:
    """Where most of a returning turn's KV came from."""
    if turn.route == DecodeLocalAppend.route:
        return "appended"
    if turn.reused_tokens * 2 < turn.prompt_tokens or not turn.prompt_tokens:
        return "missed"
    pulled = turn.reused_tokens if turn.pulled_tokens is None else turn.pulled_tokens
    return "pulled" if pulled * 2 >= turn.reused_tokens else "prefill_cache"


def _story(turn: Turn, outcome: str, total: float, cold: float | None) -> dict[str, Any]:
    """The turn's line in the log."""
    return {
        "request": turn.request_id,
        "trace": turn.trace.trace_id or None,
        "session": turn.identity.label,
        "api": turn.dialect.name,
        "tenant": turn.caller.tenant or None,
        "route": turn.route,
        "reason": str(turn.reason),
        "outcome": outcome,
        "streamed": turn.streamed,
        "returning": turn.returning,
        "prompt_tokens": turn.prompt_tokens,
        "reused_tokens": turn.reused_tokens,
        "pulled_tokens": turn.pulled_tokens,
        "planned_pull": turn.planned_pull,
        "mismatched_tokens": turn.mismatched_tokens,
        "prefill_cached_tokens": turn.prefill_cached_tokens,
        "prefill": turn.prefill_worker,
        "decode": turn.decode_worker,
        "attempts": turn.attempts,
        "kept": turn.kept,
        "expected_ms": turn.expected.shown() if turn.expected else None,
        "cost_ms": _ms(turn.cost),
        "kept_tokens": turn.kept_tokens,
        "kept_seconds": turn.kept_seconds if turn.holding_left else None,
        "holding_used": turn.holding_used,
        "holding_left": turn.holding_left,
        "ttft_ms": _ms(turn.ttft),
        "total_ms": _ms(total),
        "legs_ms": {leg: _ms(seconds) for leg, seconds in turn.legs.items()},
        "cold_prefill_ms": _ms(cold),
        "itl_ms": _ms(turn.gap_seconds / turn.gaps) if turn.gaps else None,
        "longest_gap_ms": _ms(turn.longest_gap) if turn.gaps else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
