"""Turns between workers that push: prefill writes into decode's blocks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import Answer, Serve, Serving
from tests.proxy.test_disconnect import leave, settled
from tests.proxy.test_turns import LONG, assistant, user

CHAT = "/v1/chat/completions"
TOGETHER = ("push", "push_one_way")
IN_TURN = ("push", "push_in_turn")


def took(answer: Answer) -> tuple[str, str]:
    assert answer.status == 200, answer.body
    return answer.route, answer.reason


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


Fake = Callable[..., Awaitable[FakeWorker]]


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    """Start a fake that pushes or pulls; it is stopped after the proxy, whose probes it answers."""
    started: list[FakeWorker] = []

    async def start(cluster: Cluster, role: str, mode: str, *, says: bool = True) -> FakeWorker:
        worker = await FakeWorker(cluster, role).start()
        started.append(worker)
        worker.knobs.transfer_mode, worker.knobs.server_info = mode, says
        worker.knobs.connector = worker.knobs.plugin = False  # stock workers
        return worker

    yield start
    for worker in started:
        await worker.stop()


@pytest.fixture
def pushing(fake: Fake, serve: Serve) -> Callable[..., Awaitable[Serving]]:
    """Start a proxy with fakes that push; they say so under /server_info unless told otherwise."""

    async def start(
        prefills: int = 1, decodes: int = 1, *, says: bool = True, **settings: Any
    ) -> Serving:
        cluster = Cluster()
        p = [await fake(cluster, "prefill", "push", says=says) for _ in range(prefills)]
        d = [await fake(cluster, "decode", "push", says=says) for _ in range(decodes)]
        # What waits for writes that never come must fail here, not hang.
        limits = {"first_byte_timeout_seconds": 5, "cold_prefill_timeout_seconds": 5}
        return await serve(workers=(p, d), cluster=cluster, **{**limits, **settings})

    return start


Pushing = Callable[..., Awaitable[Serving]]


async def test_the_first_turn_goes_in_turn_and_the_next_together(pushing: Pushing) -> None:
    """From the first answer decode's later legs know where the writes come from."""
    serving = await pushing()
    assert took(await serving.chat([user(LONG)])) == IN_TURN
    assert serving.cluster.push.registered_first == 0
    gate = serving.prefill.knobs.prefill_gate = asyncio.Event()
    turn = asyncio.create_task(serving.chat([user(LONG + "Again.")]))
    await until(lambda: len(serving.cluster.push.waiting) == 1)  # decode has it, prefill works
    assert not turn.done()
    gate.set()
    assert took(await turn) == TOGETHER
    push = serving.cluster.push
    assert (push.writes, push.registered_first, push.waiting, push.unclaimed) == (2, 1, [], {})
    assert serving.cluster.faults == []
    page = (await serving.get("/metrics")).body.decode()
    finds = re.search(r'kvloop_table_seconds_count{operation="find"} (\S+)', page)
    assert finds is not None
    assert float(finds[1]) <= 1, "nothing is kept for push turns: only the first may look"


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user(LONG)]},
    "/v1/completions": {"prompt": LONG, "max_tokens": 9},
    "/v1/messages": {"messages": [user(LONG)], "max_tokens": 9},
    "/v1/responses": {"input": LONG},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_route_is_paired(pushing: Pushing, path: str, stream: bool) -> None:
    """Both legs take the client's own route, as vLLM makes the ids it pairs by from the route."""
    serving = await pushing()
    body = {"model": MODEL, "stream": stream, **BODIES[path]}
    expected = [IN_TURN, TOGETHER, TOGETHER]
    assert [took(await serving.post(body, path=path)) for _ in expected] == expected
    assert serving.cluster.push.writes == 3
    assert serving.cluster.faults == []
    assert len(serving.prefill.bodies(path)) == 3


async def test_both_legs_have_the_ids_that_were_made_once(pushing: Pushing) -> None:
    """Neither worker renders the messages again, and prefill is asked for one token only."""
    serving = await pushing()
    await serving.chat([user(LONG)], max_tokens=50, stop=["x"])
    await serving.chat([user(LONG)], max_tokens=50, stop=["x"])
    for worker in (serving.prefill, serving.decode):
        for body in worker.bodies(CHAT):
            assert body["kv_transfer_params"]["prompt_token_ids"][0] == 301
    for body in serving.prefill.bodies(CHAT):
        assert (body["max_tokens"], body["stream"]) == (1, False)
        assert "stop" not in body
    assert serving.decode.bodies(CHAT)[-1]["max_tokens"] == 50


async def test_media_is_rendered_by_both(pushing: Pushing) -> None:
    """Ids of media prove nothing, and decode's blocks are written all the same."""
    serving = await pushing()
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    message = {"role": "user", "content": [{"type": "text", "text": LONG}, image]}
    assert took(await serving.chat([message])) == IN_TURN
    assert took(await serving.chat([message])) == TOGETHER
    assert "prompt_token_ids" not in serving.prefill.bodies(CHAT)[-1]["kv_transfer_params"]
    assert serving.cluster.faults == []


async def test_nothing_is_kept_and_nothing_claimed(pushing: Pushing) -> None:
    """A conversation that returns is prefilled again: vLLM lets nothing flow back here."""
    serving = await pushing()
    await serving.chat([user(LONG)], conversation_id="c")
    again = await serving.chat([user(LONG), assistant("Fine."), user("And?")], conversation_id="c")
    assert took(again) == TOGETHER
    assert again.reused == 0
    assert serving.decode.bodies(CHAT)[-1]["kv_transfer_params"]["kvloop_lease_seconds"] == 0
    assert await serving.metric('kvloop_commits_total{result="stored"}') == 0


async def test_two_turns_with_one_request_id_are_not_mixed_up(pushing: Pushing) -> None:
    """What vLLM pairs by is never the client's own id: it may be in use twice."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    gate = serving.prefill.knobs.prefill_gate = asyncio.Event()
    serving.prefill.knobs.token_delay = 0.0001
    turns = [
        asyncio.create_task(serving.chat([user(text)], headers={"X-Request-Id": "same"}))
        for text in (LONG * 6, LONG)
    ]
    await until(lambda: len(serving.cluster.push.waiting) == 2)
    gate.set()  # the second turn's prefill is done first
    assert [took(await each) for each in turns] == [TOGETHER, TOGETHER]
    assert serving.cluster.faults == []


async def test_a_push_worker_is_recognised_by_its_first_handle(pushing: Pushing) -> None:
    """Without /server_info the first handle says it: that turn is decode's, the next are pushed."""
    serving = await pushing(says=False)
    assert took(await serving.chat([user(LONG)])) == ("decode-only", "push_found")
    assert took(await serving.chat([user(LONG)])) == TOGETHER
    assert serving.app.pool.workers[1].transfer_mode == "push"
    assert serving.cluster.push.waiting == []


async def test_a_mixed_pair_is_excluded(fake: Fake, serve: Serve) -> None:
    """One pushes and the other pulls: decode answers alone, and /ready says why."""
    cluster = Cluster()
    p, d = await fake(cluster, "prefill", "push"), await fake(cluster, "decode", "pull")
    serving = await serve(workers=([p], [d]), cluster=cluster)
    assert took(await serving.chat([user(LONG)])) == ("decode-only", "no_prefill_worker")
    pair = (await serving.get("/ready")).json["pairs"][0]
    assert "transfer modes differ" in pair["no_handover"]
    assert "NixlPushConnector" in pair["no_pull"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_prefill_is_sent_again_while_decode_waits(
    pushing: Pushing, stream: bool
) -> None:
    """Nothing else frees decode's blocks: the same id goes to the same worker once more."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    serving.prefill.knobs.fail_next[CHAT] = 1
    assert took(await serving.chat([user(LONG)], stream=stream)) == TOGETHER
    assert len(serving.decode.bodies(CHAT)) == 2
    ids = [h["x-request-id"] for (path, _), h in requests(serving.prefill) if path == CHAT]
    assert len(ids) == 3
    assert ids[1] == ids[2]
    assert serving.cluster.push.waiting == []


def requests(worker: FakeWorker) -> list[Any]:
    return list(zip(worker.requests, worker.headers, strict=True))


async def test_prefill_that_keeps_failing_leaves_the_turn_to_another(pushing: Pushing) -> None:
    """The other worker is used one leg after the other; what decode keeps for ever is counted."""
    serving = await pushing(prefills=2)
    for _ in range(30):  # until both have answered once
        await serving.chat([user(LONG)])
    for worker in serving.prefills:
        worker.knobs.prefill_gate = asyncio.Event()
    turn = asyncio.create_task(serving.chat([user(LONG)]))
    await until(lambda: len(serving.cluster.push.waiting) == 1)
    [lost] = serving.cluster.push.waiting
    bad = next(p for p in serving.prefills if p.engine_id == lost.engine_id)
    [other] = [p for p in serving.prefills if p is not bad]
    other.knobs.prefill_gate = None
    await bad.stop()
    assert took(await turn) == IN_TURN
    assert (await turn).text == "Fine."
    assert serving.cluster.push.waiting == [lost]
    unpaired = 'kvloop_push_unpaired_total{cause="prefill_failed"}'
    async with asyncio.timeout(5):
        while await serving.metric(unpaired) < 1:
            await asyncio.sleep(0.01)
    # It is given time: with both at once the next failure would cost decode more blocks.
    assert not serving.app.pool.get(bad.name).pulls_allowed(0)


async def test_the_only_prefill_that_keeps_failing_leaves_it_to_decode(pushing: Pushing) -> None:
    """Decode computes the prompt itself, and later turns go in turn until the pause is over."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    serving.prefill.knobs.fail_next[CHAT] = 2
    answer = await serving.chat([user(LONG)])
    assert took(answer) == ("decode-only", "prefill_failed")
    assert took(await serving.chat([user(LONG)])) == IN_TURN
    assert took(await serving.chat([user(LONG)])) == IN_TURN


async def test_prefill_that_restarted_is_noticed(pushing: Pushing) -> None:
    """Decode had named the old engine: the turn is made again with the new one."""
    serving = await pushing(health_interval_seconds=60)
    await serving.chat([user(LONG)])
    old = serving.prefill.engine_id
    await serving.prefill.restart()
    serving.cluster.engines.add(old)  # decode's connection to it looks alive
    answer = await serving.chat([user(LONG)])
    assert took(answer) == IN_TURN
    await until(lambda: serving.decode.aborted == 1)
    assert serving.app.pool.workers[0].push_place["remote_engine_id"] == serving.prefill.engine_id
    assert await serving.metric('kvloop_push_unpaired_total{cause="prefill_restarted"}') == 1


async def test_a_restart_that_a_probe_has_seen_costs_decode_nothing(pushing: Pushing) -> None:
    """What was known of the old engine is forgotten: the legs go in turn once."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    worker = serving.app.pool.workers[0]
    before = worker.epoch
    await serving.prefill.restart()
    await until(lambda: worker.healthy and worker.epoch != before)
    assert took(await serving.chat([user(LONG)])) == IN_TURN
    assert took(await serving.chat([user(LONG)])) == TOGETHER
    assert serving.decode.aborted == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_failure_before_content_is_repeated(pushing: Pushing, stream: bool) -> None:
    """On another decode worker, with a new id and a new prefill."""
    serving = await pushing(decodes=2)
    await serving.chat([user(LONG)])
    for worker in serving.decodes:
        worker.knobs.fail_next[CHAT] = 1
    for worker in serving.decodes[1:]:
        worker.knobs.fail_next[CHAT] = 0
    answers = [await serving.chat([user(LONG)], stream=stream) for _ in range(8)]
    assert {took(each) for each in answers} == {TOGETHER, ("push", "decode_retried")}
    assert serving.cluster.push.waiting == []


async def test_a_refusal_of_decode_stops_prefill(pushing: Pushing) -> None:
    """Decode's own 400 reaches the client, and prefill does not compute for nobody."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    serving.prefill.knobs.prefill_gate = asyncio.Event()
    serving.decode.knobs.refuse_next[CHAT] = 1
    answer = await serving.chat([user(LONG)])
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")
    assert len(serving.prefill.bodies(CHAT)) == 2
    await until(lambda: not serving.app.conductor.background_tasks)
    assert serving.app.pool.workers[0].outstanding == 0
    assert serving.cluster.push.unclaimed == {}


async def test_a_refusal_of_prefill_leaves_it_to_decode(pushing: Pushing) -> None:
    """Prefill may lack what decode was started with (a tool parser): decode's word counts."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    serving.prefill.knobs.refuse_next[CHAT] = 2
    assert took(await serving.chat([user(LONG)])) == ("decode-only", "prefill_failed")
    assert took(await serving.chat([user(LONG)])) == ("decode-only", "prefill_failed")
    assert len(serving.prefill.bodies(CHAT)) == 3
    assert await serving.metric('kvloop_push_unpaired_total{cause="prefill_refused"}') == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_leaves_nothing_waiting(pushing: Pushing, stream: bool) -> None:
    """Decode's leg is aborted; prefill's goes on, because only its write frees decode's blocks."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    gate = serving.prefill.knobs.prefill_gate = asyncio.Event()
    waits = asyncio.Event()
    leaving = asyncio.create_task(leave(serving, stream=stream, when=waits, reads=0))
    await until(lambda: len(serving.cluster.push.waiting) == 1)
    waits.set()
    await leaving
    await settled(serving, 1)
    await until(lambda: serving.decode.open_requests == 0)
    assert len(serving.cluster.push.waiting) == 1
    gate.set()
    await until(lambda: not serving.cluster.push.waiting)
    await until(lambda: not serving.app.conductor.background_tasks)
    assert all(worker.outstanding == 0 for worker in serving.app.pool.workers)
    assert await serving.metric("kvloop_push_unpaired_total") == 0


async def test_sending_both_at_once_can_be_switched_off(pushing: Pushing) -> None:
    """``push_together`` false: no prefill can leave decode waiting."""
    serving = await pushing(push_together=False)
    assert [took(await serving.chat([user(LONG)])) for _ in range(3)] == [IN_TURN] * 3
    assert serving.cluster.push.registered_first == 0


async def test_a_queue_on_decode_is_joined_after_prefill(pushing: Pushing) -> None:
    """A request that waits longer than prefill keeps its blocks would find them gone."""
    serving = await pushing()
    await serving.chat([user(LONG)])
    serving.decode.knobs.waiting = 1
    await until(lambda: serving.app.pool.workers[1].waiting == 1)
    assert took(await serving.chat([user(LONG)])) == IN_TURN
