"""Routes that one worker answers alone."""

from __future__ import annotations

import aiohttp
import pytest

from proxy.api.forward import JSON_ROUTES, ForwardRoutes
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving


async def test_body_goes_and_answer_comes_as_they_are(serving: Serving) -> None:
    """Unknown fields pass; transfer parameters do not; of the headers only the type comes back."""
    body = {"model": MODEL, "input": "words", "frobnicate": 1}
    answer = await serving.post({**body, "kv_transfer_params": {"a": 1}}, path="/v1/embeddings")
    assert answer.status == 200
    assert answer.json["data"][0]["embedding"] == [0.5, 0.25]
    assert "X-Worker-Secret" not in answer.headers
    assert serving.decode.bodies("/v1/embeddings") == [body]


async def test_refusals_of_the_worker_pass_unchanged(serving: Serving) -> None:
    answer = await serving.post({"model": MODEL, "input": "refuse"}, path="/v1/embeddings")
    assert (answer.status, answer.json["error"]["param"]) == (400, "input")


async def test_what_the_workers_do_not_serve_is_said_in_shape(serving: Serving) -> None:
    """A text model's worker has no /rerank: its framework's 404 follows no API."""
    answer = await serving.post({"model": MODEL, "query": "x"}, path="/rerank")
    assert (answer.status, answer.json["error"]["code"]) == (404, "route_not_served")


async def test_failures_of_the_worker_become_our_error(serving: Serving) -> None:
    """The body of a 500 may hold anything: it stays here."""
    serving.decode.knobs.fail_next = {"/v1/embeddings": 1, "/v1/messages/count_tokens": 1}
    answer = await serving.post({"model": MODEL, "input": "x"}, path="/v1/embeddings")
    assert (answer.status, answer.json["error"]["code"]) == (502, "worker_failed")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    answer = await serving.post(body, path="/v1/messages/count_tokens")
    assert (answer.status, answer.json["error"]["type"]) == (502, "api_error")
    assert answer.json["type"] == "error"


async def test_tokens_can_be_counted(serving: Serving) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}]}
    answer = await serving.post(body, path="/v1/messages/count_tokens")
    assert answer.json == {"input_tokens": 6}
    answer = await serving.post({"model": MODEL, "prompt": "abc"}, path="/tokenize")
    assert answer.json["count"] == 4


async def test_a_form_with_a_file_passes(serving: Serving) -> None:
    form = aiohttp.FormData()
    form.add_field("model", MODEL)
    form.add_field("file", b"\x00\x01" * 1000, filename="a.wav", content_type="audio/wav")
    url = serving.url + "/v1/audio/transcriptions"
    async with serving.session.post(url, data=form) as response:
        assert (response.status, await response.json()) == (200, {"text": "words"})
    assert serving.decode.bodies("/v1/audio/transcriptions")[0]["model"] == MODEL
    answer = await serving.post({"model": MODEL}, path="/v1/audio/transcriptions")
    assert answer.status == 415


@pytest.mark.parametrize(
    "path",
    ["/v1/load_lora_adapter", "/sleep", "/collective_rpc", "/reset_prefix_cache", "/server_info",
     "/v1/chat/completions/render", "/inference/v1/generate", "/start_profile", "/pause",
     "/v1/embeddings/../load_lora_adapter", "/invocations"],
)  # fmt: skip
async def test_operators_routes_of_workers_are_out_of_reach(serving: Serving, path: str) -> None:
    """Only listed routes exist."""
    assert (await serving.post({"model": MODEL}, path=path)).status == 404
    assert serving.decode.requests == []


async def test_bad_bodies_touch_no_worker(serving: Serving) -> None:
    for path in JSON_ROUTES:
        for raw in (b"", b"[]", b"{", b'{"model": 5}', b'{"a":' * 100 + b"1" + b"}" * 100):
            assert (await serving.post(None, raw=raw, path=path)).status == 400, (path, raw[:20])
    assert serving.decode.requests == []


async def test_without_decode_workers_it_is_a_503(serve: Serve) -> None:
    serving = await serve()
    serving.app.pool.workers[1].healthy = False
    serving.app.health._failures = 10**9
    await serving.app.health.stop()
    serving.app.pool.workers[1].healthy = False
    answer = await serving.post({"model": MODEL, "input": "x"}, path="/v1/embeddings")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")


async def test_they_count(serving: Serving) -> None:
    """By route and outcome; a response's id is not a label."""
    await serving.post({"model": MODEL, "input": "x"}, path="/v1/embeddings")
    await serving.get("/v1/responses/resp_unknown")
    page = (await serving.get("/metrics")).body.decode()
    assert 'kvloop_forwarded_total{api="/v1/embeddings",outcome="ok"} 1.0' in page
    assert 'kvloop_forwarded_total{api="/v1/responses/{id}",outcome="error"} 1.0' in page


def test_methods_are_the_routes_own() -> None:
    serves = ForwardRoutes.serves
    assert serves("POST", "/tokenize")
    assert not serves("GET", "/tokenize")
    assert serves("GET", "/v1/responses/r")
    assert not serves("POST", "/v1/responses/r")
    assert serves("POST", "/v1/responses/r/cancel")
    assert not serves("GET", "/v1/responses/" + "r" * 200)
