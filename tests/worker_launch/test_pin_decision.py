"""May a finished request keep its blocks?"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_launch.connector.pin_decision import (
    Pin,
    Refusal,
    Refuse,
    decide_pin,
    lease_seconds,
    pin_limit,
)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(None, 480), (0, 0), (0.0, 0), (30, 30), (0.5, 0.5), (9999, 480), (math.inf, 480)]
    + [(bad, 480) for bad in (-1, math.nan, True, "30", [30])],
)
def test_a_lease_is_what_was_asked_within_the_longest(requested: object, expected: float) -> None:
    """Numbers of 0 or more are taken up to the longest; anything else counts as not asked."""
    assert lease_seconds(requested, 480) == expected


def test_pins_stop_at_the_share() -> None:
    """The last block of the share may be taken, the next one not."""
    arguments = {"requested_lease": None, "longest_lease": 60.0, "limit": 10}
    assert decide_pin(**arguments, pinned_with_request=10) == Pin(60.0)  # type: ignore[arg-type]
    assert decide_pin(**arguments, pinned_with_request=11) == (  # type: ignore[arg-type]
        Refuse(Refusal.OVER_SHARE)
    )


def test_a_lease_of_zero_keeps_nothing() -> None:
    """A lease of 0 is a refusal that was asked for, whatever is free."""
    assert decide_pin(
        requested_lease=0, longest_lease=60, pinned_with_request=1, limit=10
    ) == Refuse(Refusal.LEASE_ZERO)


@given(usable=st.integers(0, 10_000), fraction=st.floats(0.001, 1))
def test_the_limit_never_exceeds_the_share(usable: int, fraction: float) -> None:
    """The limit is whole blocks and rounded down."""
    limit = pin_limit(usable, fraction)
    assert limit <= usable * fraction < limit + 1


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, math.nan])
def test_a_senseless_share_is_refused(fraction: float) -> None:
    """The start fails and names the setting."""
    with pytest.raises(ValueError, match="kvloop_max_pinned_fraction"):
        pin_limit(10, fraction)
