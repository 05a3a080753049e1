"""API keys, tenants and their limits, at the running proxy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from proxy.api.callers import Callers
from proxy.api.forward import FORM_ROUTES, JSON_ROUTES
from proxy.dialects import DIALECTS
from proxy.errors import ClientError
from proxy.metrics import Metrics
from proxy.session.identity import Caller
from proxy.settings import Settings
from proxy.tenants import KeysError, hashed
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Answer, Serve, Serving

A, B = {"Authorization": "Bearer key-a"}, {"x-api-key": "key-b"}
KEYS = f"a={hashed(b'key-a')},b={hashed(b'key-b')}"
LONG = "a story about a small dog that runs far away " * 20
GENERATING = tuple(dialect.path for dialect in DIALECTS)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
async def keyed(serve: Serve) -> Serving:
    return await serve(api_keys=KEYS)


async def test_every_route_that_serves_data_asks_for_a_key(keyed: Serving) -> None:
    """401 in the route's own shape, with no worker touched; also for paths that do not exist."""
    posts = (*GENERATING, *JSON_ROUTES, *FORM_ROUTES, "/v1/responses/x/cancel", "/nothing")
    gets = ("/v1/models", "/v1/models/x", "/v1/responses/x", "/nothing", "/admin/reuse")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        answers = [(p, await keyed.post({}, path=p, headers=headers)) for p in posts]
        answers += [(p, await keyed.get(p, headers=headers)) for p in gets]
        for path, answer in answers:
            assert answer.status == 401, path
            if path.startswith("/v1/messages"):
                assert answer.json["type"] == "error"
                assert answer.json["error"]["type"] == "authentication_error"
            else:
                assert answer.json["error"]["code"] == "invalid_api_key"
    assert keyed.decode.requests == keyed.prefill.requests == []


async def test_both_forms_of_a_key_open_the_routes(keyed: Serving) -> None:
    """The OpenAI SDK's header and the Anthropic SDK's; neither reaches a worker."""
    for headers in (A, B):
        body = {"model": MODEL, "messages": [user("Hello")]}
        assert (await keyed.post(body, headers=headers)).status == 200
        assert (await keyed.get("/v1/models", headers=headers)).status == 200
    for sent in (*keyed.prefill.headers, *keyed.decode.headers):
        assert not {name.lower() for name in sent} & {"authorization", "x-api-key"}


async def test_probes_stay_open_and_tell_strangers_nothing(keyed: Serving) -> None:
    """/health and /ready for load balancers; numbers and worker names only on the admin port."""
    assert (await keyed.get("/health")).status == 200
    assert (await keyed.get("/ready")).json == {"ready": True, "draining": False}
    assert (await keyed.get("/metrics")).status == 404


async def test_one_tenants_conversation_is_out_of_anothers_reach(keyed: Serving) -> None:
    """The same conversation id, history and model: the other tenant finds nothing."""
    said = [user(LONG)]
    for fields in ({"conversation_id": "c"}, {}):
        await keyed.chat(said, headers=A, **fields)
        grown = [*said, assistant("Fine."), user("Go on.")]
        assert (await keyed.chat(grown, headers=B, **fields)).reason == "new_session"
        assert (await keyed.chat(grown, headers=A, **fields)).reason == "history_grew"
    assert keyed.cluster.faults == []


async def test_prefix_caches_of_workers_are_salted_by_tenant(keyed: Serving) -> None:
    """Equal prompts of two tenants, or of two salts of one, never meet in a worker's cache."""
    body = {"model": MODEL, "messages": [user("Hello")]}
    for fields in ({}, {"cache_salt": "mine"}):
        for headers in (A, B):
            await keyed.post({**body, **fields}, headers=headers)
    for worker, path in ((keyed.prefill, "/v1/completions"), (keyed.decode, GENERATING[0])):
        legs = [leg for leg in worker.bodies(path) if leg.get("prompt") != [0]]  # [0]: a release
        salts = [leg["cache_salt"] for leg in legs]
        assert len(set(salts)) == 4
        assert "mine" not in salts


async def test_salting_can_be_switched_off(serve: Serve) -> None:
    serving = await serve(api_keys=KEYS, isolate_tenants=False)
    await serving.chat([user("Hello")], headers=A)
    assert "cache_salt" not in serving.decode.bodies(GENERATING[0])[0]


async def test_a_stored_response_is_its_tenants(keyed: Serving) -> None:
    """Its id, guessed or stolen, is a 404 for another tenant."""
    body = {"model": MODEL, "input": LONG}
    made = await keyed.post(body, path="/v1/responses", headers=A)
    path = f"/v1/responses/{made.json['id']}"
    assert (await keyed.get(path, headers=A)).status == 200
    assert (await keyed.get(path, headers=B)).status == 404
    follow = {"model": MODEL, "input": "x", "previous_response_id": made.json["id"]}
    assert (await keyed.post(follow, path="/v1/responses", headers=B)).status == 404
    chosen = {**body, "request_id": made.json["id"]}
    other = await keyed.post(chosen, path="/v1/responses", headers=B)
    assert other.json["id"] != made.json["id"]


async def test_too_many_at_once_is_a_429_for_that_tenant_only(serve: Serve) -> None:
    """With Retry-After; the place comes back when the request is over."""
    serving = await serve(api_keys=KEYS, tenant_max_in_flight=1)
    serving.decode.knobs.chunk_delay = 0.2
    body = {"model": MODEL, "messages": [user("Hello")]}

    async def send(headers: dict[str, str]) -> Answer:
        return await serving.post(body, headers=headers)

    first, second, other = await asyncio.gather(send(A), send(A), send(B))
    assert sorted((first.status, second.status)) == [200, 429]
    assert other.status == 200
    refused = first if first.status == 429 else second
    assert refused.headers["Retry-After"] == "1"
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert (await send(A)).status == 200


async def test_anthropics_clients_see_their_own_rate_limit_error(serve: Serve) -> None:
    serving = await serve(api_keys=KEYS, tenant_requests_per_minute=1)
    body = {"model": MODEL, "max_tokens": 5, "messages": [user("Hello")]}
    assert (await serving.post(body, path="/v1/messages", headers=A)).status == 200
    again = await serving.post(body, path="/v1/messages", headers=A)
    assert (again.status, again.json["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(again.headers["Retry-After"]) <= 60


# The object, with a clock of the test's.


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def callers(clock: Clock, **settings: Any) -> Callers:
    values = {"decode_urls": ("http://x:1",), **settings}
    return Callers(Settings(**values), Metrics(), clock)


def test_the_rate_refills_with_time() -> None:
    """A minute's worth at once, then one every 60/rate seconds."""
    clock = Clock()
    limits = callers(clock, tenant_requests_per_minute=2)

    def enter() -> int:
        try:
            with limits.admitted(Caller("a")):
                return 0
        except ClientError as error:
            return error.retry_after

    assert [enter() for _ in range(4)] == [0, 0, 30, 30]
    clock.now += 30
    assert [enter(), enter()] == [0, 30]


def write(path: Path, text: str) -> None:
    """As operators should: a new file moved over the old one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def entry(name: str, key: bytes, more: str = "") -> str:
    return f'[tenants.{name}]\nkeys = ["{hashed(key)}"]\n{more}\n'


def test_keys_are_replaced_without_a_restart(tmp_path: Path) -> None:
    """A changed file counts within a second or so; a broken one leaves the old keys in force."""
    clock, path = Clock(), tmp_path / "keys.toml"
    path.write_text(entry("a", b"old", "max_in_flight = 1"))
    found = callers(clock, api_keys_file=str(path), api_keys=f"b={hashed(b'key-b')}")

    def opens(key: str) -> str | None:
        try:
            return found.resolve({b"x-api-key": key.encode()}).tenant
        except ClientError:
            return None

    assert [opens("old"), opens("new"), opens("key-b")] == ["a", None, "b"]
    write(path, entry("a", b"new"))
    clock.now += 2
    assert [opens("old"), opens("new"), opens("key-b")] == [None, "a", "b"]
    write(path, "[tenants")
    clock.now += 2
    assert [opens("new"), opens("key-b")] == ["a", "b"]
    path.unlink()
    clock.now += 2
    assert opens("new") == "a"


def test_a_tenants_own_limit_counts_before_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("a", b"k", "max_in_flight = 2"))
    limits = callers(Clock(), api_keys_file=str(path), tenant_max_in_flight=1)
    a, b = Caller("a"), Caller("b")
    with limits.admitted(a), limits.admitted(a), pytest.raises(ClientError), limits.admitted(a):
        pass
    with limits.admitted(b), pytest.raises(ClientError), limits.admitted(b):
        pass


def test_unusable_keys_stop_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("nonsense = ")
    with pytest.raises(KeysError, match=r"keys\.toml"):
        callers(Clock(), api_keys_file=str(path))
    with pytest.raises(KeysError):
        callers(Clock(), api_keys="a=clear-text")


def test_keys_do_not_show_in_the_settings() -> None:
    """A log of the settings names no secret."""
    made = Settings(decode_urls=("http://x:1",), api_keys=SecretStr(KEYS), worker_api_key="s3cret")
    assert hashed(b"key-a") not in repr(made)
    assert "s3cret" not in repr(made)
    assert b"s3cret" not in orjson.dumps(made.model_dump(mode="json"))
