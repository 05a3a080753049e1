"""``python -m tests.chaos [scripted] [pair] [wedge]``: faults under load, tables, a verdict.

Without a name all three are played. Exit code 1 unless everything is clean: no wrong answer, no
request left hanging, nothing leaked. ``--report FILE`` writes the tables down, and beside them the
same as JSON; rows that are not played this time stay.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from tests.chaos import report
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import Row, play

PARTS = ("scripted", "pair", "wedge")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--seconds", type=float, default=4.5, help="of load around each fault")
    options.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="faults with these in their name"
    )
    options.add_argument("--report", type=Path, help="write the tables to this file")
    options.add_argument("--logs", type=Path, help="keep the logs and the results here")
    chosen = options.parse_args()
    parts = chosen.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        options.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    # So that a terminated run still stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A scripted worker that is killed has handlers that cannot write any more.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    file = chosen.report.with_suffix(".json") if chosen.report else None
    results = report.Results.read(file) if file else report.Results()
    for part in parts:
        if chosen.only == [""]:
            results.forget(part)
        print(f"\n{part}", flush=True)
        asyncio.run(_played(part, chosen, results))
        print("\n" + results.section(part), flush=True)
    return 1 if any(results.complaints(part) for part in parts) else 0


async def _played(part: str, chosen: argparse.Namespace, results: report.Results) -> None:
    began = time.monotonic()
    if part == "wedge":
        from tests.chaos import wedge

        found = await wedge.play(chosen.seed, chosen.logs)
        results.add_wedge(found, seed=chosen.seed, seconds=time.monotonic() - began)
        _write(chosen, results)
        return
    async with aclosing(_rows(part, chosen)) as rows:
        async for row in rows:
            seconds, began = time.monotonic() - began, time.monotonic()
            results.add_row(part, row, seed=chosen.seed, seconds=seconds)
            # At once: what is cut short later has still been played.
            _write(chosen, results)
            report.say(row)


def _write(chosen: argparse.Namespace, results: report.Results) -> None:
    if chosen.logs:
        results.write(chosen.logs / "chaos.json")
    if chosen.report:
        results.write(chosen.report.with_suffix(".json"))
        chosen.report.write_text(results.document())


async def _rows(part: str, chosen: argparse.Namespace) -> AsyncGenerator[Row, None]:
    def wanted(name: str) -> bool:
        return any(words in name for words in chosen.only)

    if part == "pair":
        from tests.chaos import pair

        played = pair.play([f for f in pair.FAULTS if wanted(f.name)], chosen.seed, chosen.logs)
    else:
        faults = [each for each in FAULTS if wanted(each.name)]
        played = play(faults, seed=chosen.seed, seconds=chosen.seconds, logs=chosen.logs)
    async with aclosing(played) as rows:
        async for row in rows:
            yield row


if __name__ == "__main__":
    raise SystemExit(main())
