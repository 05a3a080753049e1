"""``/v1/sessions``: what is kept for a tenant's conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest

from proxy.session.identity import identity_of
from proxy.turn import retaining
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_admin import admin

LONG = "Please tell me something about a small dog. " * 6


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def listed(serving: Serving, query: str = "") -> Any:
    """The list, once the ledger knows of all turns."""
    await settled(serving)
    return (await serving.get("/v1/sessions" + query)).json


async def settled(serving: Serving) -> None:
    """Everything that turns started in the background has ended."""
    while tasks := list(serving.app.conductor.background.tasks):
        await asyncio.wait(tasks)


async def delete(serving: Serving, path: str) -> tuple[int, Any]:
    async with serving.session.delete(serving.url + path) as answer:
        return answer.status, await answer.json()


async def test_a_session_is_shown_and_released_at_once(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long changes to the ledger are gathered: who asks is not to wait for that."""
    monkeypatch.setattr(retaining, "GATHER_SECONDS", 30.0)
    await serving.chat([user(LONG)], conversation_id="c")
    assert len((await serving.get("/v1/sessions")).json["data"]) == 1
    await serving.chat([user(LONG)], conversation_id="d")
    status, body = await delete(serving, "/v1/sessions/d")
    assert (status, body["released_blocks"] > 0) == (200, True)
    (left,) = (await serving.get("/v1/sessions")).json["data"]
    assert left["label"] == identity_of(MODEL, conversation="c").label
    monkeypatch.setattr(retaining, "GATHER_SECONDS", 0.002)
    await serving.app.conductor.retention.told()


async def test_a_session_is_shown_with_place_size_and_time(serving: Serving) -> None:
    """Under the client's own id, which the answer does not repeat anywhere but as its digest."""
    await serving.chat([user(LONG)], conversation_id="my/chat 1")
    await settled(serving)
    page = (await serving.get("/v1/sessions/my%2Fchat%201")).json
    (shown,) = page["data"]
    holding = next(iter(serving.cluster.pins.values()))
    assert shown["worker"] == serving.decode.name
    assert (shown["tokens"], shown["blocks"]) == (len(holding.tokens), len(holding.blocks))
    assert shown["model"] == MODEL
    assert shown["usable_until"] - shown["kept_at"] == pytest.approx(450, abs=1)
    assert 479 < shown["pinned_until"] - shown["kept_at"] <= 480
    assert "my/chat" not in str(page)


async def test_delete_frees_the_blocks_at_once(serving: Serving) -> None:
    """Nothing is pinned then, the next turn is as a first one, a second DELETE finds nothing."""
    await serving.chat([user(LONG)], conversation_id="c")
    await settled(serving)
    assert serving.decode.pinned() == 1
    status, answer = await delete(serving, "/v1/sessions/c")
    assert (status, answer["deleted"]) == (200, True)
    await settled(serving)
    assert serving.decode.pinned() == 0
    assert answer["released_blocks"] > 0
    assert (await listed(serving))["data"] == []
    status, answer = await delete(serving, "/v1/sessions/c")
    assert (status, answer["error"]["code"]) == (404, "session_not_found")
    again = await serving.chat([user(LONG), user("?")], conversation_id="c")
    assert again.reason == "new_session"
    assert serving.cluster.faults == []


async def test_a_session_without_an_id_goes_by_the_one_in_the_list(serving: Serving) -> None:
    await serving.chat([user(LONG)])
    (shown,) = (await listed(serving))["data"]
    assert shown["label"] == "by-prefix"
    assert (await serving.get(f"/v1/sessions/{shown['id']}")).json["data"] == [shown]
    assert (await delete(serving, f"/v1/sessions/{shown['id']}"))[0] == 200
    await settled(serving)
    assert serving.decode.pinned() == 0


async def test_pages_go_on_where_the_last_one_ended(serving: Serving) -> None:
    """Newest first, none twice, even when the last one seen has gone meanwhile."""
    for number in range(5):
        await serving.chat([user(f"{number} {LONG}")], conversation_id=str(number))
        await settled(serving)
    first = await listed(serving, "?limit=2")
    assert first["has_more"]
    await delete(serving, f"/v1/sessions/{first['data'][1]['id']}")
    second = await listed(serving, f"?limit=2&after={first['next']}")
    third = await listed(serving, f"?limit=2&after={second['next']}")
    assert (third["has_more"], third["next"]) == (False, None)
    times = [each["kept_at"] for page in (first, second, third) for each in page["data"]]
    assert len(times) == 5
    assert times == sorted(times, reverse=True)


async def test_a_wrong_cursor_or_limit_names_the_field(serving: Serving) -> None:
    for query, field in (("after=x", "after"), ("limit=0", "limit")):
        answer = await serving.get(f"/v1/sessions?{query}")
        assert (answer.status, answer.json["error"]["param"]) == (400, field)


async def test_a_tenant_sees_and_releases_its_own_only(serve: Serve) -> None:
    """Neither in the list, nor by id, nor by a listed id of somebody else."""
    serving = await serve()
    await serving.chat([user(LONG)], conversation_id="c")
    (shown,) = (await listed(serving))["data"]
    from fastapi import FastAPI

    from proxy.api import operations, sessions

    theirs = FastAPI()
    operations.in_openai_shape(theirs)
    sessions.add_client_routes(theirs, serving.app, lambda request: "another tenant")
    transport = httpx.ASGITransport(app=theirs)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        assert (await client.get("/v1/sessions")).json()["data"] == []
        for id in ("c", shown["id"]):
            assert (await client.get(f"/v1/sessions/{id}")).status_code == 404
            assert (await client.delete(f"/v1/sessions/{id}")).status_code == 404
    assert serving.decode.pinned() == 1


async def test_operators_see_every_tenants_sessions(serving: Serving) -> None:
    await serving.chat([user(LONG)], conversation_id="c")
    (shown,) = (await listed(serving))["data"]
    async with admin(serving.app) as client:
        assert (await client.get("/admin/sessions")).json()["data"] == [shown]
        answer = await client.delete(f"/admin/sessions/{shown['id']}")
    assert answer.json()["released_blocks"] == shown["blocks"]


async def test_without_redis_the_list_says_503(serve: Serve) -> None:
    serving = await serve(redis_url="redis://127.0.0.1:1")
    answer = await serving.get("/v1/sessions")
    assert (answer.status, answer.json["error"]["code"]) == (503, "table_unavailable")
