"""[pure] A workload for another load generator, so that a figure need not rest on ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from kvloop.bench.workloads import Script, Workload


class CannotExport(ValueError):
    """The format has no way to say this; the message names what."""


def aiperf_lines(workload: Workload) -> Iterator[str]:
    """AIPerf's ``multi_turn`` dataset: one conversation a line. Raises ``CannotExport``.

    AIPerf appends each answer to the history itself, as we do. It knows no edited history, no
    compaction and no branches.
    """
    for script in _all(workload.scripts):
        turns = []
        for step in script.steps:
            if step.rewrite is not None:
                raise CannotExport(f"{workload.name}: AIPerf cannot rewrite a history")
            turn: dict[str, object] = {
                "text": "\n\n".join(message["content"] for message in step.add)
            }
            if step.pause:
                turn["delay"] = round(step.pause * 1000)
            turns.append(turn)
        yield json.dumps({"session_id": script.name, "turns": turns})


def _all(scripts: Iterable[Script]) -> Iterator[Script]:
    for script in scripts:
        if script.branches:
            raise CannotExport(f"{script.name}: AIPerf's format has no branches")
        yield script
