"""Workers that come and go: a file, DNS, and operators."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from proxy.app import App
from proxy.settings import Settings
from proxy.workers.sources import SourceError, Sources, check_url, read_file
from proxy.workers.worker import Role
from tests.fakes.worker import Cluster, FakeWorker
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, assistant, user


def admin(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app.admin), base_url="http://127.0.0.1"
    )


def names(app: App, role: Role) -> set[str]:
    return {worker.name for worker in app.pool.workers if worker.role is role}


async def healthy(app: App, name: str) -> None:
    async with asyncio.timeout(20):
        while not ((worker := app.pool.get(name)) and worker.healthy):
            await asyncio.sleep(0.01)


@pytest.fixture
async def another(serve: Serve) -> Any:
    """Start more fakes of a running proxy's cluster."""
    started: list[FakeWorker] = []

    async def start(serving: Serving, role: str, **kind: Any) -> FakeWorker:
        fake = await FakeWorker(serving.cluster, role, **kind).start()
        started.append(fake)
        return fake

    yield start
    for fake in started:
        await fake.stop()


async def test_a_worker_is_added_drained_and_removed_while_turns_go_on(
    serve: Serve, another: Any
) -> None:
    """Drained, a decode worker gets no turn, but what it keeps is pulled to where the turn goes."""
    serving = await serve()
    new = await another(serving, "decode")
    messages = [user(LONG)]
    assert (await serving.chat(messages)).reason == "new_session"
    async with admin(serving.app) as operator:
        answer = await operator.post("/admin/workers", json={"url": new.url, "role": "decode"})
        assert (answer.status_code, answer.json()["source"]) == (201, "admin")
        await healthy(serving.app, new.name)
        answer = await operator.put(
            f"/admin/workers/{serving.decode.name}", json={"draining": True}
        )
        assert answer.json()["draining"] is True
        messages += [assistant("Fine."), user("More.")]
        moved = await serving.chat(messages)
        assert (moved.reason, len(new.bodies("/v1/chat/completions"))) == ("history_grew", 1)

        answer = await operator.delete(f"/admin/workers/{serving.decode.name}")
        assert answer.json() == {"removed": serving.decode.name, "outstanding": 0}
        assert names(serving.app, Role.DECODE) == {new.name}
        assert (await operator.delete("/admin/workers/none:1")).status_code == 404
        answer = await operator.put("/admin/workers/none:1", json={"draining": True})
        assert answer.status_code == 404
        answer = await operator.post("/admin/workers", json={"url": "ftp://x", "role": "decode"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")
    messages += [assistant("Fine."), user("And more.")]
    assert (await serving.chat(messages)).reason == "history_grew"
    assert serving.cluster.faults == []
    page = (await serving.get("/metrics")).body.decode()
    assert serving.decode.name not in page.split("kvloop_worker_healthy", 1)[1]


async def test_changes_hold_in_every_proxy_and_outlive_them(serve: Serve, another: Any) -> None:
    """What one proxy's operator did, another one follows, and a later one starts with."""
    one = await serve(discovery_interval_seconds=0.05)
    shared = {"workers": ([*one.prefills], [*one.decodes]), "cluster": one.cluster}
    other = await serve(**shared, discovery_interval_seconds=0.05)
    new = await another(one, "prefill")
    async with admin(one.app) as operator:
        await operator.post("/admin/workers", json={"url": new.url, "role": "prefill"})
    await healthy(other.app, new.name)
    async with admin(other.app) as operator:
        await operator.put(f"/admin/workers/{new.name}", json={"draining": True})
    async with asyncio.timeout(20):
        while not (worker := one.app.pool.get(new.name)) or not worker.draining:
            await asyncio.sleep(0.01)
    async with admin(one.app) as operator:
        await operator.put(f"/admin/workers/{new.name}", json={"draining": False})
        assert not one.app.pool.get(new.name).draining  # type: ignore[union-attr]


async def test_a_change_without_redis_is_refused_and_changes_nothing(serve: Serve) -> None:
    serving = await serve(redis_url="redis://127.0.0.1:1")
    async with admin(serving.app) as operator:
        answer = await operator.delete(f"/admin/workers/{serving.decode.name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "table_unavailable")
    assert serving.app.pool.get(serving.decode.name) is not None


async def test_a_watched_file_adds_and_takes_away(
    serve: Serve, another: Any, tmp_path: Path
) -> None:
    """Lines come and go; a broken file changes nothing and is shown."""
    file = tmp_path / "workers.toml"
    file.write_text("")
    serving = await serve(workers_file=str(file), discovery_interval_seconds=1000)
    new = await another(serving, "decode")
    app = serving.app
    file.write_text(f'decode_urls = ["{new.url}"]')
    await app.roster.refresh()
    await healthy(app, new.name)

    file.write_text("decode_urls = [")
    await app.roster.refresh()
    assert app.pool.get(new.name) is not None
    assert str(file) in app.roster.source_errors

    # Named no more, it gets no turns; once it does not answer either, it is gone.
    file.write_text("")
    await app.roster.refresh()
    worker = app.pool.get(new.name)
    assert worker is not None
    assert worker.draining
    await new.stop()
    async with asyncio.timeout(20):
        while worker.healthy:
            await asyncio.sleep(0.01)
    await app.roster.refresh()
    assert app.pool.get(new.name) is None
    assert app.roster.source_errors == {}


async def test_all_addresses_of_a_name_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up each time; while nobody answers the last ones stay."""
    addresses = [("10.0.0.1", 80), ("10.0.0.2", 80), ("10.0.0.2", 80), ("fd00::1", 80, 0, 0)]

    async def getaddrinfo(host: str, port: int, **more: Any) -> Any:
        assert (host, port) == ("decode.pool", 8200)
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", address) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    sources = Sources([("dns+http://decode.pool:8200", Role.DECODE)], None)
    found = await sources.read()
    assert set(found) == {"10.0.0.1:8200", "10.0.0.2:8200", "[fd00::1]:8200"}
    assert {each.source for each in found.values()} == {"dns"}
    addresses.clear()
    assert set(await sources.read()) == set(found)
    assert "not known" in sources.errors["dns+http://decode.pool:8200"]


def test_addresses_are_checked() -> None:
    """Scheme, host, and for DNS a port; no path."""
    assert check_url(" http://h:1/ ") == "http://h:1"
    for wrong in ("h:1", "ftp://h:1", "http://", "dns+http://h", "http://h:1/v1", "http://h:x"):
        with pytest.raises(ValueError, match="not a worker address"):
            check_url(wrong)


def test_a_wrong_file_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    for content, words in (
        ("prefil_urls = []", "unknown key 'prefil_urls'"),
        ('prefill_urls = "http://a:1"', "must be a list"),
        ('prefill_urls = ["a"]', "not a worker address"),
    ):
        file.write_text(content)
        with pytest.raises(SourceError, match=words):
            read_file(str(file))
    with pytest.raises(SourceError, match="No such file"):
        read_file(str(tmp_path / "none"))


def test_a_file_alone_is_enough_to_start(tmp_path: Path) -> None:
    assert Settings(workers_file=str(tmp_path / "w.toml")).decode_urls == ()
    with pytest.raises(ValueError, match="at least one decode worker"):
        Settings()


async def test_pairs_that_cannot_exchange_are_not_paired_and_say_why(
    serve: Serve, another: Any
) -> None:
    """A prefill worker of another vLLM version is never used beside this decode worker."""
    serving = await serve(prefills=0)
    serving.decode.knobs.version = "0.32.0"
    odd = await another(serving, "prefill")
    odd.knobs.version = "0.31.0"
    app = serving.app
    await app.roster.add(odd.url, Role.PREFILL)
    await healthy(app, odd.name)
    decode = app.pool.get(serving.decode.name)
    assert decode is not None
    decode.healthy = False
    await app.health.probe(decode, facts=True)
    state = (await serving.get("/ready")).json
    assert "vLLM versions differ" in state["pairs"][0]["no_pull"]
    answer = await serving.chat([user(LONG)])
    assert (answer.route, answer.reason) == ("decode-only", "no_prefill_worker")
    assert odd.bodies("/v1/completions") == []


async def test_what_nobody_could_pull_is_not_kept(serve: Serve) -> None:
    """Blocks that no prefill worker can read or release would only wait for their lease."""
    cluster = Cluster()
    small = await FakeWorker(cluster, "prefill", block_size=16).start()
    large = await FakeWorker(cluster, "decode", block_size=32).start()
    try:
        serving = await serve(workers=([small], [large]), cluster=cluster)
        answer = await serving.chat([user(LONG)])
        assert answer.route == "cold-prefill"
        assert large.pinned() == 0
    finally:
        await small.stop()
        await large.stop()
