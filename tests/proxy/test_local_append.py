"""Short turns skip prefill: decode computes them behind the history that it still has."""

from __future__ import annotations

import time
from typing import Any

import pytest

from proxy import log
from proxy.workers.costs import Work
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, assistant, user


async def retaining(serve: Serve, **settings: Any) -> Serving:
    """A pair whose decode worker runs our connector."""
    serving = await serve(**settings)
    serving.decode._cache = set()
    worker = serving.app.pool.get(serving.decode.name)
    assert worker is not None
    await serving.app.health.probe(worker, facts=True)
    assert worker.retains
    return serving


async def test_a_short_turn_skips_prefill_and_can_still_be_pulled(serve: Serve) -> None:
    """Turn 2 is appended, turn 3 is long and is pulled from what turn 2 left; nothing is lost."""
    serving = await retaining(serve)
    assert serving.prefill is not None
    messages = [user(LONG)]
    first = await serving.chat(messages, stream=True)
    assert first.route == "cold-prefill"
    legs = len(serving.prefill.bodies("/v1/completions"))

    messages += [assistant("Fine."), user("Go on.")]
    second = await serving.chat(messages, stream=True)
    assert (second.route, second.reason) == ("decode-local-append", "short_append")
    assert second.reused > 0
    while serving.cluster.releases < 1:  # the first turn's handle, by way of prefill
        await serving.app.conductor.background.pause(0.01)
    assert [b["prompt"] for b in serving.prefill.bodies("/v1/completions")[legs:]] == [[0]]
    body = serving.decode.bodies("/v1/chat/completions")[-1]
    assert "remote_block_ids" not in body["kv_transfer_params"]
    assert serving.decode.pinned() == 1

    messages += [assistant("Fine."), user("A long question. " * 30)]
    third = await serving.chat(messages)
    assert (third.route, third.reason) == ("prefill-with-pull", "history_grew")
    assert third.reused > second.reused
    assert serving.cluster.faults == []
    assert serving.decode.appends == 1


async def test_what_decode_is_computing_counts_as_work_ahead(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first token: the next turn's append would wait for it."""
    serving = await retaining(serve)
    worker = serving.app.pool.get(serving.decode.name)
    assert worker is not None
    messages = [user(LONG)]
    await serving.chat(messages, stream=True)
    seen = []
    right = serving.decode._work

    async def work(**what: int) -> None:
        seen.append(worker.outstanding_tokens)
        await right(**what)

    monkeypatch.setattr(serving.decode, "_work", work)
    messages += [assistant("Fine."), user("Go on.")]
    assert (await serving.chat(messages, stream=True)).route == "decode-local-append"
    assert 0 < seen[0] <= 64
    assert worker.outstanding_tokens == 0


async def test_a_failed_append_is_prefilled_cold_and_gives_its_history_back(serve: Serve) -> None:
    serving = await retaining(serve)
    messages = [user(LONG)]
    await serving.chat(messages)
    messages += [assistant("Fine."), user("Go on.")]
    serving.decode.knobs.fail_next["/v1/chat/completions"] = 1
    answer = await serving.chat(messages)
    assert (answer.status, answer.route, answer.reason) == (200, "cold-prefill", "decode_retried")
    while serving.cluster.releases < 1:
        await serving.app.conductor.background.pause(0.01)
    assert serving.decode.pinned() == 1
    assert serving.cluster.faults == []


async def test_a_worker_without_our_connector_is_never_sent_an_append(serving: Serving) -> None:
    """It would pin the turn's blocks for ever."""
    serving.decode._cache = set()
    serving.decode.knobs.connector = False
    worker = serving.app.pool.get(serving.decode.name)
    assert worker is not None
    await serving.app.health.probe(worker, facts=True)
    messages = [user(LONG)]
    await serving.chat(messages)
    messages += [assistant("Fine."), user("Go on.")]
    assert (await serving.chat(messages)).route == "prefill-with-pull"


async def test_nothing_is_appended_without_a_prefix_cache_or_when_switched_off(
    serve: Serve,
) -> None:
    for knob, settings in ((False, {}), (True, {"decode_local_append": False})):
        serving = await retaining(serve, **settings)
        worker = serving.app.pool.get(serving.decode.name)
        assert worker is not None
        worker.prefix_caching = knob
        serving.app.health._interval = 1000  # no probe says otherwise meanwhile
        messages = [user(LONG)]
        await serving.chat(messages)
        messages += [assistant("Fine."), user("Go on.")]
        assert (await serving.chat(messages)).route == "prefill-with-pull"


async def test_learnt_costs_decide_and_are_logged(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append of any length is taken once it is known to be cheaper, and the log says why."""
    serving = await retaining(serve, plan_by_cost=True)
    lines: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(log, "event", lambda name, **fields: lines.append((name, fields)))
    pool, now = serving.app.pool, time.monotonic()
    prefill, decode = pool.workers
    for _ in range(10):
        pool.observe(prefill, Work(2000), 2.0, now)
        pool.observe(prefill, Work(500, 500, 500), 1.0, now)
        pool.observe(decode, Work(1, 1000, 1000), 0.5, now)
        pool.observe(decode, Work(1000, 1000), 0.01, now)
    messages = [user(LONG)]
    await serving.chat(messages, stream=True)
    messages += [assistant("Fine."), user("A long question. " * 30)]
    answer = await serving.chat(messages, stream=True)
    assert answer.reason == "append_cheapest"
    line = [fields for name, fields in lines if name == "turn"][-1]
    assert set(line["expected_ms"]) == {"cold-prefill", "prefill-with-pull", "decode-local-append"}
    assert line["expected_ms"]["decode-local-append"] < line["expected_ms"]["prefill-with-pull"]
    assert line["cost_ms"] > 0
