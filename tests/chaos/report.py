"""The tables of a chaos run, and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.reuse import machine
from tests.chaos.load import Verdict
from tests.chaos.rounds import Row

if TYPE_CHECKING:
    from tests.chaos.wedge import Wedge

_HEAD = (
    "fault", "sent", "right", "proper error", "left", "cut", "until lease",
    "wrong", "hung", "leaked",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    complaints: list[str]

    def written(self, seed: int, seconds: float) -> str:
        """Markdown, with how it was played and its verdict."""
        verdict = "NOT CLEAN" if self.complaints else "clean"
        parts = [
            f"## {self.title}\n",
            f"Seed {seed}, {max(1, round(seconds / 60))} minutes, {machine()}: **{verdict}**.\n",
            self.text,
        ]
        if self.complaints:
            parts += ["Not clean:\n", *(f"- {line}" for line in self.complaints[:50]), ""]
        return "\n".join(parts)


def as_table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(_HEAD) + " |", "| --- |" + " ---: |" * (len(_HEAD) - 1)]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
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
    return "| " + " | ".join(map(str, cells)) + " |"


def say(row: Row) -> None:
    """Show a row as soon as it is there, and the first of its complaints."""
    print(_line(row), flush=True)
    for line in complaints([row])[:6]:
        print(f"    {line[:400]}", flush=True)


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the run, one line each; empty when it is clean."""
    found = []
    for row in rows:
        found += [f"{row.fault}: {each}" for each in (*row.tally.complaints, *row.complaints)]
        if row.leaked.all:
            found.append(f"{row.fault}: leaked {row.leaked}")
        if row.fault == "no fault" and row.tally.verdicts[Verdict.ERROR]:
            found.append(f"{row.fault}: {row.tally.verdicts[Verdict.ERROR]} errors")
        if not row.tally.verdicts[Verdict.RIGHT]:
            found.append(f"{row.fault}: not one right answer")
    return found


def scripted_section(rows: Sequence[Row]) -> Section:
    text = (
        "Two prefill and two decode workers, which are real HTTP servers without a model and whose "
        "answers depend on the tokens in their KV; a Valkey server behind a relay that can fail; "
        "two proxy processes. Eight clients hold 32 conversations through them.\n\n"
    )
    return Section(TITLES[0], text + as_table(rows) + _strandings(rows), complaints(rows))


def pair_section(rows: Sequence[Row]) -> Section:
    text = (
        "Two vLLM workers with NIXL between them on CPU, two proxy processes, a Valkey server. "
        "Every answer is compared with the one that prefill, which keeps nothing in this profile, "
        "gives to the same messages.\n\n"
    )
    return Section(TITLES[1], text + as_table(rows) + _strandings(rows), complaints(rows))


def wedge_section(wedge: Wedge) -> Section:
    return Section(TITLES[2], wedge.text(), wedge.complaints)


def _strandings(rows: Sequence[Row]) -> str:
    """Why some pins lasted to the end of their lease."""
    whys = {row.why: None for row in rows if row.until_lease}
    if not whys:
        return ""
    lines = [
        f"- {why}: " + "; ".join(row.fault for row in rows if row.until_lease and row.why == why)
        for why in whys
    ]
    return "\nPins that nobody could give back, so that the lease ended them:\n\n" + "\n".join(
        [*lines, ""]
    )


TITLES = ("Scripted workers", "The real pair", "A decode worker of 24 blocks")

_INTRODUCTION = """\
# Chaos

Written by `make chaos`. Each row: clients ask while one part fails and comes back.

| column | meaning |
| --- | --- |
| right | the whole answer that a cold run gives |
| proper error | 429, 502, 503 or 504 in the API's form (429 and 503 with Retry-After), or a right \
beginning and then an error event |
| left | the client went away |
| cut | the connection broke because its proxy was killed |
| until lease | blocks that decode kept until their lease was over, because nobody was left who \
could give them back; the reasons stand below each table |
| wrong | anything else that came |
| hung | no end in the time that a client waits |
| leaked | what was still there when all had settled: running requests, pins without an owner in \
the table, claimed handles neither pulled nor released, open connections, tasks |
"""


def document(played: Mapping[str, str], before: str) -> str:
    """The whole report. ``played``: sections by title; those not played stay as in ``before``."""
    sections = {}
    for part in before.split("\n## ")[1:]:
        sections[part.split("\n", 1)[0]] = "## " + part.rstrip("\n") + "\n"
    sections |= played
    return "\n".join([_INTRODUCTION, *(sections[each] for each in TITLES if each in sections)])
