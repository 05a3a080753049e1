"""What measuring costs: per piece of a stream, per turn, per page of metrics.

``python -m tests.bench.metrics`` prints microseconds of processor time, the best of several runs:
other programs on the machine can only make a run slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Histogram

from proxy import log
from proxy.metrics import Metrics
from proxy.recent import RecentTurns
from proxy.session.identity import Identity
from proxy.turn.books import Books
from proxy.turn.record import Turn

RUNS = 7


def cost(work: Callable[[], object], times: int) -> float:
    """Microseconds of one call, the loop's own time taken off."""

    def measured(call: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(RUNS):
            start = time.process_time()
            for _ in range(times):
                call()
            best = min(best, time.process_time() - start)
        return best

    return (measured(work) - measured(lambda: None)) / times * 1e6


def turn() -> Turn:
    """One that has been streamed, with a history."""
    made = Turn(
        body={
            "model": "m",
            "stream": True,
            "messages": [{"role": role, "content": "x"} for role in ("user", "assistant") * 10],
        },
        identity=Identity(b"s" * 16, b"n" * 16, b"c" * 16),
        request_id="r" * 32,
        started=time.monotonic() - 1,
        route="prefill-with-pull",
        prompt_tokens=10_000,
        reused_tokens=9_900,
        pulled_tokens=9_900,
        prefill_cached_tokens=0,
        attempts=1,
        legs={"tokenise": 0.01, "prefill": 0.1, "decode": 0.05},
    )
    made.first_content()
    made.next_content()
    return made


class _Nowhere(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


def main() -> None:
    logger = logging.getLogger("kvloop")
    handler = _Nowhere()
    handler.setFormatter(log._JsonFormatter())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel("INFO")

    metrics = Metrics()
    books = Books(metrics, RecentTurns(2000))
    one = turn()
    histogram = Histogram("gap", "", ("route",), registry=CollectorRegistry())
    child = histogram.labels("x")
    rows = (
        ("a piece of a stream: Turn.next_content", cost(one.next_content, 200_000)),
        ("  instead, one histogram observation", cost(lambda: child.observe(0.02), 100_000)),
        ("a turn: counted, logged as JSON, remembered", cost(lambda: books.close(one, "ok"), 2000)),
        ("a page of metrics", cost(metrics.page, 20)),
    )
    for name, microseconds in rows:
        print(f"{name:48}{microseconds:10.2f} us")


if __name__ == "__main__":
    main()
