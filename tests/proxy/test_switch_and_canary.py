"""The fleet-wide switch and the canary, with fakes."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from kvloop.cli import app as commands
from proxy.canary import Canary
from proxy.metrics import Metrics
from proxy.turn.wire import first_token
from tests.proxy.conftest import Serve
from tests.proxy.test_turns import LONG, assistant, user

NEXT = [user(LONG), assistant("Fine."), user("And then?")]


async def test_one_command_switches_reuse_off_in_all_proxies(serve: Serve, valkey_url: str) -> None:
    """kvloop reuse off: within two seconds every proxy goes cold and says why; on undoes it."""
    one = await serve()
    two = await serve(cluster=one.cluster, workers=(one.prefills, one.decodes))
    run = CliRunner().invoke
    for state, expected in (("off", "reuse_disabled"), ("on", "new_session")):
        outcome = await asyncio.to_thread(
            run, commands, ["reuse", state, "--redis-url", valkey_url]
        )
        assert outcome.output == f"reuse is {state}\n"
        async with asyncio.timeout(10):
            for proxy in (one, two):
                while (await proxy.get("/ready")).json["reuse"] is not (state == "on"):
                    await asyncio.sleep(0.05)
        for number, proxy in enumerate((one, two)):
            answer = await proxy.chat([user(f"{number} {state} {LONG}")])
            assert answer.reason == expected
        assert await one.metric("kvloop_reuse_enabled") == (state == "on")


@pytest.mark.parametrize(("poisoned", "result"), [(False, "equal"), (True, "different")])
async def test_canary_replays_a_warm_turn_cold(serve: Serve, poisoned: bool, result: str) -> None:
    """A warm prefill's first token is computed again without handle and cache, and compared."""
    serving = await serve(canary_fraction=1)
    await serving.chat([user(LONG)], conversation_id="c")
    assert serving.prefill is not None
    serving.prefill.knobs.wrong_after_pull = poisoned
    answer = await serving.chat(NEXT, conversation_id="c")
    assert answer.reason == "history_grew"
    async with asyncio.timeout(10):
        while serving.app.conductor.background_tasks:
            await asyncio.sleep(0.01)
    assert await serving.metric(f'kvloop_canary_checks_total{{result="{result}"}}') == 1
    replay = serving.prefill.bodies("/v1/completions")[-1]
    assert "kv_transfer_params" not in replay
    assert replay["cache_salt"]


def test_canary_is_off_by_default() -> None:
    """No fraction, no replay."""
    canary = Canary(0, None, Metrics())  # type: ignore[arg-type]
    assert not any(canary.chosen() for _ in range(100))


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"token_ids": None}]}])
def test_answers_without_ids_are_not_compared(answer: dict[str, object]) -> None:
    """An older worker that reports no ids makes no false alarm."""
    assert first_token(answer) is None
