"""``python -m tests.chaos``: faults under load, a table, exit code 1 unless it is clean."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time

from tests.chaos import report
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import Row, play


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--seconds", type=float, default=6, help="of load under each fault")
    options.add_argument("--only", default="", help="faults whose name has this in it")
    chosen = options.parse_args()

    # A scripted worker that is killed has handlers that cannot write any more.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    async def run() -> list[Row]:
        rows = []
        faults = [each for each in FAULTS if chosen.only in each.name]
        async for row in play(faults, seed=chosen.seed, seconds=chosen.seconds):
            rows.append(row)
            print(
                f"{time.strftime('%H:%M:%S')} {report.as_table([row]).splitlines()[-1]}", flush=True
            )
            for line in report.complaints([row])[:6]:
                print("    ", line[:400], flush=True)
        return rows

    rows = asyncio.run(run())
    print(report.as_table(rows))
    found = report.complaints(rows)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
