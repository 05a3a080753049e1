"""Who asks when, against scripted workers behind real proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web

from kvloop.bench import client
from kvloop.bench.client import Endpoint
from kvloop.bench.runner import Runner, Target
from kvloop.bench.workloads import Script, Sizes, Step, Workload, make
from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import Serve, Serving

QUESTION = {"role": "user", "content": "Tell me about the sea, at some length if you can. " * 3}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def pair(serve: Serve) -> tuple[Serving, Serving]:
    """Two proxies over the same workers: reuse off and on."""
    off = await serve(reuse_enabled=False)
    on = await serve(workers=(off.prefills, off.decodes), cluster=off.cluster)
    return off, on


def target(name: str, serving: Serving) -> Target:
    workers = (tuple(w.url for w in group) for group in (serving.prefills, serving.decodes))
    return Target(name, Endpoint(serving.url, MODEL), *workers)


def script(name: str, turns: int, **step: object) -> Script:
    return Script(name, tuple(Step((QUESTION,), 8, **step) for _ in range(turns)))  # type: ignore[arg-type]


def runner_of(session: aiohttp.ClientSession, *targets: Target) -> Runner:
    return Runner(session, targets, seed=1, tell=lambda text: None)


async def test_each_turn_is_asked_of_every_arm_before_the_next(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    """Or a machine that changes its speed would change it for one arm alone."""
    off, on = await pair(serve)
    runner = runner_of(session, target("cold", off), target("published", on))
    await runner.run(Workload("w", "", (script("one", 6),)), repeats=1)
    turns = runner.found.turns
    assert [turn.turn for turn in turns] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert {turns[0].arm, turns[1].arm} == {"cold", "published"}
    firsts = [turn.arm for turn in turns[::2]]
    assert len(set(firsts)) == 2, "the same arm is always first"


async def test_unloaded_requests_never_overlap(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    off, on = await pair(serve)
    scripts = tuple(script(f"s{number}", 3) for number in range(3))
    runner = runner_of(session, target("cold", off), target("published", on))
    await runner.run(Workload("w", "", scripts, clients=3), repeats=1)
    ordered = sorted(runner.found.turns, key=lambda turn: turn.started)
    assert len(ordered) == 18
    for before, after in pairwise(ordered):
        assert before.started + before.total <= after.started + 0.005


async def test_a_turn_s_record_says_what_the_proxy_and_the_server_said(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    off, on = await pair(serve)
    runner = runner_of(session, target("cold", off), target("published", on))
    await runner.run(Workload("w", "", (script("one", 2),)), repeats=1)
    found = {(turn.arm, turn.turn): turn for turn in runner.found.turns}
    cold, warm = found["cold", 2], found["published", 2]
    assert (cold.route, cold.reason) == ("cold-prefill", "reuse_disabled")
    assert (warm.route, warm.reason) == ("prefill-with-pull", "history_grew")
    assert not cold.pulled_tokens
    assert warm.pulled_tokens
    assert warm.prompt_tokens == cold.prompt_tokens
    assert warm.history == cold.history
    assert warm.answer == cold.answer != ""
    assert warm.ttft is not None
    assert warm.ttft <= warm.total
    assert len(warm.itl) == len("Fine.") - 1
    assert found["cold", 1].pause is None
    assert warm.pause is not None
    assert not off.cluster.faults


async def test_arms_never_share_a_cache_or_a_session(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    off, on = await pair(serve)
    runner = runner_of(session, target("cold", off), target("published", on))
    await runner.run(Workload("w", "", (script("one", 2),)), repeats=1)
    salts = [body["cache_salt"] for body in on.decode.bodies("/v1/chat/completions")]
    assert len(salts) == 4
    assert len(set(salts)) == 2


async def test_a_conversation_goes_on_with_the_arm_s_own_answers(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    one, other = await serve(), await serve()
    other.decode.knobs.answer = "Something else."
    runner = runner_of(session, target("cold", one), target("other", other))
    await runner.run(Workload("w", "", (script("one", 2),)), repeats=1)
    sent = other.decode.bodies("/v1/chat/completions")[1]["messages"]
    assert sent[1] == {"role": "assistant", "content": "Something else."}
    first, second = runner.found.turns[:2], runner.found.turns[2:]
    assert first[0].history == first[1].history
    assert second[0].history != second[1].history


async def test_a_failed_turn_ends_its_conversation_on_that_arm_only(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    good, bad = await serve(), await serve()
    bad.decode.knobs.fail_next["/v1/chat/completions"] = 9
    runner = runner_of(session, target("cold", good), target("bad", bad))
    await runner.run(Workload("w", "", (script("one", 3),)), repeats=1)
    by_arm = [turn.arm for turn in runner.found.turns]
    assert (by_arm.count("cold"), by_arm.count("bad")) == (3, 1)
    (failed,) = [turn for turn in runner.found.turns if turn.arm == "bad"]
    assert not failed.ok
    assert failed.error.startswith("HTTP 50")


async def test_loaded_arms_take_turns_forwards_and_backwards(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    off, on = await pair(serve)
    scripts = tuple(script(f"s{number}", 1) for number in range(3))
    runner = runner_of(session, target("cold", off), target("published", on))
    await runner.run(Workload("w", "", scripts, loaded=True, clients=3), repeats=2)
    order = [span.arm for span in runner.found.spans]
    assert order == [*order[:2], *order[1::-1]]
    assert len(set(order)) == 2
    for before, after in pairwise(runner.found.spans):
        assert before.ended <= after.started
    assert {turn.loaded for turn in runner.found.turns} == {True}
    assert len(runner.found.turns) == 2 * 2 * 3


async def test_branches_start_from_a_copy_of_their_parent(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    serving = await serve()
    made = make("branches", Sizes(scale=0.05, count=1, pause_scale=0), words_per_token=1, seed=1)
    runner = runner_of(session, target("cold", serving))
    await runner.run(made, repeats=1)
    bodies = serving.decode.bodies("/v1/chat/completions")
    root = bodies[0]["messages"][0]
    assert len(bodies) == made.scripts[0].turns == 8
    assert all(body["messages"][0] == root for body in bodies)
    # The parent goes on without what its children said.
    assert sorted(len(body["messages"]) for body in bodies) == [1, 3, 3, 3, 3, 5, 5, 5]
    assert all(body.get("conversation_id") is None for body in bodies)


async def test_no_turn_starts_after_the_deadline(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    serving = await serve()
    runner = runner_of(session, target("cold", serving))
    await runner.run(Workload("w", "", (script("one", 3),)), repeats=1, deadline=0)
    assert runner.found.turns == []


@pytest.mark.parametrize("connector", [True, False])
async def test_decode_workers_are_watched(
    serve: Serve, session: aiohttp.ClientSession, connector: bool
) -> None:
    """A page without our gauges gives unknown values, not zeros."""
    serving = await serve()
    serving.decode.knobs.connector = connector
    runner = runner_of(session, target("cold", serving))
    await runner.run(Workload("w", "", (script("one", 2),)), repeats=1)
    known = {sample.pinned_blocks is not None for sample in runner.found.samples}
    assert known == {connector}


# One request.


async def answering(handler: object) -> tuple[web.AppRunner, Endpoint]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "m", cache_salt=False)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, b"broken", "HTTP 500: broken"),
        (200, b'data: {"error": {"message": "no"}}\n\n', "in the stream"),
        (200, b"data: [DONE]\n\n", "no content"),
        (200, b"data: {nonsense\n\n", "JSONDecodeError"),
    ],
)
async def test_a_bad_answer_is_an_error_and_not_a_time(
    session: aiohttp.ClientSession, status: int, body: bytes, error: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    server, endpoint = await answering(handler)
    answer = await client.ask(
        session, endpoint, [QUESTION], max_tokens=1, conversation="c", salt="s"
    )
    await server.cleanup()
    assert error in answer.error


async def test_words_per_token_are_learnt_from_the_server(session: aiohttp.ClientSession) -> None:
    """The fake counts bytes; the template's own tokens cancel out."""
    worker = await FakeWorker(Cluster(), "decode").start()
    rate = await client.words_per_token(session, Endpoint(worker.url, MODEL))
    await worker.stop()
    assert rate == pytest.approx(1 / 6.5, rel=0.1)


async def test_a_server_that_counts_nothing_is_refused(session: aiohttp.ClientSession) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')

    server, endpoint = await answering(handler)
    with pytest.raises(LookupError, match="carries no usage"):
        await client.words_per_token(session, endpoint)
    await server.cleanup()
