"""The report of a chaos run says what was found, and keeps what was not played again."""

from __future__ import annotations

from collections import Counter

from tests.chaos import report
from tests.chaos.leaks import Leaks
from tests.chaos.load import Tally, Verdict
from tests.chaos.rounds import Row
from tests.chaos.wedge import REQUESTS, Wedge


def tally(**counts: int) -> Tally:
    found = Tally(Counter({Verdict[name.upper()]: count for name, count in counts.items()}))
    found.compared = found.sent
    return found


def test_a_clean_row_has_nothing_to_complain_of() -> None:
    row = Row("a fault", tally(right=5, error=2, left=1), Leaks(), 3, "nobody knows")
    section = report.scripted_section([row])
    assert section.complaints == []
    assert "| a fault | 8 | 5 | 2 | 1 | 0 | 3 | 0 | 0 | 0 |" in section.text
    assert "- nobody knows: a fault" in section.text
    assert "**clean**" in section.written(1, 60)


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
    section = report.pair_section(rows)
    assert [each.split(":")[0] for each in section.complaints] == [row.fault for row in rows]
    assert "**NOT CLEAN**" in section.written(1, 60)


def test_a_wedge_with_an_answer_that_nobody_compared_is_not_clean() -> None:
    right = tally(right=REQUESTS)
    assert Wedge(right, 1.0, 0.1, {"pinned blocks": 3, "limit": 11}).complaints == []
    right.compared -= 1
    assert Wedge(right, 1.0, 0.1).complaints
    assert Wedge(tally(right=REQUESTS), 1.0, 0.1, {"pinned blocks": 12, "limit": 11}).complaints


def test_sections_that_were_not_played_stay_as_they_are() -> None:
    one, two, three = report.TITLES
    text = report.document({one: f"## {one}\n\nfirst\n", two: f"## {two}\n\nsecond\n"}, "")
    again = report.document({two: f"## {two}\n\nanew\n", three: f"## {three}\n\nthird\n"}, text)
    assert again.startswith(report.document({}, "")[:-1])
    assert again.count("# Chaos\n") == 1
    assert [
        line for line in again.splitlines() if line in ("first", "second", "anew", "third")
    ] == [
        "first",
        "anew",
        "third",
    ]
    assert report.document({}, again) == again
