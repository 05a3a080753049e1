"""What chaos runs found: kept as JSON, shown as tables, with a verdict.

Rows are kept one by one, so that one fault can be played again without all others. A part that is
played as a whole starts anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.reuse import machine
from tests.chaos.leaks import Leaks
from tests.chaos.load import Tally, Verdict
from tests.chaos.rounds import Row
from tests.chaos.wedge import Wedge

_HEAD = (
    "fault", "sent", "right", "proper error", "left", "cut", "until lease",
    "wrong", "hung", "leaked",
)  # fmt: skip

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

_SECTIONS = {
    "scripted": (
        "Scripted workers",
        "Two prefill and two decode workers, which are real HTTP servers without a model and whose "
        "answers depend on the tokens in their KV; a Valkey server behind a relay that can fail; "
        "two proxy processes. Eight clients hold 32 conversations through them.\n",
    ),
    "pair": (
        "The real pair",
        "Two vLLM workers with NIXL between them on CPU, two proxy processes, a Valkey server. "
        "Four clients. Every answer is compared with the one that prefill, which keeps nothing in "
        "this profile, gives to the same messages.\n",
    ),
    "wedge": ("A decode worker of 24 blocks", ""),
}


class Results:
    """Rows by part and fault, kept in a JSON file."""

    def __init__(self, kept: dict[str, dict[str, Any]] | None = None) -> None:
        self._kept = kept or {}

    @classmethod
    def read(cls, file: Path) -> Results:
        """Of an earlier run; empty if there is none."""
        return cls(json.loads(file.read_text()) if file.exists() else None)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self._kept, indent=1) + "\n")

    def forget(self, part: str) -> None:
        """The part is played as a whole."""
        self._kept.pop(part, None)

    def add_row(self, part: str, row: Row, *, seed: int, seconds: float) -> None:
        self._add(part, row.fault, seed, seconds, complaints([row]))
        self._kept[part][row.fault] |= {
            "verdicts": {verdict.value: count for verdict, count in row.tally.verdicts.items()},
            "leaked": asdict(row.leaked),
            "until_lease": row.until_lease,
            "why": row.why if row.until_lease else "",
        }

    def add_wedge(self, wedge: Wedge, *, seed: int, seconds: float) -> None:
        self._add("wedge", "wedge", seed, seconds, wedge.complaints)
        self._kept["wedge"]["wedge"]["text"] = wedge.text()

    def _add(self, part: str, name: str, seed: int, seconds: float, found: list[str]) -> None:
        self._kept.setdefault(part, {})[name] = {
            "seed": seed,
            "seconds": round(seconds, 1),
            "machine": machine(),
            "complaints": found,
        }

    def complaints(self, part: str) -> list[str]:
        return [line for each in self._kept.get(part, {}).values() for line in each["complaints"]]

    def section(self, part: str) -> str:
        """Markdown of one part, with its verdict."""
        kept = list(self._kept[part].values())
        title, text = _SECTIONS[part]
        seeds = ", ".join(sorted({str(each["seed"]) for each in kept}))
        where = "; ".join(sorted({each["machine"] for each in kept}))
        minutes = max(1, round(sum(each["seconds"] for each in kept) / 60))
        found = self.complaints(part)
        verdict = "NOT CLEAN" if found else "clean"
        parts = [f"## {title}\n", f"Seed {seeds}, {minutes} minutes, {where}: **{verdict}**.\n"]
        if part == "wedge":
            parts += [each["text"] for each in kept]
        else:
            rows = [_row(fault, each) for fault, each in self._kept[part].items()]
            parts += [text, as_table(rows) + _strandings(rows)]
        if found:
            parts += ["Not clean:\n", *(f"- {line}" for line in found[:50]), ""]
        return "\n".join(parts)

    def document(self) -> str:
        """The whole report in Markdown."""
        return "\n".join([_INTRODUCTION, *map(self.section, filter(self._kept.get, _SECTIONS))])


def _row(fault: str, kept: dict[str, Any]) -> Row:
    verdicts = Counter({Verdict(name): count for name, count in kept["verdicts"].items()})
    return Row(fault, Tally(verdicts), Leaks(**kept["leaked"]), kept["until_lease"], kept["why"])


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
