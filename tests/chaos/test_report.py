"""The report of a chaos run says what was found, and keeps what was not played again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.leaks import Leaks
from tests.chaos.load import Tally, Verdict
from tests.chaos.report import Results
from tests.chaos.rounds import Row
from tests.chaos.wedge import REQUESTS, Wedge

DOCS = Path(__file__).parent.parent.parent / "docs"


def tally(**counts: int) -> Tally:
    found = Tally(Counter({Verdict[name.upper()]: count for name, count in counts.items()}))
    found.compared = found.sent
    return found


def test_a_clean_row_has_nothing_to_complain_of() -> None:
    results = Results()
    row = Row("a fault", tally(right=5, error=2, left=1), Leaks(), 3, "nobody knows")
    results.add_row("scripted", row, seed=1, seconds=90)
    text = results.section("scripted")
    assert results.complaints("scripted") == []
    assert "| a fault | 8 | 5 | 2 | 1 | 0 | 3 | 0 | 0 | 0 |" in text
    assert "- nobody knows: a fault" in text
    assert "Seed 1, 2 minutes" in text
    assert "**clean**" in text


def test_each_kind_of_trouble_is_a_complaint() -> None:
    wrong = tally(right=5)
    wrong.note(Verdict.WRONG, "other words")
    hung = tally(right=5)
    hung.note(Verdict.HUNG, "no end")
    rows = [
        Row("wrong", wrong, Leaks()),
        Row("hung", hung, Leaks()),
        Row("leaked", tally(right=5), Leaks(pins=1)),
        Row("none right", tally(error=5), Leaks()),
        Row("no fault", tally(right=5, error=1), Leaks()),
    ]
    results = Results()
    for row in rows:
        results.add_row("pair", row, seed=1, seconds=1)
    named = [each.split(":")[0] for each in results.complaints("pair")]
    assert named == [row.fault for row in rows]
    assert "**NOT CLEAN**" in results.section("pair")


def test_a_wedge_with_an_answer_that_nobody_compared_is_not_clean() -> None:
    right = tally(right=REQUESTS)
    assert Wedge(right, 1.0, 0.1, {"pinned blocks": 3, "limit": 11}).complaints == []
    right.compared -= 1
    assert Wedge(right, 1.0, 0.1).complaints
    assert Wedge(tally(right=REQUESTS), 1.0, 0.1, {"pinned blocks": 12, "limit": 11}).complaints


def test_rows_that_are_not_played_again_stay(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    results = Results()
    for name in ("one", "two"):
        results.add_row("scripted", Row(name, tally(right=1), Leaks()), seed=1, seconds=1)
    results.write(file)
    again = Results.read(file)
    assert again.document() == results.document()
    again.add_row("scripted", Row("two", tally(right=7), Leaks()), seed=1, seconds=1)
    assert "| one | 1 | 1 |" in again.document()
    assert "| two | 7 | 7 |" in again.document()
    again.forget("scripted")
    assert again.document() == Results().document()


def test_the_page_is_what_the_kept_runs_say() -> None:
    """No number on it was written by hand, and no fault is left out."""
    from tests.chaos import pair
    from tests.chaos.faults import FAULTS

    page = (DOCS / "chaos.md").read_text()
    assert page == Results.read(DOCS / "chaos.json").document()
    for fault in (*FAULTS, *pair.FAULTS):
        assert f"| {fault.name} |" in page


@pytest.mark.parametrize("part", ["scripted", "pair", "wedge"])
def test_the_kept_runs_are_clean(part: str) -> None:
    assert Results.read(DOCS / "chaos.json").complaints(part) == []


def test_what_is_clean_is_told_from_what_is_not() -> None:
    row = Row("a fault", tally(right=1), Leaks(), complaints=["wrong: exit code 3"])
    assert report.complaints([row]) == ["a fault: wrong: exit code 3"]
