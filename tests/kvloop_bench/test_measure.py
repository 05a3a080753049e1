"""A run as a whole, its proxies included, against scripted workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from kvloop.bench import legs, measure
from kvloop.bench.client import Endpoint
from kvloop.bench.deployment import Ready
from kvloop.bench.runner import Runner, Target
from kvloop.bench.workloads import Script, Sizes, Step, Workload
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve

SIZES = Sizes(scale=0.05, count=2, lease_seconds=1, pause_scale=0)


async def test_a_run_holds_what_its_report_needs(serve: Serve, tmp_path: Path) -> None:
    serving = await serve()
    log = tmp_path / "proxy.log"
    ready = [
        Ready(
            legs.PUBLISHED,
            serving.url,
            tuple(w.url for w in serving.prefills),
            tuple(w.url for w in serving.decodes),
            log,
            {"reuse_enabled": "true"},
        )
    ]
    wanted = measure.Wanted((legs.PUBLISHED,), ("agent",), SIZES, lease=30)
    run = await measure._play(wanted, ready, MODEL, lambda text: None)
    assert len(run.turns) == 2 * 8
    assert all(turn.ok for turn in run.turns)
    assert {worker.role: worker.block_size for worker in run.workers} == {
        "prefill": 16,
        "decode": 16,
    }
    assert run.lease_seconds == 30
    assert run.arms[0].settings == {"reuse_enabled": "true"}
    assert not any("127.0.0.1" in worker.name for worker in run.workers)


async def test_a_server_that_fails_stops_the_run_before_it_begins(serve: Serve) -> None:
    serving = await serve()
    serving.decode.knobs.fail_next["/v1/chat/completions"] = 9
    ready = [Ready(legs.PUBLISHED, serving.url)]
    wanted = measure.Wanted((legs.PUBLISHED,), ("agent",), SIZES)
    with pytest.raises(LookupError, match="HTTP 50"):
        await measure._play(wanted, ready, MODEL, lambda text: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_run_that_is_stopped_keeps_what_it_measured(
    serve: Serve, number: signal.Signals
) -> None:
    serving = await serve()
    question = {"role": "user", "content": "Again?"}
    script = Script("endless", tuple(Step((question,), 8) for _ in range(10_000)))
    asked = 0

    def tell(text: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            os.kill(os.getpid(), number)

    async with aiohttp.ClientSession() as session:
        runner = Runner(session, [Target("one", Endpoint(serving.url, MODEL))], seed=1, tell=tell)
        work = [Workload("w", "", (script,))]
        assert await measure._stopped_early(runner, work, repeats=1, deadline=None)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
    assert 3 <= len(runner.found.turns) < 100


def test_legs_are_read_from_a_proxy_s_log(tmp_path: Path) -> None:
    """Lines of other events, and broken ones, do no harm."""
    from kvloop.bench.observe import legs_by_request

    log = tmp_path / "log"
    log.write_text(
        '{"event":"started","turn":1}\n'
        'not json "turn"\n'
        '{"event":"turn","request":"r1","legs_ms":{"prefill":250.0,"decode":null}}\n'
    )
    assert legs_by_request(log) == {"r1": {"prefill": 0.25}}
    assert legs_by_request(tmp_path / "absent") == {}


def test_the_command_in_a_report_holds_no_secrets_and_no_folders() -> None:
    typed = ["bench", "run", "--api-key", "secret", "--out=/home/me", "--legs", "a b"]
    assert measure.own_command(typed) == "kvloop bench run --legs 'a b'"
