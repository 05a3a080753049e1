"""Watching one request's results."""

from __future__ import annotations

import json

from tests.worker_launch.vllm_stand_in import Output, Result
from worker_launch.stream_patch.capture import TurnCapture


def seen(capture: TurnCapture) -> dict[str, object]:
    event: dict[str, object] = json.loads(capture.event().removeprefix(": kvloop "))
    return event


def test_streamed_results_add_up() -> None:
    """Delta results are joined, also where vLLM merged several tokens into one result."""
    capture = TurnCapture(delta=True)
    for result in (
        Result([Output([7])]),
        Result([Output([8, 9])], prompt_token_ids=None),
        Result([Output([], "stop")], True, {"remote_block_ids": [[1]]}),
    ):
        capture.observe(result)
    assert seen(capture) == {
        "v": 1,
        "kv_transfer_params": {"remote_block_ids": [[1]]},
        "token_ids": [7, 8, 9],
        "prompt_tokens": 3,
        "finish_reason": "stop",
    }


def test_whole_results_replace_each_other() -> None:
    """A result that holds all ids so far is not added to the one before."""
    capture = TurnCapture(delta=False)
    capture.observe(Result([Output([7])]))
    capture.observe(Result([Output([7, 8], "length")], True))
    assert capture.described()["token_ids"] == [7, 8]


def test_only_choice_zero_counts() -> None:
    """Another choice has other tokens and no part in this handle."""
    capture = TurnCapture(delta=True)
    capture.observe(Result([Output([5], index=1), Output([6])]))
    assert capture.described()["token_ids"] == [6]


def test_only_a_finished_request_without_error_is_complete() -> None:
    """Unfinished and failed requests have no event; stopped and aborted ones have."""
    for reason, finished, complete in (
        (None, False, False),
        ("error", True, False),
        ("stop", True, True),
        ("abort", True, True),
    ):
        capture = TurnCapture(delta=True)
        capture.observe(Result([Output([1], reason)], finished))
        assert capture.complete is complete, reason


def test_a_refused_pin_becomes_a_reason() -> None:
    """What the connector says instead of a handle is told apart from a handle."""
    capture = TurnCapture(delta=True)
    capture.observe(Result([Output([1], "stop")], True, {"kvloop_pin_refused": "lease_zero"}))
    assert seen(capture)["kv_transfer_params"] is None
    assert seen(capture)["pin_refused"] == "lease_zero"
