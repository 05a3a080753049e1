"""Wrong requests: an error in OpenAI's shape that names the field, and no worker is touched."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving

GOOD: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"response_format": "json"}, "response_format"),
    ({"conversation_id": {"a": 1}}, "conversation_id"),
    ({"conversation_id": "x" * 513}, "conversation_id"),
    ({"prompt_cache_key": ["x"]}, "prompt_cache_key"),
]


TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hello"}
WRONG_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [2**32]}, "prompt"),
    ({"prompt": [[1], [1.5]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"n": 0}, "n"),
    ({"stop": [5]}, "stop"),
    ({"stream_options": {}}, "stream_options"),
    ({"conversation_id": "x" * 513}, "conversation_id"),
]
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hello"}],
}
WRONG_MESSAGE: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"system": 5}, "system"),
    ({"system": ["x"]}, "system"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": ["x"]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": True}, "thinking"),
    ({"temperature": -1}, "temperature"),
    ({"stream": 1}, "stream"),
]
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hello"}
WRONG_RESPONSE: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["x"]}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [5]}, "tools"),
    ({"reasoning": "high"}, "reasoning"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"background": "no"}, "background"),
    ({"store": 1}, "store"),
    ({"metadata": []}, "metadata"),
    ({"prompt_cache_key": ["x"]}, "prompt_cache_key"),
]


@pytest.mark.parametrize(
    ("path", "good", "wrong"),
    [
        ("/v1/chat/completions", GOOD, WRONG),
        ("/v1/completions", TEXT, WRONG_TEXT),
        ("/v1/responses", RESPONSE, WRONG_RESPONSE),
    ],
)
async def test_wrong_field_is_named(
    serving: Serving, path: str, good: dict[str, Any], wrong: list[tuple[dict[str, Any], str]]
) -> None:
    """400, the field in ``param`` and in the message, and no worker saw the request."""
    for change, param in wrong:
        answer = await serving.post({**good, **change}, path=path)
        assert answer.status == 400, change
        error = answer.json["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, change
        assert param in error["message"]
    assert serving.prefill.requests == serving.decode.requests == []
    assert (await serving.post(good, path=path)).status == 200


async def test_anthropics_clients_get_anthropics_errors(serving: Serving) -> None:
    """The same on /v1/messages: its shape has no ``param``, so the message names the field."""
    for change, param in WRONG_MESSAGE:
        answer = await serving.post({**MESSAGE, **change}, path="/v1/messages")
        assert answer.status == 400, change
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert f"'{param}'" in answer.json["error"]["message"], change
    for body, status, kind in (
        ({**MESSAGE, "model": "gpt-17"}, 404, "not_found_error"),
        ({**MESSAGE, "temperature": 101}, 400, "invalid_request_error"),  # the worker's refusal
    ):
        answer = await serving.post(body, path="/v1/messages")
        assert (answer.status, answer.json["error"]["type"]) == (status, kind)
        assert answer.json["type"] == "error"
    assert serving.decode.requests == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, Any]:
    """A request with some fields replaced by any JSON value."""
    path, good = draw(
        st.sampled_from(
            [
                ("/v1/chat/completions", GOOD),
                ("/v1/completions", TEXT),
                ("/v1/messages", MESSAGE),
                ("/v1/responses", RESPONSE),
                ("/v1/embeddings", TEXT),
            ]
        )
    )
    names = st.sampled_from(
        [*good, "stream", "stream_options", "tools", "tool_choice", "n", "stop", "conversation_id",
         "cache_salt", "vllm_xargs", "kv_transfer_params", "system", "thinking", "echo",
         "prompt_logprobs", "previous_response_id", "prompt_cache_key", "messages", "input"]
    )  # fmt: skip
    return path, {**good, **draw(st.dictionaries(names, JSON_VALUES, max_size=4))}


@pytest.mark.slow
async def test_any_json_at_all_gets_a_sound_answer(serving: Serving) -> None:
    """Generated bodies: never a 5xx or a broken connection of ours, errors in the route's shape."""

    @settings(max_examples=150, database=None, deadline=None)
    @given(broken())
    def generate(case: tuple[str, Any]) -> None:
        cases.append(case)

    cases: list[tuple[str, Any]] = []
    await asyncio.to_thread(generate)
    for path, body in cases:
        answer = await serving.post(body, path=path)
        # The fakes are not vLLM: they may fail on what real workers refuse (502), we may not (500).
        assert answer.status in (200, 400, 404, 502), (path, body, answer.body)
        if answer.status != 200:
            assert b'"error"' in answer.body, (path, body, answer.status, answer.body)
            assert (answer.json.get("type") == "error") == (path == "/v1/messages")
    assert serving.cluster.faults == []


async def test_what_is_no_json_object_is_refused(serving: Serving) -> None:
    """400 for malformed, empty, non-object or absurdly nested bodies."""
    for raw in (b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"a": NaN}', b"null"):
        answer = await serving.post(None, raw=raw)
        assert answer.status == 400, raw[:10]
        assert answer.json["error"]["type"] == "invalid_request_error"
    assert serving.prefill.requests == []


async def test_unknown_model_is_a_404(serving: Serving) -> None:
    """As OpenAI answers it: model_not_found."""
    answer = await serving.post({**GOOD, "model": "gpt-17"})
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert answer.json["error"]["param"] == "model"
    assert serving.prefill.requests == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_too_large_a_body_is_a_413(serve: Serve, chunked: bool) -> None:
    """Over the limit, declared or not, nothing is forwarded."""
    serving = await serve(max_body_bytes=2048)

    async def pieces() -> Any:
        for _ in range(100):
            yield b" " * 1024

    data: Any = pieces() if chunked else b" " * 4096
    async with serving.session.post(serving.url + "/v1/chat/completions", data=data) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    assert serving.prefill.requests == []


async def test_unknown_paths_and_methods_have_the_same_shape(serving: Serving) -> None:
    """404 and 405 are OpenAI-shaped errors too."""
    missing = await serving.get("/v1/nothing")
    assert missing.status == 404
    assert "/v1/nothing" in missing.json["error"]["message"]
    wrong = await serving.get("/v1/chat/completions")
    assert wrong.status in (404, 405)
    assert "error" in wrong.json


async def test_request_id_is_returned_if_harmless(serving: Serving) -> None:
    """The client's X-Request-Id comes back and reaches the workers; an odd one is replaced."""
    answer = await serving.post(GOOD, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["X-Request-Id"] == "abc-1"
    odd = await serving.post(GOOD, headers={"X-Request-Id": "x" * 500})
    assert len(odd.headers["X-Request-Id"]) == 32
    refused = await serving.post({}, headers={"X-Request-Id": "abc-2"})
    assert refused.headers["X-Request-Id"] == "abc-2"


async def test_operating_routes_answer(serving: Serving) -> None:
    """/health, /ready, /v1/models and /metrics."""
    assert (await serving.get("/health")).json == {"status": "ok"}
    ready = (await serving.get("/ready")).json
    assert ready["ready"] is True
    assert {worker["role"] for worker in ready["workers"]} == {"prefill", "decode"}
    assert (await serving.get("/v1/models")).json["data"][0]["id"] == MODEL
    await serving.post(GOOD)
    assert await serving.metric('kvloop_turns_total{outcome="ok"') == 1
