"""The README's compatibility table says what the measured page says."""

from __future__ import annotations

from pathlib import Path

from tests.real.features import report

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_what_was_measured() -> None:
    """``make features`` writes both; neither is edited by hand, and no cell is a difference."""
    page, readme = (ROOT / "docs/compatibility.md").read_text(), (ROOT / "README.md").read_text()
    assert report.put_into(readme, page) == readme
    table = report.summary(page)
    assert "DIFFERENT" not in table
    assert table.count("reuse") > 20
