"""The wire format, held from both ends.

``tests/worker_launch/recorded`` holds what real vLLM 0.32.0 workers answered. The scripted fake
worker must give answers of the same shape, the proxy must read both alike, and the plugin's event
must be what the proxy looks for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.relay.sse import (
    TURN_EVENT_PREFIX,
    EventSplitter,
    carries_content,
    event_data,
    split_events,
    stream_error,
    take_turn_event,
)
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import held_tokens, usable_handle
from proxy.turn import wire
from tests.fakes.worker import MODEL, Cluster, FakeWorker
from worker_launch import transfer_keys
from worker_launch.stream_patch import chunk

RECORDED = Path(__file__).parent.parent / "worker_launch" / "recorded"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Please tell me something about a small dog. " * 5}]


def recorded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return content


def shape(value: Any) -> Any:
    """Keys and kinds of a JSON value; lists by their first element, numbers as one kind."""
    if isinstance(value, dict):
        return {key: shape(field) for key, field in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool) or value is None:
        return value if value is None else "bool"
    return "number" if isinstance(value, (int, float)) else "text"


def stream_shape(text: str) -> list[Any]:
    """Shapes of a stream's events, runs of equal ones once."""
    shapes: list[Any] = []
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            found = shape(json.loads(event[6:]))
        elif event.startswith(": kvloop "):
            found = ("turn event", shape(json.loads(event[9:])))
        else:
            found = event
        if not shapes or shapes[-1] != found:
            shapes.append(found)
    return shapes


class Fakes:
    """A prefill and a decode fake, and calls to them."""

    def __init__(self, prefill: FakeWorker, decode: FakeWorker) -> None:
        self.prefill = prefill
        self.decode = decode

    async def post(self, worker: FakeWorker, path: str, body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(worker.url + path, json={"model": MODEL, **body}) as reply,
        ):
            if reply.content_type == "text/event-stream":
                return reply.status, await reply.text()
            return reply.status, await reply.json()

    async def prefilled(self) -> dict[str, Any]:
        body = {
            "prompt": list(range(100)),
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        _, answer = await self.post(self.prefill, "/v1/completions", body)
        handle: dict[str, Any] = answer["kv_transfer_params"]
        return {**handle, "kvloop": 1, "prompt_token_ids": list(range(100))}


@pytest.fixture
async def fakes() -> Any:
    cluster = Cluster()
    prefill = await FakeWorker(cluster, "prefill").start()
    decode = await FakeWorker(cluster, "decode").start()
    yield Fakes(prefill, decode)
    await prefill.stop()
    await decode.stop()


async def test_fake_prefill_answers_as_the_real_one(fakes: Fakes) -> None:
    """Cold prefill, with the handle and the connector's counts; failed pull as the same 500."""
    body = {
        "prompt": list(range(100)),
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    status, answer = await fakes.post(fakes.prefill, "/v1/completions", body)
    real = recorded("prefill_cold")
    assert status == real["status"] == 200
    assert without_usage_detail(shape(answer)) == without_usage_detail(shape(real["answer"]))

    failed = recorded("prefill_pull_failed")
    body["kv_transfer_params"] = failed["request"]["kv_transfer_params"]
    status, answer = await fakes.post(fakes.prefill, "/v1/completions", body)
    assert (status, answer) == (failed["status"], failed["answer"])


def asked_in(real: dict[str, Any]) -> dict[str, Any]:
    """Fields of the recorded request that change the answer's shape."""
    fields = ("stream_options", "return_token_ids")
    return {field: real["request"][field] for field in fields if field in real["request"]}


def without_usage_detail(found: Any) -> Any:
    """Cached-token counts are null or numbers depending on the worker's cache."""
    found["usage"].pop("prompt_tokens_details", None)
    return found


@pytest.mark.parametrize("name", ["decode_whole", "decode_whole_plain"])
async def test_fake_decode_answers_as_the_real_one(fakes: Fakes, name: str) -> None:
    """Not streamed: with handle and plugin object, and without any transfer."""
    real = recorded(name)
    body = {"messages": MESSAGES, **asked_in(real)}
    if "kv_transfer_params" in real["request"]:
        body["kv_transfer_params"] = await fakes.prefilled()
    _, answer = await fakes.post(fakes.decode, CHAT, body)
    assert without_usage_detail(shape(answer)) == without_usage_detail(shape(real["answer"]))


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("decode_stream", {}),
        ("decode_stream_plain", {}),
        ("decode_stream_pull_failed", {"stream_error_first": 1}),
    ],
)
async def test_fake_stream_looks_as_the_real_one(
    fakes: Fakes, name: str, knobs: dict[str, Any]
) -> None:
    """Event by event: role chunk, content, finish, usage, turn event, error, DONE."""
    real = recorded(name)
    for knob, value in knobs.items():
        setattr(fakes.decode.knobs, knob, value)
    fakes.decode.knobs.finish_reason = "length"  # as the recorded ones ended
    body = {"messages": MESSAGES, "stream": True, **asked_in(real)}
    if "kv_transfer_params" in real["request"]:
        body["kv_transfer_params"] = await fakes.prefilled()
    _, answer = await fakes.post(fakes.decode, CHAT, body)
    expected = stream_shape(real["answer"])
    found = stream_shape(answer)
    for shapes in (expected, found):
        for each in shapes:
            if isinstance(each, dict) and "usage" in each:
                without_usage_detail(each)
    assert found == expected


@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in RECORDED.glob("decode_stream*.json")
        if json.loads(path.read_text())["path"] == CHAT
    ),
)
def test_the_proxy_reads_every_recorded_stream_at_any_cut(name: str) -> None:
    """Byte by byte: clients get the stream without our event, and the event is understood."""
    real = recorded(name)["answer"].encode()
    splitter = EventSplitter()
    relayed = b""
    events = []
    for byte in real:
        block, event = take_turn_event(splitter.feed(bytes([byte])))
        relayed += block
        if event is not None:
            events.append(event)
    assert splitter.flush() == b""
    assert b"kvloop" not in relayed
    assert len(relayed) + sum(
        len(part) + 2 for part in real.split(b"\n\n") if part.startswith(TURN_EVENT_PREFIX)
    ) == len(real)
    assert relayed.endswith(b"data: [DONE]\n\n")
    assert len(events) == real.count(b"\n" + TURN_EVENT_PREFIX)
    data = [found for each in split_events(relayed) if (found := event_data(each))]
    assert not carries_content(data[0])
    if name == "decode_stream_pull_failed":
        assert stream_error(data[1]) is not None
    else:
        assert carries_content(data[1])


@pytest.mark.parametrize("name", ["decode_whole", "decode_stream"])
def test_the_proxy_understands_a_real_handle(name: str) -> None:
    """The recorded handle is usable, and the recorded ids account for all its tokens."""
    real = recorded(name)
    if isinstance(real["answer"], str):
        _, event = take_turn_event(real["answer"].encode())
        ending = wire.ending_of_event(event)
    else:
        ending = wire.ending_of_answer(real["request"], real["answer"])
    handle = usable_handle(ending.handle)
    assert handle is not None
    assert ending.from_plugin
    prompt = PromptTokens(b"n", real["request"]["kv_transfer_params"]["prompt_token_ids"])
    held = held_tokens(prompt, ending.output_ids, handle["remote_num_tokens"], ids_complete=True)
    assert held is not None
    assert held.token_count == handle["remote_num_tokens"]


def test_recorded_refusals_are_read_as_such() -> None:
    """A refused pin and a stop string leave no handle, and say which of the two it was."""
    refused = recorded("decode_whole_over_share")
    ending = wire.ending_of_answer(refused["request"], refused["answer"])
    assert usable_handle(ending.handle) is None
    assert ending.pin_refused == "over_share"
    _, event = take_turn_event(recorded("decode_stream_stop_string")["answer"].encode())
    stopped = wire.ending_of_event(event)
    assert stopped.handle is None
    assert stopped.pin_refused is None


def test_recorded_prefill_counts_are_read() -> None:
    """The handle of a real pull reports how much came from decode."""
    handle = wire.usable_prefill_handle(recorded("prefill_pull")["answer"]["kv_transfer_params"])
    assert handle is not None
    total, pulled, local = wire.reported_reuse(handle)
    assert total == pulled == 70
    assert local == 0


def test_plugin_and_proxy_agree_on_the_event_and_the_keys() -> None:
    """The two packages share no code; this is where their constants meet."""
    assert chunk.TURN_EVENT_PREFIX.encode() == TURN_EVENT_PREFIX
    text = chunk.encode_turn_event(
        kv_transfer_params={"a": 1}, token_ids=[1], prompt_tokens=2, finish_reason="stop"
    )
    rest, event = take_turn_event(text.encode())
    assert rest == b""
    assert event == {
        "v": 1,
        "kv_transfer_params": {"a": 1},
        "token_ids": [1],
        "prompt_tokens": 2,
        "finish_reason": "stop",
    }
    leg = wire.decode_leg(
        {"model": "m"}, {"do_remote_prefill": True}, ids_json=None, lease_seconds=0
    )
    asked = leg["kv_transfer_params"]
    assert transfer_keys.asks_for_event(asked)
    assert asked[transfer_keys.LEASE_SECONDS] == 0
    counts = {
        transfer_keys.LOCAL_TOKENS: 3,
        transfer_keys.PULLED_TOKENS: 4,
        "remote_prefill_cached_tokens": 7,
    }
    assert wire.reported_reuse(counts) == (7, 4, 3)
