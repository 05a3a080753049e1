"""The table of a chaos run, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.load import Verdict
from tests.chaos.rounds import Row

_HEAD = (
    "fault", "sent", "right", "proper error", "left", "cut", "until lease",
    "wrong", "hung", "leaked",
)  # fmt: skip


def as_table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(_HEAD) + " |", "| --- |" + " ---: |" * (len(_HEAD) - 1)]
    for row in rows:
        count = row.tally.verdicts
        cells = (
            row.fault,
            row.tally.sent,
            count[Verdict.RIGHT],
            count[Verdict.ERROR],
            count[Verdict.LEFT],
            count[Verdict.CUT],
            row.until_lease,
            count[Verdict.WRONG],
            count[Verdict.HUNG],
            row.leaked.all,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the run, one line each; empty when it is clean."""
    found = []
    for row in rows:
        found += [f"{row.fault}: {each}" for each in (*row.tally.complaints, *row.complaints)]
        if row.leaked.all:
            found.append(f"{row.fault}: leaked {row.leaked}")
        if not row.tally.verdicts[Verdict.RIGHT]:
            found.append(f"{row.fault}: not one right answer")
    return found
