"""``python -m tests.chaos [scripted] [pair] [wedge]``: faults under load, tables, a verdict.

Without a name all three are played. Exit code 1 unless everything is clean: no wrong answer, no
request left hanging, nothing leaked. ``--report FILE`` writes the tables down.
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

    began = time.monotonic()
    sections: list[report.Section] = []
    if "scripted" in parts:
        print(f"scripted workers, {len(FAULTS)} faults", flush=True)
        rows = asyncio.run(scripted(chosen.seed, chosen.seconds, chosen.only, chosen.logs))
        sections.append(report.scripted_section(rows))
    if "pair" in parts:
        from tests.chaos import pair

        print("the real pair", flush=True)
        rows = asyncio.run(pair.play(chosen.seed, chosen.only, chosen.logs))
        sections.append(report.pair_section(rows))
    if "wedge" in parts:
        from tests.chaos import wedge

        print("a decode worker of 24 blocks", flush=True)
        sections.append(report.wedge_section(asyncio.run(wedge.play(chosen.seed, chosen.logs))))
    text = report.document(sections, chosen.seed, time.monotonic() - began)
    print("\n" + text)
    if chosen.report:
        chosen.report.write_text(text)
    return 1 if any(each.complaints for each in sections) else 0


if __name__ == "__main__":
    raise SystemExit(main())
