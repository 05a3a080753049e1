"""Wrong requests: an error in OpenAI's shape that names the field, and no worker is touched."""

from __future__ import annotations

from typing import Any

import pytest

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


async def test_wrong_field_is_named(serving: Serving) -> None:
    """400, the field in ``param`` and in the message, and no worker saw the request."""
    for change, param in WRONG:
        answer = await serving.post({**GOOD, **change})
        assert answer.status == 400, change
        error = answer.json["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, change
        assert param in error["message"]
    assert serving.prefill.requests == serving.decode.requests == []


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
