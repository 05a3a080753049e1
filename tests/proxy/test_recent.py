"""The ring behind the live page: bounded, chained by holdings, and without a word of text."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2 as httpx
import pytest

from proxy.errors import Overloaded
from proxy.recent import SLICE_SECONDS, SLICES, RecentTurns
from tests.proxy.conftest import Serve, Serving


def story(**given: Any) -> dict[str, Any]:
    """A turn as the books tell it."""
    return {
        "request": "r",
        "session": "by-prefix",
        "route": "cold-prefill",
        "reason": "new_session",
        "outcome": "ok",
        "returning": False,
        "prompt_tokens": 100,
        "reused_tokens": 0,
        "ttft_ms": 50.0,
        "legs_ms": {"prefill": 20.0},
        "cold_prefill_ms": None,
        "decode": "d:1",
        "kept": "stored",
        "kept_tokens": 100,
        "kept_seconds": 450,
        "holding_used": "",
        "holding_left": "",
        **given,
    }


def test_no_more_turns_than_room() -> None:
    """The newest stay; sessions and the chain of holdings are bounded with them."""
    recent = RecentTurns(10)
    for number in range(100):
        recent.add(story(request=str(number), holding_left=f"h{number}"), 1000 + number)
    assert [turn["request"] for turn in recent.newest(50)] == [str(n) for n in range(99, 89, -1)]
    assert len(recent.sessions(50)) == 10
    assert len(recent._session_of_holding) == 10
    assert recent.number == 100


def test_turns_without_an_id_are_chained_by_what_they_claim() -> None:
    """Two nameless conversations at once stay apart; a chain ends where nothing is claimed."""
    recent = RecentTurns(100)
    recent.add(story(holding_left="a1"), 1)
    recent.add(story(holding_left="b1"), 2)
    recent.add(story(holding_used="a1", holding_left="a2"), 3)
    recent.add(story(holding_used="b1", holding_left="b2"), 4)
    recent.add(story(holding_left="c1"), 5)
    sessions = [turn["session"] for turn in recent.newest(5)[::-1]]
    assert sessions[0] == sessions[2]
    assert sessions[1] == sessions[3]
    assert len(set(sessions)) == 3
    assert [turn["at"] for turn in recent.history(sessions[0])] == [1, 3]


def test_an_evicted_holding_is_no_longer_shown_as_kept() -> None:
    """Until the session's next turn leaves another one."""
    recent = RecentTurns(10)
    recent.add(story(session="s", holding_left="h1"), 1)
    recent.given_up("other")
    assert recent.sessions(1)[0].page()["worker"] == "d:1"
    recent.given_up("h1")
    page = recent.sessions(1)[0].page()
    assert (page["worker"], page["tokens"], page["until"]) == ("", 0, None)
    assert page["kept"] == "given up"
    recent.add(story(session="s", holding_left="h2"), 2)
    recent.given_up("h1")
    assert recent.sessions(1)[0].page()["worker"] == "d:1"


async def test_what_the_owner_deletes_is_shown_as_gone(serving: Serving) -> None:
    await serving.chat([{"role": "user", "content": SECRET}], conversation_id="c")
    async with admin(serving) as client:
        (kept,) = (await client.get("/admin/sessions")).json()["data"]
        assert (await client.get("/live")).json()["sessions"][0]["worker"] == serving.decode.name
        await client.delete(f"/admin/sessions/{kept['id']}")
        assert (await client.get("/live")).json()["sessions"][0]["worker"] == ""


def test_a_made_up_name_hides_the_clients_request_id() -> None:
    recent = RecentTurns(10)
    recent.add(story(request="customer-4711"), 1)
    assert "customer" not in recent.newest(1)[0]["session"]


def test_only_new_turns_are_told_again() -> None:
    recent = RecentTurns(10)
    for number in range(5):
        recent.add(story(request=str(number)), number)
    assert [turn["request"] for turn in recent.since(3, 10)] == ["3", "4"]
    assert recent.since(5, 10) == []
    assert [turn["request"] for turn in recent.since(0, 2)] == ["3", "4"]


def test_slices_sum_up_what_happened_in_them() -> None:
    """Hits among returning turns, medians of both kinds, and the same turns as if cold."""
    recent = RecentTurns(100)
    recent.add(story(ttft_ms=400.0), 1000)
    warm = {"returning": True, "reused_tokens": 90, "cold_prefill_ms": 320.0}
    recent.add(story(ttft_ms=80.0, **warm), 1001)
    recent.add(story(ttft_ms=300.0, returning=True), 1002)
    recent.add(story(ttft_ms=None, outcome="client_left"), 1003)
    recent.add(story(), 1000 + SLICE_SECONDS)
    first, second = recent.slices(1000 + SLICE_SECONDS)
    assert (first.turns, first.returning, first.hits) == (4, 2, 1)
    assert (first.prompt_tokens, first.reused_tokens) == (300, 90)
    page = first.page()
    assert (page["warm_ms"], page["cold_ms"]) == (80.0, 400.0)
    assert page["warm_as_cold_ms"] == 80.0 - 20.0 + 320.0
    assert second.turns == 1
    assert recent.slices(1000 + SLICES * SLICE_SECONDS + 5) == [second]


def test_medians_of_a_slice_are_made_of_a_bounded_sample() -> None:
    recent = RecentTurns(10)
    for _ in range(1000):
        recent.add(story(), 1000)
    assert len(recent.slices(1000)[0].cold) <= 64


def admin(serving: Serving) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=serving.app.admin), base_url="http://127.0.0.1"
    )


SECRET = "The code of the safe is swordfish. " * 5


async def test_a_session_shows_where_its_kv_is_and_how_its_turns_went(serving: Serving) -> None:
    """A conversation without an id, and not a word of what was said."""
    first = await serving.chat([{"role": "user", "content": SECRET}])
    await serving.chat(
        [
            {"role": "user", "content": SECRET},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Go on."},
        ],
        stream=True,
    )
    async with admin(serving) as client:
        page = (await client.get("/live")).json()
        (session,) = page["sessions"]
        assert (session["turns"], session["reused"]) == (2, 1)
        assert session["worker"] == serving.decode.name
        assert session["tokens"] > 0
        assert session["until"] == pytest.approx(time.time() + 450, abs=30)
        history = (await client.get(f"/live/sessions/{session['id']}")).json()["turns"]
        assert [turn["reason"] for turn in history] == ["new_session", "history_grew"]
        assert history[1]["holding_used"] == history[0]["holding_left"] != ""
        assert "swordfish" not in json.dumps([page, history])
        assert first.text not in json.dumps(history)
        unknown = await client.get("/live/sessions/nobody")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["param"] == "session"


async def test_the_stream_tells_a_snapshot_and_then_what_is_new(serving: Serving) -> None:
    """It ends with the proxy, so that it does not hold up a stop."""
    await serving.chat([{"role": "user", "content": SECRET}])
    events = serving.app.live.events()
    kind, data = (await anext(events)).decode().split("\n")[:2]
    assert kind == "event: snapshot"
    assert len(json.loads(data[6:])["turns"]) == 1
    await serving.chat([{"role": "user", "content": SECRET + "More."}])
    kind, data = (await anext(events)).decode().split("\n")[:2]
    assert kind == "event: tick"
    assert [turn["number"] for turn in json.loads(data[6:])["turns"]] == [2]
    serving.app.live.close()
    async with asyncio.timeout(10):
        assert [event async for event in events] == []


async def test_only_so_many_pages_may_be_open(serve: Serve) -> None:
    serving = await serve()
    streams = [serving.app.live.events() for _ in range(32)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Overloaded):
        serving.app.live.admit()
    async with admin(serving) as client:
        refused = await client.get("/live/stream")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
    for stream in streams:
        await stream.aclose()


async def test_the_page_and_its_files_are_served_and_locked_down(serving: Serving) -> None:
    """Whole, from the package, under a policy that loads nothing from elsewhere."""
    async with admin(serving) as client:
        for path, words in (("/", "<title>kvloop"), ("/live/page.css", ":root"),
                            ("/live/page.js", "EventSource")):  # fmt: skip
            answer = await client.get(path)
            assert answer.status_code == 200
            assert words in answer.text
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert "http" not in answer.text.replace("http://www.w3.org/", "")
