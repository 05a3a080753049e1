"""The bytes of the turn event."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker_launch.stream_patch.chunk import TURN_EVENT_PREFIX, encode_turn_event

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def test_the_event_is_exactly_this() -> None:
    """Key names, order and form are the contract with the proxy."""
    assert encode_turn_event(
        kv_transfer_params={"remote_block_ids": [[1, 2]]},
        token_ids=[5, 6],
        prompt_tokens=3,
        finish_reason="stop",
    ) == (
        ': kvloop {"v":1,"kv_transfer_params":{"remote_block_ids":[[1,2]]},'
        '"token_ids":[5,6],"prompt_tokens":3,"finish_reason":"stop"}\n\n'
    )


def test_a_refused_pin_says_why_and_has_no_handle() -> None:
    """``pin_refused`` appears only when a pin was refused, beside a null handle."""
    event = encode_turn_event(
        kv_transfer_params=None,
        token_ids=[],
        prompt_tokens=1,
        finish_reason="length",
        pin_refused="over_share",
    )
    assert json.loads(event.removeprefix(TURN_EVENT_PREFIX)) == {
        "v": 1,
        "kv_transfer_params": None,
        "token_ids": [],
        "prompt_tokens": 1,
        "finish_reason": "length",
        "pin_refused": "over_share",
    }


@given(
    params=st.none() | st.dictionaries(st.text(), JSON_VALUES),
    ids=st.lists(st.integers(min_value=0)),
    count=st.integers(min_value=0),
    reason=st.none() | st.text(),
)
def test_any_event_is_one_comment_line(
    params: dict[str, Any] | None, ids: list[int], count: int, reason: str | None
) -> None:
    """Whatever is in it: one line that starts with a colon, a blank one, and the same values."""
    event = encode_turn_event(
        kv_transfer_params=params, token_ids=ids, prompt_tokens=count, finish_reason=reason
    )
    line, first_blank, rest = event.partition("\n\n")
    assert (first_blank, rest) == ("\n\n", "")
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert line.startswith(TURN_EVENT_PREFIX)
    decoded = json.loads(line.removeprefix(TURN_EVENT_PREFIX))
    assert decoded["kv_transfer_params"] == params
    assert decoded["token_ids"] == ids
    assert decoded["prompt_tokens"] == count
    assert decoded["finish_reason"] == reason
