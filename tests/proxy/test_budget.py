"""The retention budget between a proxy and fake workers whose decode pins only its share."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from proxy.retention import ReturnTimes, group_of
from proxy.session.identity import identity_of
from proxy.turn import releases
from proxy.turn.retaining import Retention
from tests.fakes.worker import MODEL, Pin
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_sessions import LONG, settled, user

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SMALL = {"blocks": 257}
"""Decode pins at most 128 blocks, the proxy keeps 102: six conversations of 17 blocks."""


async def ended(serving: Serving, *names: str) -> list[str]:
    """A first turn of each conversation; why it was planned as it was."""
    reasons = []
    for name in names:
        answer = await serving.chat([user(f"{name}: {LONG}")], conversation_id=name)
        reasons.append(answer.reason)
        await settled(serving)
    return reasons


async def comes_back(serving: Serving, name: str) -> str:
    """The reason of a conversation's second turn."""
    messages = [user(f"{name}: {LONG}"), {"role": "assistant", "content": "Fine."}, user("And?")]
    answer = await serving.chat(messages, conversation_id=name)
    await settled(serving)
    return answer.reason


async def test_decode_refuses_no_pin_because_of_ended_conversations(serve: Serve) -> None:
    """Far more conversations end than decode may keep: the last ones are there, the first say why
    not, and what was given up is released and never read."""
    serving = await serve(fake=SMALL)
    names = [f"chat {number}" for number in range(20)]
    await ended(serving, *names)
    assert serving.decode.pins_refused == 0
    assert serving.decode.pinned_blocks() <= 102
    assert await comes_back(serving, names[-1]) == "history_grew"
    assert await comes_back(serving, names[0]) == "evicted"
    assert serving.decode.pins_refused == 0
    assert serving.cluster.faults == []
    assert await serving.metric('kvloop_evictions_total{reason="budget"}') >= 14


async def test_without_making_room_decode_refuses(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would see if nothing was given up."""

    async def none(*given: Any, **more: Any) -> None: ...

    monkeypatch.setattr(Retention, "_make_room", none)
    serving = await serve(fake=SMALL)
    await ended(serving, *(f"chat {number}" for number in range(9)))
    assert serving.decode.pins_refused > 0
    assert await comes_back(serving, "chat 8") == "pin_refused"


async def under_pressure(serving: Serving, monkeypatch: pytest.MonkeyPatch, proven: bool) -> None:
    """Decode's share is full, what is given up waits for a ride, and one holding does."""
    monkeypatch.setattr(releases, "RIDE_SECONDS", 30.0)
    if proven:
        await ended(serving, "before")
        assert await comes_back(serving, "before") == "history_grew"
    retention = serving.app.conductor.retention
    for number in range(20):
        await serving.chat([user(f"chat {number}: {LONG}")], conversation_id=f"chat {number}")
        await retention.told()
        while retention._telling:
            await asyncio.sleep(0.001)
        if serving.app.conductor.releases._waiting:
            return


def released_alone(serving: Serving) -> int:
    assert serving.prefill is not None
    return [body["prompt"] for body in serving.prefill.bodies("/v1/completions")].count([0])


async def test_a_cold_turn_takes_a_release_along(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill gets no request only to have decode free what was given up for the budget."""
    serving = await serve(fake=SMALL)
    await under_pressure(serving, monkeypatch, proven=True)
    pinned = serving.decode.pinned_blocks()
    answer = await serving.chat([user(f"another one: {LONG}")], conversation_id="another")
    assert (answer.text, answer.reason) == ("Fine.", "new_session")
    assert serving.decode.pinned_blocks() <= pinned  # one went, one came
    assert released_alone(serving) == 0
    assert await serving.metric('kvloop_releases_total{result="with_prefill"}') == 1
    assert serving.cluster.faults == []


async def test_what_waits_for_a_ride_is_no_stray_pin(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode still reports it, the ledger does not: the budget stays what it is."""
    serving = await serve(fake=SMALL)
    await under_pressure(serving, monkeypatch, proven=True)
    worker = next(each for each in serving.app.pool.workers if each.role == "decode")
    retention = serving.app.conductor.retention
    read = worker.facts_read
    while worker.facts_read < read + 3:
        await retention.sweep(worker)
        await asyncio.sleep(0.01)
    assert serving.decode.pinned_blocks() > await serving.metric("kvloop_retained_blocks{")
    assert retention.budget(worker) == 102


async def test_no_turn_takes_a_release_along_between_workers_that_never_exchanged_blocks(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a handle may hang: it is tried out by a release alone."""
    serving = await serve(fake=SMALL)
    await under_pressure(serving, monkeypatch, proven=False)
    await serving.chat([user(f"another one: {LONG}")], conversation_id="another")
    assert await serving.metric('kvloop_releases_total{result="with_prefill"}') == 0
    assert serving.app.conductor.releases._waiting


async def test_a_release_that_nobody_takes_along_is_sent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment later, and when the proxy is stopped at once."""
    serving = await serve(fake=SMALL)
    await under_pressure(serving, monkeypatch, proven=True)
    waiting = len(serving.app.conductor.releases._waiting)
    await serving.app.conductor.close()
    assert released_alone(serving) == waiting
    assert await serving.metric('kvloop_releases_total{result="sent"}') == waiting
    assert serving.app.conductor.background_tasks == 0


async def test_a_turn_does_not_suffer_from_what_it_took_along(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill fails with it: the turn is repeated without, and the release alone."""
    serving = await serve(fake=SMALL)
    await under_pressure(serving, monkeypatch, proven=True)
    assert serving.prefill is not None
    serving.prefill.knobs.warm_fails = 1
    answer = await serving.chat([user(f"another one: {LONG}")], conversation_id="another")
    assert (answer.status, answer.text, answer.reason) == (200, "Fine.", "new_session")
    assert await serving.metric('kvloop_releases_total{result="with_prefill"}') == 0
    while released_alone(serving) == 0:
        await asyncio.sleep(0.005)
    assert await serving.metric("kvloop_cold_retries_total{") == 1


async def test_two_proxies_keep_one_budget(serve: Serve) -> None:
    """On one Redis they count together, and either gives up what the other one kept."""
    one = await serve(fake=SMALL)
    other = await serve(cluster=one.cluster, workers=(one.prefills, one.decodes))
    for number in range(12):
        await ended((one, other)[number % 2], f"chat {number}")
    assert one.decode.pins_refused == 0
    assert 60 < one.decode.pinned_blocks() <= 102
    assert await comes_back(one, "chat 11") == "history_grew"
    assert one.cluster.faults == []


async def test_a_turn_reserves_its_room_before_decode_ends(serve: Serve) -> None:
    """While decode still answers, room is made: at its end the blocks are free."""
    serving = await serve(fake=SMALL)
    await ended(serving, *(f"chat {number}" for number in range(6)))
    before = serving.decode.pinned_blocks()
    serving.decode.knobs.chunk_delay = 30
    turn = asyncio.create_task(serving.chat([user("new: " + LONG)], conversation_id="new"))
    while serving.decode.pinned_blocks() == before:
        await asyncio.sleep(0.01)
    assert serving.decode.open_requests == 1
    turn.cancel()
    while serving.decode.open_requests:
        await asyncio.sleep(0.01)
    await settled(serving)
    # What was reserved for the client that left is free again.
    await ended(serving)
    assert await retained(serving) == serving.decode.pinned_blocks()


async def retained(serving: Serving) -> float:
    """The gauge, after a sweep."""
    worker = next(each for each in serving.app.pool.workers if each.role == "decode")
    await serving.app.conductor.retention.sweep(worker)
    return await serving.metric("kvloop_retained_blocks{")


async def test_the_gauges_say_what_decode_pins(serve: Serve) -> None:
    """Blocks retained and budget, per worker; claimed ones are not counted any more."""
    serving = await serve(fake=SMALL)
    await ended(serving, "a", "b")
    assert await retained(serving) == serving.decode.pinned_blocks() > 0
    assert await serving.metric("kvloop_retention_budget_blocks{") == 102
    await comes_back(serving, "a")
    assert await retained(serving) == serving.decode.pinned_blocks()
    assert await serving.metric("kvloop_retained_block_seconds_total{") > 0
    assert await serving.metric("kvloop_turn_gap_seconds_count") == 1


async def test_pins_that_no_ledger_knows_come_off_the_budget(serve: Serve) -> None:
    """As long as decode reports them: of a proxy that died, say."""
    serving = await serve(fake=SMALL)
    worker = next(each for each in serving.app.pool.workers if each.role == "decode")
    retention = serving.app.conductor.retention
    decode = serving.decode
    decode.cluster.pins[decode.engine_id, "stray"] = Pin([], list(range(50)), math.inf)
    while retention.budget(worker) != 52:
        await retention.sweep(worker)
        await asyncio.sleep(0.01)
    await ended(serving, *(f"chat {number}" for number in range(8)))
    assert decode.pins_refused == 0
    del decode.cluster.pins[decode.engine_id, "stray"]
    while retention.budget(worker) != 102:
        await retention.sweep(worker)
        await asyncio.sleep(0.01)


async def test_leases_that_end_unused_are_counted(serve: Serve) -> None:
    """Once, and their blocks are free for the budget."""
    serving = await serve(decode_kv_ttl_seconds=0.2, expiry_margin_seconds=0.1)
    await ended(serving, "a")
    await asyncio.sleep(0.25)
    assert await retained(serving) == 0
    await retained(serving)
    assert await serving.metric("kvloop_leases_expired_total{") == 1


async def test_decode_is_asked_for_a_lease_and_the_table_follows_the_granted_one(
    serve: Serve,
) -> None:
    """The margin goes on top of the time for which the session may be claimed."""
    serving = await serve(fake={"lease": 100.0}, longest_lease_seconds=200)
    await ended(serving, "a")
    (body,) = serving.decode.bodies(CHAT)
    assert body["kv_transfer_params"]["kvloop_lease_seconds"] == 200 + 30
    (shown,) = (await serving.get("/v1/sessions")).json["data"]
    assert shown["usable_until"] - shown["kept_at"] == pytest.approx(100 - 30, abs=1)
    assert shown["pinned_until"] - shown["kept_at"] == pytest.approx(100, abs=1)
    identity = identity_of(MODEL, conversation="a")
    table = serving.app.table
    ledger = await serving.app.ledger.entries(next_place(serving))
    key = f"kvloop:{{{identity.scope.hex()}}}:h:{ledger[1][0].id}"
    assert 60 < await table._redis.ttl(key) <= 70


def next_place(serving: Serving) -> Any:
    from proxy.session.ledger import Place

    worker = next(each for each in serving.app.pool.workers if each.role == "decode")
    return Place(worker.name, worker.epoch)


async def test_a_tenant_that_comes_back_at_once_is_given_short_leases(serve: Serve) -> None:
    """Its gaps are learned from its turns, one by one; the limit from the settings holds."""
    serving = await serve(shortest_lease_seconds=20)
    retention = serving.app.conductor.retention
    await ended(serving, "a")
    assert await comes_back(serving, "a") == "history_grew"
    first, second = serving.decode.bodies(CHAT)
    for body in (first, second):
        assert body["kv_transfer_params"]["kvloop_lease_seconds"] == 480
    group = group_of(identity_of(MODEL, conversation="a"), continues=False)
    assert sum(retention.groups.of(group).returned) > sum(ReturnTimes().returned) * 0.99 + 0.9
    for _ in range(100):
        retention.groups.learn(group).turn_kept()
        retention.groups.learn(group).turn_came(3)
    await ended(serving, "b")
    *_, last = serving.decode.bodies(CHAT)
    assert last["kv_transfer_params"]["kvloop_lease_seconds"] == 20 + 30


async def test_a_worker_without_our_connector_keeps_its_own_time(serve: Serve) -> None:
    """It ignores the wish: the table goes by the setting, and by half of its blocks."""
    serving = await serve(fake=SMALL)
    serving.decode.knobs.connector = False
    worker = next(each for each in serving.app.pool.workers if each.role == "decode")
    while worker.pin_limit_blocks is not None:
        await asyncio.sleep(0.01)
    await ended(serving, "a")
    (shown,) = (await serving.get("/v1/sessions")).json["data"]
    assert shown["usable_until"] - shown["kept_at"] == pytest.approx(450, abs=1)
    assert serving.app.conductor.retention.budget(worker) == 102


async def test_without_redis_turns_are_answered_and_nothing_is_entered(serve: Serve) -> None:
    """The ledger's failures are counted and cost the turns nothing."""
    serving = await serve(redis_url="redis://127.0.0.1:1")
    assert await ended(serving, "a") == ["table_unavailable"]
    assert await serving.metric('kvloop_table_failures_total{operation="ledger"}') > 0
