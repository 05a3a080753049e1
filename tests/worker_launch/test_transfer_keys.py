"""Our keys inside ``kv_transfer_params``."""

from __future__ import annotations

from typing import Any

import pytest

from worker_launch.transfer_keys import asks_for_event, split_handle


@pytest.mark.parametrize(
    ("params", "asks"),
    [
        ({"kvloop": 1}, True),
        ({"kvloop": 1, "do_remote_prefill": True}, True),
        ({"kvloop": 0}, False),
        ({"kvloop": {"v": 1}}, False),
        ({"do_remote_prefill": True}, False),
        ({}, False),
        (None, False),
        ("kvloop", False),
    ],
)
def test_only_an_explicit_one_asks(params: object, asks: bool) -> None:
    """Only ``"kvloop": 1`` asks for the event."""
    assert asks_for_event(params) is asks


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, (None, None)),
        ({}, (None, None)),
        ({"kvloop_pin_refused": "over_share"}, (None, "over_share")),
        ({"remote_block_ids": [[1]]}, ({"remote_block_ids": [[1]]}, None)),
        ({"remote_block_ids": [[1]], "kvloop": 1}, ({"remote_block_ids": [[1]]}, None)),
    ],
)
def test_a_refused_pin_is_no_handle(
    params: dict[str, Any] | None, expected: tuple[dict[str, Any] | None, str | None]
) -> None:
    """What the engine returns is either a handle or a reason, never both."""
    assert split_handle(params) == expected
