"""``python -m tests.chaos [scripted] [pair] [wedge]``: faults under load, tables, a verdict.

Without a name all three are played. Exit code 1 unless everything is clean: no wrong answer, no
request left hanging, nothing leaked. ``--report FILE`` writes the tables down; what is not played
this time stays as it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from tests.chaos import report
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import Row, play

PARTS = ("scripted", "pair", "wedge")


async def scripted(seed: int, seconds: float, only: Sequence[str], logs: Path | None) -> list[Row]:
    rows = []
    faults = [each for each in FAULTS if any(part in each.name for part in only)]
    async with aclosing(play(faults, seed=seed, seconds=seconds, logs=logs)) as played:
        async for row in played:
            rows.append(row)
            report.say(row)
    return rows


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--seconds", type=float, default=4.5, help="of load around each fault")
    options.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="faults with these in their name"
    )
    options.add_argument("--report", type=Path, help="write the tables to this file")
    options.add_argument("--logs", type=Path, help="keep the logs here")
    chosen = options.parse_args()
    parts = chosen.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        options.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    # So that a terminated run still stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A scripted worker that is killed has handlers that cannot write any more.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    played: dict[str, str] = {}
    clean = True
    before = chosen.report.read_text() if chosen.report and chosen.report.exists() else ""

    def done(section: report.Section, began: float) -> None:
        nonlocal clean
        clean = clean and not section.complaints
        text = section.written(chosen.seed, time.monotonic() - began)
        played[section.title] = text
        print("\n" + text, flush=True)
        if chosen.report:
            chosen.report.write_text(report.document(played, before))

    if "scripted" in parts:
        print(f"scripted workers, {len(FAULTS)} faults", flush=True)
        began = time.monotonic()
        rows = asyncio.run(scripted(chosen.seed, chosen.seconds, chosen.only, chosen.logs))
        done(report.scripted_section(rows), began)
    if "pair" in parts:
        from tests.chaos import pair

        print("the real pair", flush=True)
        began = time.monotonic()
        rows = asyncio.run(pair.play(chosen.seed, chosen.only, chosen.logs))
        done(report.pair_section(rows), began)
    if "wedge" in parts:
        from tests.chaos import wedge

        print("a decode worker of 24 blocks", flush=True)
        began = time.monotonic()
        done(report.wedge_section(asyncio.run(wedge.play(chosen.seed, chosen.logs))), began)
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
