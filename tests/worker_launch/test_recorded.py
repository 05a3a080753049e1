"""Our event's form against what real vLLM 0.32.0 workers sent (``recorded/*.json``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker_launch.stream_patch.chunk import TURN_EVENT_PREFIX, encode_turn_event

RECORDED = Path(__file__).parent / "recorded"
STREAMS = sorted(
    path.stem for path in RECORDED.glob("*.json") if ": kvloop " in path.read_text("utf-8")
)


def recorded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))
    return content


@pytest.mark.parametrize("name", STREAMS)
def test_a_real_stream_ends_with_our_event(name: str) -> None:
    """The recorded event is byte for byte what ``encode_turn_event`` makes, just before the end."""
    *_, event, done, rest = recorded(name)["answer"].split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    values = json.loads(event.removeprefix(TURN_EVENT_PREFIX))
    assert values.pop("v") == 1
    assert encode_turn_event(**values) == f"{event}\n\n"


def test_a_real_handle_reaches_as_far_as_the_ids() -> None:
    """Decode's count is prompt and output without the last token, whose KV was never computed."""
    for name in ("decode_whole", "decode_stream"):
        answer = recorded(name)["answer"]
        if isinstance(answer, str):
            event = answer.split("\n\n")[-3].removeprefix(TURN_EVENT_PREFIX)
            turn = json.loads(event)
            handle = turn["kv_transfer_params"]
        else:
            handle = answer["kv_transfer_params"]
            turn = handle["kvloop"]
        assert handle["remote_num_tokens"] == turn["prompt_tokens"] + len(turn["token_ids"]) - 1
        assert len(handle["remote_block_ids"][0]) == -(-handle["remote_num_tokens"] // 32)


def test_a_real_pull_is_accounted_for() -> None:
    """Prefill's two numbers add up to what vLLM itself reports."""
    handle = recorded("prefill_pull")["answer"]["kv_transfer_params"]
    assert handle["kvloop_pulled_tokens"] > 0
    assert (
        handle["kvloop_local_tokens"] + handle["kvloop_pulled_tokens"]
        == handle["remote_prefill_cached_tokens"]
    )
