"""The verdict of a soak: length classes, what is read from the log, what counts as clean."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.soak.report import Prefill, Soak, as_text, complaints, read_turn_log


def clean(**changes: Any) -> Soak:
    fields: dict[str, Any] = {
        "turns": 3,
        "routes": Counter({"prefill-with-pull": 2}),
        "prefills": [Prefill(200, False, 1.0), Prefill(10, True, 0.1)],
        "idle": {"pins held": {"prefill": 2.0, "decode": 9.9}},
        **changes,
    }
    return Soak(**fields)


def test_classes_part_lengths_and_pulls() -> None:
    """A class ends below a power of two, and a prefill with a pull is in a class of its own."""
    seen = [
        Prefill(31, False, 1),
        Prefill(32, False, 2),
        Prefill(63, False, 4),
        Prefill(5, True, 1),
    ]
    classes = Soak(prefills=seen).classes
    assert {name: one.count for name, one in classes.items()} == {
        "under 32 new tokens": 1,
        "under 64 new tokens": 2,
        "pull, under 32 new tokens": 1,
    }
    assert classes["under 64 new tokens"].median == 3


@pytest.mark.parametrize(("seconds", "stalls"), [(5.0, 0), (5.1, 1)])
def test_a_stall_is_over_five_medians_of_its_class(seconds: float, stalls: int) -> None:
    """Other classes do not count, however quick they are."""
    seen = [Prefill(40, False, 1.0)] * 4 + [Prefill(41, False, seconds)]
    assert Soak(prefills=[*seen, *[Prefill(5, False, 0.01)] * 9]).stalls == stalls


def test_speed_is_that_of_the_long_prefills() -> None:
    """Short ones are mostly overhead; without long ones there is no speed."""
    long = [Prefill(300, False, 1.0), Prefill(300, True, 2.0)]
    assert Soak(prefills=[*long, Prefill(1, False, 9)]).prefill_tokens_per_second == 200
    assert Soak(prefills=[Prefill(1, False, 9)]).prefill_tokens_per_second is None


def test_the_turn_log_gives_prefills_routes_and_retries() -> None:
    """New tokens are those not pulled; lines of other events and of other programs are skipped."""
    turn = {
        "event": "turn",
        "route": "prefill-with-pull",
        "attempts": 2,
        "prompt_tokens": 100,
        "pulled_tokens": 64,
        "legs_ms": {"prefill": 250.0},
    }
    plain = {**turn, "route": "decode-only", "attempts": 1, "legs_ms": {}, "pulled_tokens": None}
    soak = Soak()
    read_turn_log(
        ["noise", "3", json.dumps({"event": "up"}), *map(json.dumps, (turn, plain))], soak
    )
    assert soak.prefills == [Prefill(36, True, 0.25)]
    assert soak.routes == {"prefill-with-pull": 1, "decode-only": 1}
    assert soak.retries == 1


def test_a_clean_soak_has_no_complaint() -> None:
    """All that was wanted happened and every limit was kept."""
    assert complaints(clean(), 3) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"turns": 2}, "2 turns of 3"),
        ({"hangs": ["turn 2"]}, "1 hangs: turn 2"),
        ({"errors": ["HTTP 500"]}, "HTTP 500"),
        ({"differing": ["a"]}, "unlike"),
        ({"retries": 1}, "repeated"),
        ({"prefills": [*[Prefill(1, False, 1.0)] * 4, Prefill(1, False, 6.0)]}, "1 stalls"),
        ({"routes": Counter({"cold-prefill": 3})}, "nothing was reused"),
        ({"idle": {}}, "not measured"),
        ({"idle": {"pins held": {"decode": 10.0}}}, "idle decode, pins held: 10.0 %"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], word: str) -> None:
    """One fault, one complaint that says which."""
    found = complaints(clean(**changes), 3)
    assert len(found) == 1
    assert word in found[0]


def test_the_table_has_a_column_for_each_soak() -> None:
    """What one soak lacks is a dash there."""
    table = as_text({"before": Soak(), "after": clean()})
    assert "|  | before | after |" in table
    assert "| prefill tokens/s | - | 200 |" in table
    assert "| idle decode, pins held | - | 9.9 % |" in table
