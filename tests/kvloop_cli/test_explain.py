"""``kvloop explain``: from a file or a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvloop.cli import app
from kvloop.explain import meanings

TURN = {
    "time": "2026-01-01T10:00:02.000+00:00", "level": "info", "event": "turn", "request": "r-1",
    "session": "by-prefix", "route": "cold-prefill", "reason": "new_session", "outcome": "ok",
    "streamed": True, "prompt_tokens": 1200, "reused_tokens": 0, "pulled_tokens": 0,
    "prefill_cached_tokens": 0, "planned_pull": 0, "prefill": "p:8100", "decode": "d:8200",
    "attempts": 1, "kept": "stored", "kept_tokens": 1300, "kept_seconds": 450,
    "holding_used": "", "holding_left": "abcdef0123", "ttft_ms": 900.0, "total_ms": 2100.0,
    "legs_ms": {"tokenise": 12.0, "prefill": 800.0, "decode": 60.0}, "itl_ms": 21.0,
    "longest_gap_ms": 40.0,
}  # fmt: skip


@pytest.mark.parametrize("piped", [False, True])
def test_the_story_of_a_turn(tmp_path: Path, piped: bool) -> None:
    text = json.dumps(TURN) + "\n"
    path = tmp_path / "proxy.log"
    path.write_text(text)
    arguments = ["explain", "r-1"] if piped else ["explain", "r-1", str(path)]
    outcome = CliRunner().invoke(app, arguments, input=text if piped else None)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.splitlines() == [
        "Request r-1, over at 10:00:02.000: a session without an id, streamed, 1,200 prompt "
        "tokens.",
        f"Route cold-prefill, reason new_session. {meanings()['new_session']}",
        "Tokenised in 12 ms.",
        "Prefill p:8100 pulled 0 tokens from decode, found 0 in its own cache and computed 1,200, "
        "in 800 ms.",
        "Decode d:8200 sent first content after 60 ms.",
        "The client saw: first content after 900 ms, a piece every 21 ms, longest pause 40 ms, "
        "complete after 2,100 ms.",
        "Decode keeps 1,300 tokens for 450 s, as holding abcdef01.",
    ]


def test_a_request_that_is_not_there(tmp_path: Path) -> None:
    """Exit code 1 and one line that says so."""
    outcome = CliRunner().invoke(app, ["explain", "r-2"], input=json.dumps(TURN))
    assert outcome.exit_code == 1
    assert "No line of this log is about request r-2." in outcome.output
