"""Numbers in the README and the benchmark page come from the committed report, and it from runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvloop.bench import records, report, summary
from kvloop.document import Table, markdown

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "docs" / "bench"


@cache
def runs() -> tuple[records.Run, ...]:
    files = sorted((BENCH / "runs").glob("*.json"))
    return tuple(records.from_json(file.read_bytes(), file.name) for file in files)


def table_rows(text: str) -> list[str]:
    """Rows of comparisons: those that name a ratio."""
    return [line for line in text.splitlines() if line.startswith("| ") and "x (" in line]


@pytest.mark.parametrize("page", ["README.md", "docs/benchmark.md"])
def test_each_comparison_on_a_page_is_a_row_of_the_report(page: str) -> None:
    reported = set(table_rows((BENCH / "report.md").read_text()))
    shown = table_rows((ROOT / page).read_text())
    assert shown
    assert set(shown) <= reported


def test_the_report_s_comparisons_are_what_the_runs_say() -> None:
    turns = report.joined(report.labelled(runs()))
    (made,) = [b for b in report.effect_table(summary.compare(turns)) if isinstance(b, Table)]
    computed = table_rows(markdown("", [made]))
    assert computed == table_rows((BENCH / "report.md").read_text())


def test_committed_runs_hold_no_text_and_no_paths_of_a_machine() -> None:
    for run in runs():
        assert run.turns
        assert "-dirty" not in run.commit
        text = records.to_json(run).decode()
        assert not any(word in text for word in ("river stone", "/home/", "/tmp/", "/root/"))
