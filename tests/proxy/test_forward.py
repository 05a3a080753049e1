"""Routes that one worker answers alone."""

from __future__ import annotations

import aiohttp
import pytest

from proxy.api.forms import check_form
from proxy.api.forward import JSON_ROUTES, ForwardRoutes
from proxy.errors import ClientError
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


@pytest.mark.parametrize("field", ["kv_transfer_params", "vllm_xargs", "file"])
async def test_a_form_cannot_carry_transfer_parameters(serving: Serving, field: str) -> None:
    """vLLM merges the form field vllm_xargs into what names other workers' blocks."""
    url = serving.url + "/v1/audio/transcriptions"
    for value, status in (
        ('{"kv_transfer_params": "x"}', 400),
        ('{"a": 1, "ec_transfer_\\u0070arams": "x"}', 400),
        ('{"top_k": 3}', 400 if field == "kv_transfer_params" else 200),
    ):
        form = aiohttp.FormData(default_to_multipart=True)
        form.add_field(field, value, **({"filename": "a.wav"} if field == "file" else {}))
        form.add_field("model", MODEL)
        async with serving.session.post(url, data=form) as response:
            assert response.status == (200 if field == "file" else status), value
            if response.status == 400:
                assert (await response.json())["error"]["param"].startswith(field)
    assert len(serving.decode.requests) == {"kv_transfer_params": 0, "vllm_xargs": 1}.get(field, 3)


def form(*parts: bytes, end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + end


PLAIN = b'Content-Disposition: form-data; name="model"\r\n\r\nm'


def test_forms_as_clients_write_them_pass() -> None:
    """Names of files in every form that clients use, any bytes in them, other headers beside."""
    check_form("multipart/form-data; boundary=B", form(PLAIN))
    check_form('multipart/form-data;boundary="B"', form(PLAIN, end=b"--B--"))
    for filename in (b'"a b.wav"', b'"a\\"b.wav"', b'"%22.wav"', '"\u00e9.wav"'.encode()):
        part = b'content-disposition: form-data; name="file"; filename=' + filename
        check_form(
            "multipart/form-data; boundary=B",
            form(b"Content-Type: audio/wav\r\n" + part + b"\r\n\r\n\x00\r\n--A\r\n\r\n", PLAIN),
        )
    starred = b"Content-Disposition: form-data; name=\"file\"; filename*=utf-8''%C3%A9.wav\r\n\r\n1"
    check_form("multipart/form-data; boundary=B", form(starred))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" + form(PLAIN),
        form(PLAIN, end=b""),
        form(PLAIN, end=b"--B\r\n"),
        form(PLAIN) + form(PLAIN),
        form(b"\r\n\r\nm"),
        form(b'Content-Disposition: form-data; name="model"'),
        form(b"Content-Type: text/plain\r\n\r\nm"),
        form(b'Content-Disposition: form-data; name="a"; name="vllm_xargs"\r\n\r\n{}'),
        form(b'Content-Disposition: form-data; name="vllm\\_xargs"\r\n\r\n{}'),
        form(b"Content-Disposition: form-data; name*=utf-8''vllm_%78args\r\n\r\n{}"),
        form(b'Content-Disposition: form-data; name="a"\r\nContent-Disposition: b\r\n\r\n{}'),
        form(b'Content-Disposition: form-data;\r\n name="a"\r\n\r\n{}'),
        form(b'Content-Disposition: form-data; filename="x"; name="vllm_xargs"\r\n\r\n{}'),
    ],
)
def test_forms_that_could_be_read_in_two_ways_are_refused(body: bytes) -> None:
    """Else the worker might see a field that the proxy did not."""
    with pytest.raises(ClientError, match="form") as refused:
        check_form("multipart/form-data; boundary=B", body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=",
     "multipart/form-data; boundary=B; boundary=C", "multipart/form-data; x=1; boundary=B"],
)  # fmt: skip
def test_forms_without_one_plain_boundary_are_refused(kind: str) -> None:
    """415: which parts there are depends on it."""
    with pytest.raises(ClientError) as refused:
        check_form(kind, form(PLAIN))
    assert refused.value.status == 415


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
