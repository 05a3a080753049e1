"""The wedge: one-shot requests on a decode worker whose pins could take all of its memory.

A stock bidirectional decode worker with 24 blocks of 32 tokens answered 11 short unrelated requests
and then nothing any more: each left its blocks pinned for 480 s. Here each request names a
conversation that never comes back, which is the worst case: all of them want to be kept.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.load import Load, Tally, Verdict, Ways
from tests.chaos.pair import FIELDS, HANGS, MODEL, running

REQUESTS = 500
IN_FLIGHT = 6
BLOCKS = 24
STOCK_ANSWERED = 11


@dataclass
class Wedge:
    """What became of the requests, and of decode's blocks."""

    tally: Tally
    seconds: float
    slowest: float
    pins: dict[str, int] = field(default_factory=dict)

    @property
    def complaints(self) -> list[str]:
        found = list(self.tally.complaints)
        right = self.tally.verdicts[Verdict.RIGHT]
        if right != REQUESTS:
            found.append(f"{right} of {REQUESTS} requests were answered right")
        if self.tally.compared < REQUESTS:
            found.append(f"only {self.tally.compared} answers were compared with a cold run's")
        if self.pins.get("pinned blocks", 0) > self.pins.get("limit", 0):
            found.append(f"more blocks are pinned than may be: {self.pins}")
        return found

    def text(self) -> str:
        right = self.tally.verdicts[Verdict.RIGHT]
        pins = ", ".join(f"{name}: {count}" for name, count in self.pins.items())
        return (
            f"{right} of {REQUESTS} one-shot requests answered right through kvloop, {IN_FLIGHT} "
            f"in flight, every other one streamed, in {self.seconds:.0f} s; the slowest took "
            f"{self.slowest:.1f} s. Right: the greedy text of {self.tally.compared} answers was "
            "compared with what prefill, which keeps nothing in this profile, gives to the same "
            "messages alone. Each request names a conversation that never comes back. At the end "
            f"on decode: {pins}.\n\n"
            f"Stock vLLM 0.32.0 as a bidirectional decode worker of {BLOCKS} blocks answered "
            f"{STOCK_ANSWERED} such requests, sent one after the other; the next got no answer "
            "within 60 s, with nothing running and nothing waiting.\n"
        )


async def play(seed: int, logs: Path | None) -> Wedge:
    # The longest request must fit into so few blocks.
    sets = (f"num-gpu-blocks-override={BLOCKS}", "max-model-len=512")
    async with running(seed, logs, decode_sets=sets, replicas=1) as rig:
        load = Load(rig.replicas, MODEL, rig.dice, right=None, hang_after=HANGS, ways=Ways(talks=0))
        left = list(range(REQUESTS))
        slowest = 0.0
        began = time.monotonic()

        async def client() -> None:
            nonlocal slowest
            while left:
                number = left.pop()
                words = " ".join(f"{rig.dice.getrandbits(20):x}" for _ in range(12))
                sent = time.monotonic()
                await load.ask(
                    {
                        "model": MODEL,
                        "messages": [{"role": "user", "content": words}],
                        "stream": bool(number % 2),
                        "conversation_id": f"once-{number}",
                        **FIELDS,
                    }
                )
                slowest = max(slowest, time.monotonic() - sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(client())
        seconds = time.monotonic() - began
        names = {
            "pins kept": "kvloop_pins_total",
            "refused": "kvloop_pins_refused_total",
            "expired": "kvloop_pins_expired_total",
            "released": "kvloop_pins_released_total",
            "pinned blocks": "kvloop_pinned_blocks",
            "limit": "kvloop_pin_limit_blocks",
        }
        pins = {name: int(await rig.decode.metric("vllm:" + key)) for name, key in names.items()}
        await load.tally.compare(rig.cold)
        return Wedge(load.tally, seconds, slowest, pins)
