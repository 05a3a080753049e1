"""Workers and Redis fail; turns are still answered."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, assistant, user

NEXT = [user(LONG), assistant("Fine."), user("And then?")]
CHAT = "/v1/chat/completions"


async def started(serving: Serving, **fields: object) -> None:
    """A conversation with one turn behind it."""
    assert (await serving.chat([user(LONG)], conversation_id="c", **fields)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_pull_is_repeated_cold_unseen(serving: Serving, stream: bool) -> None:
    """A 500 of the warm prefill costs a cold prefill, not an error."""
    await started(serving)
    serving.prefill.knobs.warm_fails = 1
    answer = await serving.chat(NEXT, conversation_id="c", stream=stream)
    assert (answer.status, answer.text) == (200, "Fine.")
    assert (answer.route, answer.reason) == ("cold-prefill", "pull_failed")
    while serving.app.conductor.background_tasks:
        await asyncio.sleep(0.01)
    assert serving.cluster.releases == 1  # the failed pull freed nothing
    assert serving.decode.pinned() == 1
    assert serving.cluster.faults == []
    bodies = serving.prefill.bodies("/v1/completions")
    legs = [each for each in bodies if each["prompt"] != [0]]
    assert "remote_block_ids" in legs[-2]["kv_transfer_params"]
    assert "remote_block_ids" not in legs[-1]["kv_transfer_params"]


async def test_hanging_pull_is_given_up_and_then_avoided(serve: Serve) -> None:
    """A prefill worker that never answers a handle costs the warm timeout only a few times."""
    serving = await serve(warm_prefill_timeout_seconds=0.2, pull_failures=1, pull_pause_seconds=60)
    await started(serving)
    serving.prefill.knobs.hang_warm = True
    first = await serving.chat(NEXT, conversation_id="c")
    assert (first.status, first.reason) == (200, "pull_failed")
    longer = [*NEXT, assistant("Fine."), user("More?")]
    second = await serving.chat(longer, conversation_id="c")
    assert (second.status, second.reason) == (200, "pull_blocked")


async def test_restarted_decode_is_recognised_and_not_pulled_from(serving: Serving) -> None:
    """After decode restarts, stored handles are void: the turn is cold and nothing is read."""
    await started(serving)
    await serving.decode.restart()
    worker = serving.app.pool.workers[1]
    before = worker.epoch
    while worker.epoch == before or not worker.healthy:
        await asyncio.sleep(0.01)
    answer = await serving.chat(NEXT, conversation_id="c")
    assert (answer.status, answer.reason) == (200, "decode_restarted")
    assert serving.cluster.faults == []
    assert serving.cluster.pulls == 0


async def test_restarted_decode_nobody_noticed_yet_fails_the_pull_only(serve: Serve) -> None:
    """Between a restart and its discovery the pull fails and the turn goes cold."""
    serving = await serve(health_interval_seconds=60)
    await started(serving)
    await serving.decode.restart()
    answer = await serving.chat(NEXT, conversation_id="c")
    assert (answer.status, answer.reason) == (200, "pull_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_without_prefill_decode_does_it_all(serving: Serving, stream: bool) -> None:
    """No healthy prefill worker: decode answers alone, and keeps no pin."""
    await serving.prefill.stop()
    while serving.app.pool.workers[0].healthy:
        await asyncio.sleep(0.01)
    answer = await serving.chat([user(LONG)], stream=stream)
    assert (answer.status, answer.text) == (200, "Fine.")
    assert (answer.route, answer.reason) == ("decode-only", "no_prefill_worker")
    assert serving.decode.pinned() == 0


async def test_a_release_waits_for_a_prefill_worker_that_can_carry_it(serve: Serve) -> None:
    """Prefill is away for many pauses: decode keeps the blocks till it is back, and no longer."""
    serving = await serve(pull_pause_seconds=0.05)
    await started(serving)
    await serving.prefill.stop()
    prefill = serving.app.pool.workers[0]
    while prefill.healthy:
        await asyncio.sleep(0.01)
    async with serving.session.delete(serving.url + "/v1/sessions/c") as answer:
        assert answer.status == 200
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert (serving.app.conductor.background_tasks > 0, serving.decode.pinned()) == (True, 1)
        await asyncio.sleep(0.01)
    await serving.prefill.start()
    while serving.app.conductor.background_tasks:
        await asyncio.sleep(0.01)
    assert (serving.cluster.releases, serving.decode.pinned()) == (1, 0)


async def test_a_release_that_nobody_carries_ends_with_the_lease(serve: Serve) -> None:
    """Later decode would take it for a read of blocks that it has freed."""
    serving = await serve(
        pull_pause_seconds=0.05, decode_kv_ttl_seconds=1.5, expiry_margin_seconds=1
    )
    await started(serving)
    await serving.prefill.stop()
    while serving.app.pool.workers[0].healthy:
        await asyncio.sleep(0.01)
    async with serving.session.delete(serving.url + "/v1/sessions/c") as answer:
        assert answer.status == 200
    began = time.monotonic()
    while serving.app.conductor.background_tasks:
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 0.6
    assert serving.cluster.releases == 0


async def test_prefill_that_just_died_is_replaced(serve: Serve) -> None:
    """A connection refused by one prefill worker sends the turn to the other, at once."""
    serving = await serve(prefills=2, health_interval_seconds=60)
    await serving.prefills[0].stop()
    for _ in range(4):
        answer = await serving.chat([user(LONG)])
        assert (answer.status, answer.text) == (200, "Fine.")
        assert answer.route != "decode-only"


async def test_prefill_that_fails_twice_leaves_the_turn_to_decode(serving: Serving) -> None:
    """Cold prefill fails everywhere: decode computes the prompt itself."""
    serving.prefill.knobs.fail_next["/v1/completions"] = 5
    answer = await serving.chat([user(LONG)])
    assert (answer.status, answer.text) == (200, "Fine.")
    assert (answer.route, answer.reason) == ("decode-only", "prefill_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_failure_before_content_is_repeated(serving: Serving, stream: bool) -> None:
    """Decode's 500, or an error event after the role chunk, is repeated with a new handle."""
    await started(serving)
    if stream:
        serving.decode.knobs.stream_error_first = 1
    else:
        serving.decode.knobs.fail_next[CHAT] = 1
    answer = await serving.chat(NEXT, conversation_id="c", stream=stream)
    assert (answer.status, answer.text, answer.reason) == (200, "Fine.", "decode_retried")
    handles = [b["kv_transfer_params"]["remote_request_id"] for b in serving.decode.bodies(CHAT)]
    assert len(set(handles)) == len(handles)
    assert serving.cluster.faults == []


async def test_decode_that_keeps_failing_is_an_error_in_openai_shape(serving: Serving) -> None:
    """Two failures are enough: 502, and no internals in the message."""
    serving.decode.knobs.fail_next[CHAT] = 9
    answer = await serving.chat([user(LONG)])
    assert answer.status == 502
    assert answer.json["error"]["code"] == "worker_failed"
    assert len(serving.decode.bodies(CHAT)) == 2


async def test_stream_that_dies_after_content_ends_with_an_error_event(serving: Serving) -> None:
    """Content is out: the failure is told in the stream, the client is not left hanging."""
    serving.decode.knobs.die_after_chunks = 3
    answer = await serving.chat([user(LONG)], stream=True)
    assert answer.status == 200
    assert answer.text == "Fin"
    assert answer.chunks[-1]["error"]["code"] == "worker_failed"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert await serving.metric("kvloop_stream_errors_total") == 1


async def test_no_decode_worker_is_a_503(serving: Serving) -> None:
    """Nobody can answer: 503 with Retry-After, and /ready says so."""
    await serving.decode.stop()
    while serving.app.pool.workers[1].healthy:
        await asyncio.sleep(0.01)
    answer = await serving.chat([user("Hello")])
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "5"
    ready = await serving.get("/ready")
    assert ready.status == 503
    assert ready.json["ready"] is False


async def test_redis_away_means_cold_turns_not_errors(serve: Serve) -> None:
    """With no Redis every turn is answered, named, and decode's blocks are released."""
    serving = await serve(redis_url="redis://127.0.0.1:1", table_timeout_seconds=0.1)
    await started(serving)
    answer = await serving.chat(NEXT, conversation_id="c")
    assert (answer.status, answer.reason) == (200, "table_unavailable")
    while serving.app.conductor.background_tasks:
        await asyncio.sleep(0.01)
    assert serving.decode.pinned() == 0
    assert (await serving.get("/ready")).json["table"] is False


async def test_a_worker_refusal_reaches_the_client_unchanged(serving: Serving) -> None:
    """The worker's 4xx: its status and its body, and no prefill was spent on it."""
    answer = await serving.chat([user("Hello")], temperature=101)
    assert answer.status == 400
    assert answer.json["error"] == {
        "message": "temperature is too high",
        "type": "BadRequestError",
        "param": "temperature",
        "code": 400,
    }
    assert serving.prefill.bodies("/v1/completions") == []


async def test_busy_health_probe_does_not_take_a_worker_out(serving: Serving) -> None:
    """One bad probe is not death: it takes several in a row."""
    serving.decode.knobs.health_status = 503
    worker = serving.app.pool.workers[1]
    while not worker.last_error:
        await asyncio.sleep(0.005)
    assert worker.healthy
    while worker.healthy:
        await asyncio.sleep(0.01)
    serving.decode.knobs.health_status = 200
    while not worker.healthy:
        await asyncio.sleep(0.01)
