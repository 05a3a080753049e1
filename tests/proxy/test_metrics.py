"""What the proxy counts of a turn, and how it estimates what reuse saves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.metrics import Metrics
from proxy.recent import RecentTurns
from proxy.session.identity import Identity
from proxy.turn.books import Books
from proxy.turn.cold_estimate import ColdEstimate
from proxy.turn.record import Turn
from proxy.workers.pool import Worker
from tests.proxy.conftest import Serve, Serving

LONG = "Tell me a story about a fisherman and his dog, please, and make it a long one. " * 3


async def two_turns(serving: Serving, *, stream: bool = False, second: str = "Go on.") -> None:
    """A conversation: the first turn cold, the second extends it."""
    first = await serving.chat([{"role": "user", "content": LONG}], stream=stream)
    await serving.chat(
        [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": second},
        ],
        stream=stream,
    )


async def test_a_turn_with_history_counts_as_hit_or_miss_and_a_first_one_as_neither(
    serving: Serving,
) -> None:
    await two_turns(serving)
    result = "kvloop_returning_turns_total{result="
    assert await serving.metric(result) == 1
    assert await serving.metric(result + '"pulled"') == 1
    await serving.chat(
        [
            {"role": "user", "content": "Another one, never seen here before. " * 5},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "And?"},
        ]
    )
    assert await serving.metric(result + '"missed"') == 1


async def test_prefill_cache_is_told_apart_from_a_pull(serve: Serve) -> None:
    """A returning turn that prefill's own cache serves is no hit of ours."""
    serving = await serve(fake={"prefix_cache": True}, reuse_enabled=False)
    await two_turns(serving)
    assert await serving.metric('kvloop_returning_turns_total{result="prefill_cache"}') == 1
    assert await serving.metric('kvloop_returning_turns_total{result="pulled"}') == 0


async def test_saved_time_is_the_cold_estimate_less_what_was_spent(serve: Serve) -> None:
    """The first turn's cold prefill is slow, the warm one is not: the sums differ by that."""
    serving = await serve()
    assert serving.prefill is not None
    serving.prefill.knobs.prefill_delay = 0.2
    await serving.chat([{"role": "user", "content": "Quite another thing. " * 12}])
    serving.prefill.knobs.prefill_delay = 0
    await two_turns(serving)
    estimated = await serving.metric("kvloop_reuse_cold_estimate_seconds_total")
    spent = await serving.metric("kvloop_reuse_spent_seconds_total")
    assert 0 < spent < estimated
    assert estimated > 0.1
    assert await serving.metric("kvloop_reuse_unestimated_turns_total") == 0


async def test_reuse_without_any_cold_prefill_before_is_counted_apart(serve: Serve) -> None:
    """A second proxy that has seen no cold turn estimates nothing."""
    one = await serve()
    other = await serve(workers=(one.prefills, one.decodes), cluster=one.cluster)
    first = await one.chat([{"role": "user", "content": LONG}])
    answer = await other.chat(
        [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Go on."},
        ]
    )
    assert answer.route == "prefill-with-pull"
    assert await other.metric("kvloop_reuse_unestimated_turns_total") == 1
    assert await other.metric("kvloop_reuse_cold_estimate_seconds_total") == 0


async def test_inter_token_latency_is_the_time_between_pieces(serving: Serving) -> None:
    """Of a stream: mean and longest pause, once a turn. A plain answer has none."""
    await serving.chat([{"role": "user", "content": LONG}])
    assert await serving.metric("kvloop_itl_seconds_count") == 0
    serving.decode.knobs.chunk_delay = 0.02
    await serving.chat([{"role": "user", "content": LONG}], stream=True)
    assert await serving.metric("kvloop_itl_seconds_count") == 1
    mean = await serving.metric("kvloop_itl_seconds_sum")
    longest = await serving.metric("kvloop_longest_gap_seconds_sum")
    assert 0.01 < mean < 0.5
    assert mean <= longest


def test_what_decode_still_had_is_a_source_of_its_own() -> None:
    """Neither pulled nor computed: a route on which prefill had no part."""
    metrics = Metrics()
    turn = Turn(
        body={"model": "m", "messages": []},
        identity=Identity(b"", b"", b""),
        request_id="r",
        started=time.monotonic(),
        route="decode-local-append",
        prompt_tokens=100,
        reused_tokens=90,
    )
    turn.first_content()
    Books(metrics, RecentTurns(1)).close(turn, "ok")
    page = metrics.page().decode()
    assert 'kvloop_prompt_tokens_total{source="decode_local"} 90.0' in page
    assert 'kvloop_prompt_tokens_total{source="computed"} 10.0' in page
    assert 'kvloop_prompt_tokens_total{source="reused"} 0.0' in page


async def test_tokens_kept_in_vain_are_counted(serving: Serving) -> None:
    """A history that is cut short by its client leaves the rest of the holding unused."""
    words = {"conversation_id": "one"}
    first = await serving.chat([{"role": "user", "content": LONG}], **words)
    assert await serving.metric("kvloop_mismatched_tokens_total") == 0
    await serving.chat(
        [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": first.text[:-2] + "!"},
            {"role": "user", "content": "Go on."},
        ],
        **words,
    )
    assert await serving.metric("kvloop_mismatched_tokens_total") > 0


async def test_an_outage_of_the_table_shows_without_any_turn(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = serving.app
    await app.gauges.refresh_table()
    assert await serving.metric("kvloop_table_up") == 1
    await two_turns(serving)
    await app.gauges.refresh_table()
    assert await serving.metric("kvloop_table_keys") > 0
    assert await serving.metric("kvloop_table_memory_bytes") > 0

    async def refuse(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(app.table._redis, "execute_command", refuse)
    await app.gauges.refresh_table()
    assert await serving.metric("kvloop_table_up") == 0


async def test_a_server_that_forbids_info_is_up_all_the_same(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosted ones may; turns must not wait for it either."""
    from redis.exceptions import ResponseError

    async def forbidden(*_: object) -> None:
        raise ResponseError("NOPERM")

    monkeypatch.setattr(serving.app.table._redis, "info", forbidden)
    await serving.app.gauges.refresh_table()
    assert await serving.metric("kvloop_table_up") == 1
    await two_turns(serving)
    assert await serving.metric('kvloop_turns_total{outcome="ok",reason="history_grew"') == 1


async def test_an_open_breaker_and_paused_pulls_show(serving: Serving) -> None:
    def worker(name: str) -> Worker:
        return next(each for each in serving.app.pool.workers if each.name == name)

    assert serving.prefill is not None
    assert await serving.metric("kvloop_worker_paused") == 0
    worker(serving.decode.name).turn_failed(time.monotonic(), limit=1, pause=60)
    worker(serving.prefill.name).pull_failed(time.monotonic(), limit=1, pause=60)
    assert await serving.metric("kvloop_worker_paused") == 2
    assert await serving.metric('kvloop_worker_paused{role="prefill",what="pulls"') == 1
    assert await serving.metric('kvloop_worker_paused{role="decode",what="breaker"') == 1


def test_no_estimate_before_a_cold_prefill() -> None:
    assert ColdEstimate().seconds(1000) is None


def test_the_estimate_follows_the_nearest_size() -> None:
    """Long prompts cost more per token: each size has its own rate."""
    estimate = ColdEstimate()
    estimate.seen(1000, 1.0)
    estimate.seen(16000, 64.0)
    assert estimate.seconds(900) == pytest.approx(0.9)
    assert estimate.seconds(15000) == pytest.approx(60.0)
    # Between the two, and beyond all that was seen, the cheaper rate: savings are not overstated.
    assert estimate.seconds(3000) == pytest.approx(3.0)


def test_the_estimate_forgets() -> None:
    estimate = ColdEstimate()
    estimate.seen(1000, 10.0)
    for _ in range(60):
        estimate.seen(1000, 1.0)
    assert estimate.seconds(1000) == pytest.approx(1.0, rel=0.05)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(16, 200_000), st.floats(0.001, 100)), min_size=1))
def test_the_estimate_lies_between_the_rates_that_were_seen(seen: list[tuple[int, float]]) -> None:
    estimate = ColdEstimate()
    for tokens, seconds in seen:
        estimate.seen(tokens, seconds)
    rates = [seconds / tokens for tokens, seconds in seen]
    found = estimate.seconds(5000)
    assert found is not None
    assert min(rates) * 0.999 <= found / 5000 <= max(rates) * 1.001


ONE_PROCESS = """
import sys
from proxy.metrics import Metrics
m = Metrics()
for kind in sys.argv[1:]:
    m.turns.labels("cold-prefill", "new_session", "ok").inc()
    m.in_flight.set(2)
    m.worker_healthy.labels("w", "decode").set(kind == "sees_it")
    m.itl_seconds.labels("cold-prefill").observe(0.01)
if len(sys.argv) == 1:
    sys.stdout.buffer.write(m.page())
"""


def test_several_processes_are_added_up(tmp_path: Path) -> None:
    """Counters and histograms sum up; of a worker's health the worst view counts."""

    def process(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", ONE_PROCESS, *arguments],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            text=True,
            stdout=subprocess.PIPE,
        )

    both = [process("sees_it"), process("sees_it_not")]
    assert [each.communicate()[0] for each in both] == ["", ""]
    page, _ = process().communicate()
    assert 'kvloop_turns_total{outcome="ok",reason="new_session",route="cold-prefill"} 2.0' in page
    assert 'kvloop_itl_seconds_count{route="cold-prefill"} 2.0' in page
    assert "kvloop_turns_in_flight 4.0" in page
    assert 'kvloop_worker_healthy{role="decode",worker="w"} 0.0' in page
