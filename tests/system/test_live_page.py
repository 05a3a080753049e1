"""The live page in a real browser: what it shows, that it is alone, that it can be read.

SCREENSHOTS=docs/img in the environment makes the pictures of the README.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import uvicorn

from proxy.app import App
from proxy.settings import Settings
from proxy.turn import books
from tests.fakes.worker import MODEL, Cluster, FakeWorker
from tests.proxy.conftest import running
from tests.system.conftest import browser_environment, program
from tests.system.recorded_page import RecordedPage

playwright = pytest.importorskip(
    "playwright.async_api", reason="playwright is not installed (make tools)"
)
expect = playwright.expect

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = ["boat", "harbour", "storm", "market", "village", "evening", "river", "lantern"]
LIMIT_BLOCKS = 2500
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 1000}


class Stage:
    """A proxy with its admin port, between scripted workers, and a browser."""

    def __init__(self, app: App, url: str, admin: str, browser: Any) -> None:
        self.app = app
        self.url = url
        self.admin = admin
        self.browser = browser
        self.session = aiohttp.ClientSession()

    async def turn(
        self, messages: list[dict[str, str]], *, request_id: str = "", **fields: Any
    ) -> str:
        headers = {"X-Request-Id": request_id} if request_id else {}
        async with self.session.post(
            self.url + "/v1/chat/completions",
            json={"model": MODEL, "messages": messages, **fields},
            headers=headers,
        ) as response:
            answer = await response.json()
            return str(answer["choices"][0]["message"]["content"])

    @asynccontextmanager
    async def page(self, *, admin: str = "", **options: Any) -> AsyncIterator[Any]:
        """A fresh page, live; fails on any script error, failed load or request elsewhere."""
        admin = admin or self.admin
        context = await self.browser.new_context(**{"viewport": DESK, **options})
        page = await context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
        page.on(
            "console",
            lambda line: (
                wrong.append(f"console: {line.text}")
                if line.type == "error" and "net::ERR" not in line.text
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((admin, "data:"))
                else wrong.append(f"elsewhere: {request.url}")
            ),
        )
        await page.goto(admin + "/")
        await expect(page.locator("#link")).to_have_text("live", timeout=15_000)
        try:
            yield page
        finally:
            await context.close()
        assert wrong == []


@asynccontextmanager
async def listening(application: Any, port: int = 0) -> AsyncIterator[str]:
    """The admin port, as proxy/__main__ serves it; gives its address."""
    server = uvicorn.Server(
        uvicorn.Config(
            application,
            port=port,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(valkey_url: str) -> AsyncIterator[Stage]:
    executable = program("chromium-headless-shell", "usr/lib/chromium")
    cluster = Cluster()
    prefills = [await FakeWorker(cluster, "prefill").start() for _ in range(2)]
    decodes = [await FakeWorker(cluster, "decode").start() for _ in range(2)]
    for worker in (*prefills, *decodes):
        worker.more_metrics = told_by(worker)
        worker.knobs.token_delay = 0.0004
        worker.knobs.chunk_delay = 0.02
    app = App(
        Settings(
            prefill_urls=tuple(each.url for each in prefills),
            decode_urls=tuple(each.url for each in decodes),
            redis_url=valkey_url,
            health_interval_seconds=0.2,
            table_timeout_seconds=10,
        )
    )
    async with (
        playwright.async_playwright() as driver,
        running(app) as (_, port),
        listening(app.admin) as admin,
    ):
        browser = await driver.chromium.launch(
            executable_path=executable, args=["--no-sandbox"], env=browser_environment()
        )
        stage = Stage(app, f"http://127.0.0.1:{port}", admin, browser)
        yield stage
        await stage.session.close()
        await browser.close()
        app.live.close()
    for worker in (*prefills, *decodes):
        await worker.stop()


def told_by(worker: FakeWorker) -> Callable[[], str]:
    """A recorded page of metrics, with the blocks that this fake really keeps."""
    page = RecordedPage(worker.role)
    page.instead["vllm:kvloop_pin_limit_blocks"] = LIMIT_BLOCKS

    def tell() -> str:
        pins = worker.cluster.pins.items()
        kept = sum(len(pin.blocks) for (engine, _), pin in pins if engine == worker.engine_id)
        page.instead["vllm:kvloop_pinned_blocks"] = kept
        return page()

    return tell


def conversation(seed: int) -> Iterator[list[dict[str, str]]]:
    """Messages of ever longer turns; one conversation in six is edited on the way."""
    chance = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(words))

    messages = [{"role": "user", "content": text(chance.randint(60, 160))}]
    while True:
        yield list(messages)
        if seed % 6 == 5 and chance.random() < 0.3:
            messages[0] = {"role": "user", "content": text(80)}
        messages += [
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": text(chance.randint(10, 40))},
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(stage: Stage) -> None:
    """Twelve minutes of conversations in some seconds: only the books' clock is shifted."""
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic)
    talks = [(seed, conversation(seed)) for seed in range(14)]
    chance = random.Random(7)
    books.time = clock  # type: ignore[assignment]
    try:
        for minutes in range(48, -1, -1):
            clock.time = lambda back=minutes * 15: time.time() - back
            chosen = chance.sample(talks, 4)
            await asyncio.gather(
                *(
                    stage.turn(
                        next(talk), **({"conversation_id": f"agent-{seed}"} if seed % 3 else {})
                    )
                    for seed, talk in chosen
                )
            )
            if chance.random() < 0.5:
                place = chance.randrange(len(talks))
                fresh = chance.randrange(100, 10**6)
                talks[place] = (fresh, conversation(fresh))
            if minutes % 16 == 8:
                await stage.turn([{"role": "user", "content": "Twice, please."}], n=2)
    finally:
        books.time = time  # type: ignore[assignment]


async def test_a_turn_appears_without_a_reload(stage: Stage, busy: None) -> None:
    """Its session, where its KV is, and the reason; then the next turn, reused."""
    messages = [{"role": "user", "content": " ".join(WORDS * 12)}]
    async with stage.page() as page:
        await stage.turn(messages, conversation_id="first")
        row = page.locator("#turns tbody tr").first
        await expect(row).to_contain_text("new session")
        session = page.locator("#sessions tbody tr").first
        await expect(session).to_contain_text("127.0.0.1:")
        await expect(session).to_contain_text("0/1")
        messages += [
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": "And then?"},
        ]
        await stage.turn(messages, conversation_id="first")
        await expect(row).to_contain_text("history grew")
        await expect(session).to_contain_text("1/2")


async def test_a_click_shows_the_sessions_history(stage: Stage, busy: None) -> None:
    """All its turns, in order, each with its legs; also of a session that no client named."""
    async with stage.page() as page:
        for start in ("~", ""):
            button = page.locator("#sessions .id", has_text=start).first
            label = await button.inner_text()
            await button.click()
            await expect(page.locator("#history-title")).to_have_text(f"Session {label}")
            turns = page.locator("#history-turns li")
            await expect(turns.first).to_contain_text("prefill")
            known = stage.app.conductor.recent.history(label)
            assert await turns.count() == len(known)
            await expect(turns.last).to_contain_text(known[-1]["request"])
            await page.keyboard.press("Escape")
            await expect(page.locator("#history")).to_be_hidden()


async def test_the_page_agrees_with_the_counters(stage: Stage, busy: None) -> None:
    """Hit rate of the last five minutes, and the workers, as the proxy has them."""
    slices = stage.app.conductor.recent.slices(time.time())
    recent = [s for s in slices if s.start >= time.time() - 300]
    hits, returning = sum(s.hits for s in recent), sum(s.returning for s in recent)
    assert 0 < hits < returning
    async with stage.page() as page:
        tile = page.locator(".tile", has_text="returning turns reused")
        shown = int((await tile.locator("b").inner_text()).split()[0])
        assert abs(shown - 100 * hits / returning) < 6  # a slice may have left meanwhile
        for worker in stage.app.pool.workers:
            card = page.locator(".worker", has_text=worker.name)
            await expect(card).to_contain_text(str(worker.role))
        await expect(page.locator(".worker", has_text="decode").first).to_contain_text(
            f"of at most {LIMIT_BLOCKS:,}"
        )


async def test_the_history_outlives_the_answering_process(
    stage: Stage, busy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several processes another may answer the click: the page tells what it knows itself."""
    recent = stage.app.conductor.recent
    async with stage.page() as page:
        label = await page.locator("#turns .id").first.inner_text()
        known = [turn for turn in recent.newest(150) if turn["session"] == label]
        monkeypatch.setattr(recent, "history", lambda session: known[-1:])
        await page.locator("#turns .id").first.click()
        await expect(page.locator("#history-turns li")).to_have_count(len(known))


async def test_what_a_client_sends_is_shown_as_text(stage: Stage, busy: None) -> None:
    """A request id with markup in it stays text."""
    nasty = "<img src=x onerror=alert(1)>"
    await stage.turn([{"role": "user", "content": "Hello there. " * 20}], request_id=nasty)
    async with stage.page() as page:
        await page.locator("#turns .id").first.click()
        await expect(page.locator("#history-turns")).to_contain_text(nasty)
        assert await page.locator("#history-turns img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
async def test_it_fits_and_can_be_read(
    stage: Stage, busy: None, scheme: str, viewport: dict[str, int], tmp_path: Path
) -> None:
    """Nothing sticks out sideways, nothing overlaps, text stands out from its ground."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    name = "phone" if viewport is PHONE else "desk"
    async with stage.page(viewport=viewport, color_scheme=scheme, device_scale_factor=1.5) as page:
        async with under_load(stage):
            await expect(page.locator("#dots circle").nth(1)).to_be_attached(timeout=30_000)
            await page.screenshot(
                path=folder / f"live-{name}-{scheme}.png", full_page=name == "desk"
            )
        assert await page.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
        assert await page.evaluate(CLIPPED) == []
        assert await page.evaluate(PALE) == []


CLIPPED = """[...document.querySelectorAll('.tile, .card > h2, .worker, .legend, header')]
  .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth)
  .map(each => each.textContent)"""

PALE = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(
      v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/rgba\\(.*, 0\\)/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('b, span, td, th, h1, h2, small, p, strong, button')]
    .filter(each => each.offsetParent && !each.closest('tr.new'))
    .filter(each => [...each.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(each => [each, light(getComputedStyle(each).color), light(ground(each))])
    .filter(([, a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.3)
    .map(([each]) => each.className + ': ' + each.textContent);
})()"""
"""Texts whose contrast is below 4.3 to 1 (WCAG asks for 4.5; some rounding)."""


@asynccontextmanager
async def under_load(stage: Stage) -> AsyncIterator[None]:
    """Conversations for as long as the block lasts."""

    async def converse() -> None:
        for seed in itertools.count(200, 3):
            talks = [(seed + each, conversation(seed + each)) for each in range(3)]
            for _ in range(4):
                turns = (
                    stage.turn(next(talk), conversation_id=f"agent-{name}") for name, talk in talks
                )
                await asyncio.gather(*turns)

    load = asyncio.create_task(converse())
    try:
        yield
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


async def test_it_says_when_the_proxy_is_gone(stage: Stage) -> None:
    """And goes on by itself when it is back."""
    async with listening(stage.app.admin) as admin:
        opened = stage.page(admin=admin)
        page = await opened.__aenter__()
    await expect(page.locator("#link")).to_have_text("no connection", timeout=15_000)
    async with listening(stage.app.admin, int(admin.rpartition(":")[2])):
        await expect(page.locator("#link")).to_have_text("live", timeout=15_000)
        await opened.__aexit__(None, None, None)
