"""``make bench-routes``: what each route of a turn costs on a real pair, and which is planned.

Agent-shaped conversations: a long history, then turns of a few tokens each. Every point (new
tokens a turn, other streams on decode) is measured under each fixed route and under the planner,
turn by turn in alternation within one run, each time beginning with another route, so that a
machine that changes its speed changes all. A conversation that has grown by ``--growth`` tokens
makes way for a new one, whose first turn is not counted: histories stay alike, and in the context.
While streams run, their gaps between tokens are measured too.

Prints a Markdown table, and as the last line a verdict: within a tenth of the best fixed route that
keeps the stall bound at every point, and never worse than cold. Turns of the same place in the
alternation are compared with each other; the verdict is on the median of these ratios. Exit status
1 when it is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from proxy.app import App
from proxy.settings import Settings
from tests.bench.reuse import SENTENCE, give_back, machine, stack, turn
from tests.proxy.conftest import running
from tests.real.conftest import Pair

ROUTES: dict[str, dict[str, Any]] = {
    "cold": {"reuse_enabled": False},
    "pull": {"plan_by_cost": False, "decode_local_append": False},
    "append": {"plan_by_cost": False, "append_tokens": 4096},
    "planner": {},
}
NOISE = 1.1
"""The planner may be this much behind the best fixed route."""


@dataclass
class Gaps:
    """Gaps between tokens of the streams that run on decode, in seconds."""

    seen: list[tuple[float, float]] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[float]:
        return [gap for at, gap in self.seen if start <= at <= end]


@dataclass
class Cell:
    """One route at one point."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def add(self, ttft: float, route: str, caused: list[float]) -> None:
        self.ttft.append(ttft)
        self.taken.append(route)
        self.gaps += caused
        if caused:
            self.longest.append(max(caused))

    def times(self, other: Cell) -> float:
        """The usual ratio to the other's turn of the same round."""
        return statistics.median(a / b for a, b in zip(self.ttft, other.ttft, strict=True))

    @property
    def median(self) -> float:
        return statistics.median(self.ttft)

    @property
    def stall(self) -> float:
        """The longest gap that a turn usually caused."""
        return statistics.median(self.longest) if self.longest else 0.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def words(tokens: int) -> str:
    """Text of about so many tokens (the sentence has 33)."""
    parts = SENTENCE.split()
    count = max(1, round(tokens * len(parts) / 33))
    return " ".join((parts * (count // len(parts) + 1))[:count])


@asynccontextmanager
async def streams(session: aiohttp.ClientSession, pair: Pair, count: int) -> AsyncIterator[Gaps]:
    """So many endless streams on decode, restarted when they reach their length."""
    gaps = Gaps()
    body = {
        "model": pair.model,
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }

    async def run() -> None:
        while True:
            url = pair.decode + "/v1/chat/completions"
            async with session.post(url, json=body) as reply:
                last = 0.0
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last:
                            gaps.seen.append((now, now - last))
                        last = now

    tasks = [asyncio.create_task(run()) for _ in range(count)]
    try:
        while count and len(gaps.seen) < 10 * count:
            await asyncio.sleep(0.05)
        yield gaps
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Conversation:
    """One conversation through one proxy."""

    def __init__(self, app: App, port: int, model: str, name: str, history: int) -> None:
        self.app = app
        self.url = f"http://127.0.0.1:{port}"
        self.grown = 0
        self.messages = [{"role": "user", "content": f"{name}. {words(history)}"}]
        self.body = {
            "model": model,
            "temperature": 0,
            "max_tokens": 8,
            "conversation_id": name,
            "ignore_eos": True,
        }

    async def go(self, session: aiohttp.ClientSession, new: int = 0) -> tuple[float, str]:
        """One turn of ``new`` more tokens: seconds to the first token, and the route."""
        if new:
            self.grown += new
            self.messages.append({"role": "user", "content": words(max(1, new - 8))})
        text, ttft, headers = await turn(
            session, self.url, {**self.body, "messages": self.messages}
        )
        self.messages.append({"role": "assistant", "content": text})
        return ttft, str(headers["X-KVLoop-Route"])  # type: ignore[call-overload,index]


async def learn(
    session: aiohttp.ClientSession, app: App, port: int, model: str, largest: int
) -> None:
    """Ordinary traffic, from which a proxy that was just started learns what legs cost."""
    for number in range(6):
        talk = Conversation(app, port, model, f"learn-{number}", 150 + 150 * number)
        for new in (0, 20, largest // 2 if number % 2 else largest, 30):
            await talk.go(session, new)
        await give_back(app, talk.body)


async def measure(pair: Pair, options: argparse.Namespace) -> tuple[str, list[str]]:
    async with AsyncExitStack() as opened:
        session = await opened.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        )
        proxies = {}
        for name, settings in ROUTES.items():
            app = App(
                Settings(
                    prefill_urls=(pair.prefill,),
                    decode_urls=(pair.decode,),
                    redis_url=pair.redis_url,
                    append_stall_seconds=options.stall,
                    **settings,
                )
            )
            proxies[name] = await opened.enter_async_context(running(app))
        await learn(session, *proxies["planner"], pair.model, max(options.new))
        rows, faults = [], []
        number = 0
        for count in options.streams:
            async with streams(session, pair, count) as gaps:
                for new in options.new:
                    cells = {name: Cell() for name in ROUTES}
                    talks: dict[str, Conversation] = {}
                    for turned in range(options.turns):
                        first = turned % len(ROUTES)
                        for name in (*tuple(ROUTES)[first:], *tuple(ROUTES)[:first]):
                            talk = talks.get(name)
                            if talk is None or talk.grown + new > options.growth:
                                if talk is not None:
                                    await give_back(talk.app, talk.body)
                                number += 1
                                title = f"{name}-{number}"
                                talk = talks[name] = Conversation(
                                    *proxies[name], pair.model, title, options.history
                                )
                                await talk.go(session)
                            start = time.perf_counter()
                            ttft, route = await talk.go(session, new)
                            caused = gaps.between(start, time.perf_counter())
                            cells[name].add(ttft, route, caused)
                    for name, talk in talks.items():
                        await give_back(proxies[name][0], talk.body)
                        print(f"{count} streams, {new} new, {name}: {cells[name].median:.2f} s")
                    rows += [row(count, new, name, cell) for name, cell in cells.items()]
                    faults += judged(count, new, cells, options.stall)
    head = (
        "| streams | new tokens | route | TTFT p50, ms | p99, ms | ITL of streams p50, ms "
        "| p99, ms | longest gap a turn, ms | taken |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows), faults


def row(count: int, new: int, name: str, cell: Cell) -> str:
    taken = {route: cell.taken.count(route) for route in sorted(set(cell.taken))}
    shown = ", ".join(f"{route} {times}" for route, times in taken.items())
    itl = [percentile(cell.gaps, 0.5), percentile(cell.gaps, 0.99), cell.stall]
    ms = [f"{value * 1000:,.0f}" if cell.gaps else "-" for value in itl]
    times = f"{cell.median * 1000:,.0f} | {percentile(cell.ttft, 0.99) * 1000:,.0f}"
    return f"| {count} | {new} | {name} | {times} | {' | '.join(ms)} | {shown} |"


def judged(count: int, new: int, cells: dict[str, Cell], bound: float) -> list[str]:
    """What the planner missed at this point."""
    planner, cold = cells["planner"], cells["cold"]
    usual = cells["cold"].stall
    fixed = {
        name: cell.median
        for name, cell in cells.items()
        if name != "planner" and (count == 0 or cell.stall - usual <= bound or name == "cold")
    }
    best = min(fixed, key=lambda name: fixed[name])
    found = []
    print(f"{count} streams, {new} new: planner {planner.times(cells[best]):.2f} times {best}")
    if (ratio := planner.times(cells[best])) > NOISE:
        found.append(f"{count} streams, {new} new: {ratio:.2f} times the TTFT of {best}")
    if planner.times(cold) > NOISE:
        found.append(f"{count} streams, {new} new: worse than cold")
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--history", type=int, default=1000, help="tokens before the first turn")
    options.add_argument("--new", type=int, nargs="+", default=[20, 100, 400])
    options.add_argument("--streams", type=int, nargs="+", default=[0, 2])
    options.add_argument("--turns", type=int, default=9)
    options.add_argument("--growth", type=int, default=1200, help="tokens; then a new one begins")
    options.add_argument(
        "--stall", type=float, default=0.6, help="the planner's append_stall_seconds"
    )
    chosen = options.parse_args()
    with stack(chosen.model) as pair:
        table, faults = asyncio.run(measure(pair, chosen))
    print(
        f"\n{chosen.turns} turns of each kind in alternation, history of {chosen.history} tokens,"
    )
    print(f"append_stall_seconds {chosen.stall:g}. {machine()}.\n\n{table}\n")
    for fault in faults:
        print(f"missed: {fault}")
    print("verdict:", "missed" if faults else "within a tenth of the best fixed route everywhere")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
