"""The plan of the real stack: ports, settings, and the private store."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvloop.stack.local import CannotStart, Options, plan_local_stack
from kvloop.stack.plan import Part, ReadyWhen, StackPlan
from kvloop.stack.state import Phase, StackState, StateFolder
from kvloop.stack.supervisor import Supervisor, locked
from tests.kvloop_cli.conftest import Lab


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port(taken_port: int) -> int:
    """One that was free a moment ago; nothing here listens on it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _part(plan: StackPlan, name: str) -> Part:
    return next(part for part in plan.parts if part.name == name)


def test_a_taken_port_is_named_with_the_mend(lab: Lab, taken_port: int) -> None:
    """`kvloop up` on a taken port starts nothing, names the port and says what to type instead."""
    up = lab.kvloop("up", "--port", str(taken_port))
    assert up.ended() == 1
    assert f"port {taken_port} on 127.0.0.1 is taken by another program" in up.output
    assert "kvloop up --port" in up.output
    assert "make up PORT=" in up.output
    assert lab.folder.read_state() is None


def test_workers_and_proxy_know_each_other(tmp_path: Path, free_port: int) -> None:
    """The proxy is given the workers' addresses and the store's; no two of them share a port."""
    folder = StateFolder(tmp_path)
    plan = plan_local_stack(Options(port=free_port, models=tmp_path / "models"), folder)
    assert [part.name for part in plan.parts] == ["model", "valkey", "prefill", "decode", "proxy"]
    settings = _part(plan, "proxy").environment
    assert settings["KVLOOP_PORT"] == str(free_port)
    assert plan.live_url == f"http://127.0.0.1:{settings['KVLOOP_ADMIN_PORT']}/"
    assert settings["KVLOOP_REDIS_URL"] == f"unix://{tmp_path}/valkey.sock"
    assert f"{settings['KVLOOP_PREFILL_URLS']}/health" == _part(plan, "prefill").target
    assert f"{settings['KVLOOP_DECODE_URLS']}/health" == _part(plan, "decode").target
    ports = [
        argument
        for role in ("prefill", "decode")
        for option, argument in zip(
            _part(plan, role).argv, _part(plan, role).argv[1:], strict=False
        )
        if option in ("--port", "--side-channel-port")
    ]
    assert len(set(ports)) == 4
    assert plan.url == f"http://127.0.0.1:{free_port}"
    assert plan.model == "smollm2"


def test_worker_commands_are_ones_that_worker_launch_takes(
    lab: Lab, tmp_path: Path, free_port: int
) -> None:
    """The planned command, with --dry-run added, is accepted: the two packages agree on options."""
    plan = plan_local_stack(Options(port=free_port), StateFolder(tmp_path))
    worker = lab.command(*_part(plan, "decode").argv[1:], "--dry-run")
    assert worker.ended() == 0, worker.output
    assert "kv_consumer" in worker.output


def test_a_given_redis_replaces_the_private_store(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With KVLOOP_REDIS_URL no Valkey is started, and the address, a secret, is in no plan file."""
    monkeypatch.setenv("KVLOOP_REDIS_URL", "redis://:secret@127.0.0.1:6379/0")
    folder = StateFolder(tmp_path)
    plan = plan_local_stack(Options(port=free_port), folder)
    assert "valkey" not in [part.name for part in plan.parts]
    folder.create()
    folder.write_plan(plan)
    assert "secret" not in folder.plan_file.read_text()
    assert folder.read_plan() == plan


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path, free_port: int) -> None:
    """A model name that is neither built in nor a folder is refused with both possibilities."""
    with pytest.raises(CannotStart, match="neither one of smollm2, tiny nor a model folder"):
        plan_local_stack(Options(port=free_port, model="gpt-9"), StateFolder(tmp_path))


def test_a_model_folder_is_served_under_its_name(tmp_path: Path, free_port: int) -> None:
    """A folder with a config.json is taken as it is: nothing is built."""
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    plan = plan_local_stack(Options(port=free_port, model=str(model)), StateFolder(tmp_path))
    assert plan.model == "my-model"
    assert "model" not in [part.name for part in plan.parts]


def test_a_state_folder_too_deep_for_a_socket_is_refused(tmp_path: Path, free_port: int) -> None:
    """The kernel limits a socket's path; the error says which option shortens it."""
    deep = StateFolder(tmp_path / ("d" * 100))
    with pytest.raises(CannotStart, match="--state-dir"):
        plan_local_stack(Options(port=free_port), deep)


def test_a_plan_starts_parts_only_after_parts_that_it_lists() -> None:
    """A part cannot wait for one that will never start."""
    with pytest.raises(ValueError, match="not listed before"):
        StackPlan((Part("proxy", ("x",), ReadyWhen.FINISHED, after=("valkey",)),), "", "")


async def test_the_private_store_answers_and_writes_nothing(tmp_path: Path, free_port: int) -> None:
    """The planned Valkey serves its socket, saves nothing on disk and ends with the stack."""
    folder = StateFolder(tmp_path)
    plan = plan_local_stack(Options(port=free_port), folder)
    only_store = StackPlan((_part(plan, "valkey"),), plan.url, plan.model)
    ready = asyncio.Event()

    def on_change(state: StackState) -> None:
        if state.phase is Phase.READY:
            ready.set()

    with locked(folder):
        supervisor = Supervisor(only_store, folder, on_change, grace_seconds=10)
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(30):
            await ready.wait()
        url = _part(plan, "proxy").environment["KVLOOP_REDIS_URL"]
        with redis.Redis.from_url(url) as client:
            client.set("key", "value")
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-ttl"}
        supervisor.request_stop()
        assert (await running).phase is Phase.STOPPED
    assert sorted(os.listdir(tmp_path)) == ["lock", "logs"]
