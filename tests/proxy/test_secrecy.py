"""What clients say stays between them and the workers: not in logs, metrics, errors or Redis."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis.asyncio

from proxy import log as log_module
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving

CANARY = "xylophone-canary-4711"
ANSWER = "answer-canary-0815"
SAID = (CANARY + " a story about a small dog that runs far away ") * 12


async def everything_goes_wrong(serving: Serving) -> list[bytes]:
    """Turns on every route, good, refused and failed, with the canary in each; error bodies."""
    serving.decode.knobs.answer = ANSWER
    message = {"role": "user", "content": SAID}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/completions", {"prompt": SAID}),
        ("/v1/messages", {"messages": [message], "max_tokens": 5}),
        ("/v1/responses", {"input": SAID}),
    ]
    errors: list[bytes] = []
    for path, fields in ways:
        body = {"model": MODEL, **fields}
        wrong: list[dict[str, Any]] = [
            {"temperature": CANARY},
            {"stream": CANARY},
            {"conversation_id": CANARY * 40},
            {"model": MODEL, "cache_salt": [CANARY]},
        ]
        for stream in (False, True):
            for _ in range(2):
                answer = await serving.post({**body, "stream": stream}, path=path)
                assert answer.status == 200
            serving.decode.knobs.fail_next = {path: 3}
            answer = await serving.post({**body, "stream": stream}, path=path)
            assert answer.status == 502
            errors.append(answer.body)
            serving.decode.knobs.fail_next = {}
        serving.prefill.knobs.fail_next = {"/v1/completions": 5}
        await serving.post({**body, "conversation_id": CANARY, "user": CANARY}, path=path)
        serving.prefill.knobs.fail_next = {}
        serving.decode.knobs.die_after_chunks = 2
        await serving.post({**body, "stream": True}, path=path)
        serving.decode.knobs.die_after_chunks = None
        for change in wrong:
            answer = await serving.post({**body, **change}, path=path)
            assert answer.status == 400, change
            errors.append(answer.body)
        raw = b'{"model": "' + CANARY.encode() + b'", "messages": ['
        errors.append((await serving.post(None, raw=raw, path=path)).body)
    await serving.post({"model": MODEL, "prompt": SAID}, path="/tokenize")
    errors.append((await serving.post({"model": 5, "input": SAID}, path="/v1/embeddings")).body)
    return errors


async def test_no_word_of_a_client_is_kept_or_told(
    serve: Serve, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A canary in prompts, ids, users and answers; then everything else is searched for it."""
    caplog.set_level(logging.DEBUG)
    for name in ("kvloop", "uvicorn", "uvicorn.error", "aiohttp", "asyncio", "redis"):
        caplog.set_level(logging.DEBUG, logger=name)
    serving = await serve()
    errors = await everything_goes_wrong(serving)

    formatter = log_module._JsonFormatter()
    lines = [formatter.format(record) for record in caplog.records]
    assert any('"turn"' in line for line in lines)
    pages = [(await serving.get(path)).body for path in ("/metrics", "/ready", "/openapi.json")]
    store = redis.asyncio.Redis.from_url(valkey_url)
    kept: list[bytes] = []
    async for key in store.scan_iter():
        kind = await store.type(key)
        kept.append(key)
        kept += [await store.get(key)] if kind == b"string" else await store.lrange(key, 0, -1)
    await store.aclose()
    assert len(kept) > 10
    places = {"logs": lines, "pages": pages, "errors": errors, "redis": kept}
    for place, texts in places.items():
        for text in texts:
            for word in (CANARY, ANSWER):
                assert word not in (text if isinstance(text, str) else text.decode("latin-1")), (
                    place
                )


async def test_a_key_is_never_told(
    serve: Serve, caplog: pytest.LogCaptureFixture, valkey_url: str
) -> None:
    """Neither a client's key nor the workers' appears in logs, pages or errors."""
    caplog.set_level(logging.DEBUG)
    serving = await serve(worker_api_key="worker-canary")
    headers = {"Authorization": f"Bearer {CANARY}"}
    answer = await serving.post({"model": MODEL, "messages": []}, headers=headers)
    fine = await serving.chat([{"role": "user", "content": "Hello"}], headers=headers)
    texts = [str(record.__dict__) for record in caplog.records]
    texts += [answer.body.decode(), fine.body.decode(), str(dict(fine.headers))]
    texts += [(await serving.get(path)).body.decode() for path in ("/metrics", "/ready")]
    for text in texts:
        assert CANARY not in text
        assert "worker-canary" not in text
    assert serving.decode.headers[-1]["authorization"] == "Bearer worker-canary"


async def test_hop_by_hop_and_internal_headers_do_not_pass(serving: Serving) -> None:
    """What a client says to the next hop, or pretends that a router said, ends here."""
    sent = {
        "X-data-parallel-rank": "3",
        "X-Session-ID": "s",
        "X-Vllm-Priority": "1",
        "X-Request-Id": "mine",
        "X-Forwarded-For": "10.0.0.1",
        "Proxy-Authorization": "Basic x",
        "TE": "trailers",
        "Cookie": "a=b",
        "X-KVLoop-Route": "forged",
    }
    answer = await serving.chat([{"role": "user", "content": "Hello"}], headers=sent)
    await serving.post({"model": MODEL, "input": "x"}, path="/v1/embeddings", headers=sent)
    allowed = {"host", "accept", "content-type", "content-length", "x-request-id"}
    for headers in (*serving.prefill.headers, *serving.decode.headers):
        assert {name.lower() for name in headers} <= allowed
    assert answer.headers["X-KVLoop-Route"] == "cold-prefill"
    assert "Server" not in answer.headers or "aiohttp" not in answer.headers["Server"]
