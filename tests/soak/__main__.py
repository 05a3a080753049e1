"""``python -m tests.soak``: soak the local stack, print what was seen; exit code 1 unless clean.

``before`` is the same stack with the CPU mends taken away and a few turns; ``after`` is the stack
as ``make up`` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvloop.bench.machine import machine
from tests.soak import report, turns
from tests.soak.report import Soak
from tests.soak.stack import STOCK, running_stack

REPOSITORY = Path(__file__).parent.parent.parent
MODELS = Path(os.environ.get("KVLOOP_MODELS_DIR", REPOSITORY / ".kvloop" / "models"))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2", help="smollm2, tiny or a model folder")
    options.add_argument("--turns", type=int, default=500)
    options.add_argument("--limit", type=float, default=1200, help="seconds for all turns")
    options.add_argument("--before-turns", type=int, default=8, help="0: leave `before` out")
    options.add_argument("--before-limit", type=float, default=60, help="seconds for these")
    options.add_argument("--set", action="append", default=[], help="worker override, KEY=VALUE")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--logs", type=Path, help="keep the stack's state and logs here")
    chosen = options.parse_args()
    # So that a terminated soak still stops the stack that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    soaks: dict[str, Soak] = {}
    with tempfile.TemporaryDirectory(prefix="kvloop-soak-") as scratch:
        folder = chosen.logs or Path(scratch)
        if chosen.before_turns:
            print(f"before: {chosen.before_turns} turns with {chosen.model}", flush=True)
            soaks["before"] = _soak(
                folder / "before", chosen, STOCK, chosen.before_turns, chosen.before_limit
            )
        print(f"after: {chosen.turns} turns with {chosen.model}", flush=True)
        soaks["after"] = _soak(folder / "after", chosen, chosen.set, chosen.turns, chosen.limit)

    print(f"\n{chosen.model}, seed {chosen.seed}, {machine()}\n")
    print(report.as_text(soaks))
    found = report.complaints(soaks["after"], chosen.turns)
    print("\nclean" if not found else "\nNOT CLEAN\n" + "\n".join(f"- {one}" for one in found))
    return 1 if found else 0


def _soak(
    folder: Path,
    chosen: argparse.Namespace,
    overrides: Sequence[str],
    count: int,
    limit_seconds: float,
) -> Soak:
    with running_stack(folder, model=chosen.model, models=MODELS, overrides=overrides) as stack:
        result = asyncio.run(
            turns.soak(stack, turns=count, limit_seconds=limit_seconds, seed=chosen.seed)
        )
        report.read_turn_log(stack.proxy_log.read_text().splitlines(), result)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
