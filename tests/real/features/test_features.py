"""Each feature, streamed and not, on the real pair: the answer is that of one plain vLLM worker.

The first turn of every case goes through kvloop alone; the second goes through kvloop, where its
history comes from decode, and to a worker that computes everything itself. One case at a time:
``test_a_workers_answers_in_company`` shows why.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from tests.real.features import report
from tests.real.features.answers import assembled, cached_tokens, comparable, differences
from tests.real.features.cases import (
    ANTHROPIC_TOOLS,
    AT_ONCE,
    CASES,
    CHAT_TOOLS,
    RESPONSES_TOOLS,
    REUSED,
    WORDS,
    Case,
)
from tests.real.features.stack import ADAPTER, MODEL, FeatureStack, running

TOLERANCE = 2e-3
"""Of log-probabilities: the order of a sum differs with the length of what is computed."""


_PATIENCE = aiohttp.ClientTimeout(total=300)
pytestmark = pytest.mark.soak

# The tiny model computes faster than it pulls, and a busy machine must not look like a dead Redis.
ALWAYS_PULL = {
    "KVLOOP_DECODE_LOCAL_APPEND": "false",
    "KVLOOP_PLAN_BY_COST": "false",
    "KVLOOP_TABLE_TIMEOUT_SECONDS": "10",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, valkey_url: str) -> Iterator[FeatureStack]:
    folder = tmp_path_factory.mktemp("features")
    # A pull is what is compared; decode would compute these short new parts by itself.
    with running(folder, valkey_url, **ALWAYS_PULL) as made:
        yield made


@dataclass
class Measured:
    """One case, streamed or not, asked of both."""

    cell: report.Cell
    differences: list[str]
    statuses: tuple[int, int]
    answer: Any


@pytest.fixture(scope="module")
def measured(stack: FeatureStack) -> dict[tuple[Case, bool], Measured]:
    """All cases, one after the other."""
    return asyncio.run(_measure_all(stack))


@pytest.fixture(scope="module")
def results(measured: dict[tuple[Case, bool], Measured]) -> Iterator[report.Results]:
    found = report.Results([each.cell for each in measured.values()])
    yield found
    if path := os.environ.get("FEATURES_REPORT"):
        page = report.page(found)
        Path(path).write_text(page)
        if readme := os.environ.get("FEATURES_README"):
            Path(readme).write_text(report.put_into(Path(readme).read_text(), page))


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=_PATIENCE) as made:
        yield made


@dataclass
class Reply:
    status: int
    headers: Any
    answer: Any


async def ask(session: aiohttp.ClientSession, url: str, route: str, body: dict[str, Any]) -> Reply:
    async with session.post(url + route, json=body) as response:
        text = await response.text()
        streamed = response.content_type == "text/event-stream"
        answer = assembled(route, text, streamed=streamed)
        return Reply(response.status, response.headers, answer)


def _refusal_in_stream(reply: Reply) -> Reply:
    """A refusal that a worker tells in a stream, after status 200, as what it is: kvloop has not
    begun to answer by then and gives it its status."""
    answer = reply.answer
    if reply.status == 200 and answer.get("errors") and not answer["choices"]:
        error = answer["errors"][0]
        return Reply(error["code"], reply.headers, {"error": error})
    return reply


async def _measure_all(stack: FeatureStack) -> dict[tuple[Case, bool], Measured]:
    found = {}
    async with aiohttp.ClientSession(timeout=_PATIENCE) as session:
        for case in CASES:
            for streamed in case.streams:
                try:
                    found[case, streamed] = await _measure(stack, session, case, streamed)
                except Exception as error:  # one case's, which must not hide the others
                    cell = report.Cell(case, streamed, 0, "", "", 0, True)
                    found[case, streamed] = Measured(cell, [repr(error)], (0, 0), None)
    return found


async def _measure(
    stack: FeatureStack, session: aiohttp.ClientSession, case: Case, streamed: bool
) -> Measured:
    first, last = case.turns(f"{case.route} {case.feature} {streamed}")
    opened = await ask(session, stack.proxy, case.route, first)
    assert opened.status == 200, (case, opened.answer)
    last["stream"] = streamed
    plain, ours = await asyncio.gather(
        ask(session, stack.plain, case.route, last), ask(session, stack.proxy, case.route, last)
    )
    plain = _refusal_in_stream(plain)
    found = differences(comparable(plain.answer), comparable(ours.answer), tolerance=TOLERANCE)
    cell = report.Cell(
        case,
        streamed,
        ours.status,
        ours.headers.get("X-KVLoop-Route", ""),
        ours.headers.get("X-KVLoop-Reason", ""),
        int(ours.headers.get("X-KVLoop-Reused-Tokens", 0)),
        bool(found),
    )
    return Measured(cell, found, (plain.status, ours.status), ours.answer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.route} {case.feature}")
def test_the_answer_is_a_plain_workers(
    case: Case,
    measured: dict[tuple[Case, bool], Measured],
    results: report.Results,
) -> None:
    for streamed in case.streams:
        each = measured[case, streamed]
        plain_status, status = each.statuses
        assert status == plain_status, each.answer
        if case.route == "/v1/messages" and status >= 400:
            assert each.answer["type"] == "error"  # the worker's own validation has another shape
        else:
            assert each.differences == []
        cell = each.cell
        assert re.search(case.shows, json.dumps(each.answer)), each.answer
        if case.expect.isdigit():
            assert status == int(case.expect)
        elif case.expect == REUSED:
            # The model's own answer is not in the second turn, so the history is cut before it.
            assert cell.route == "prefill-with-pull", cell.reason
        else:
            assert cell.reason == case.expect
        if cell.route != "decode-only" and (said := cached_tokens(each.answer)) is not None:
            assert said == cell.reused


async def test_a_previous_response_continues(
    stack: FeatureStack, session: aiohttp.ClientSession, results: report.Results
) -> None:
    """``previous_response_id`` gives what it gives on one worker that made both responses.

    (Not what the whole history as input gives: of a stored response vLLM repeats the messages, but
    neither its reasoning nor its calls.)
    """
    case = Case("/v1/responses", "previous_response_id", expect="previous_response")
    for streamed in (False, True):
        first, last = case.turns(f"previous {streamed}")
        answers = []
        for url in (stack.plain, stack.proxy):
            made = await ask(session, url, case.route, first)
            follow = {k: v for k, v in last.items() if k != "input"}
            follow |= {"input": "Go on.", "previous_response_id": made.answer["id"]}
            answers.append(await ask(session, url, case.route, {**follow, "stream": streamed}))
            async with session.get(f"{url}/v1/responses/{made.answer['id']}") as stored:
                assert await stored.json() == made.answer
        plain, ours = answers
        found = differences(comparable(plain.answer), comparable(ours.answer), tolerance=TOLERANCE)
        reason, route = ours.headers["X-KVLoop-Reason"], ours.headers["X-KVLoop-Route"]
        results.cells.append(
            report.Cell(case, streamed, ours.status, route, reason, 0, bool(found))
        )
        assert (plain.status, ours.status) == (200, 200)
        assert found == []
        assert reason == "previous_response"


async def spoken_through_the_sdks(url: str) -> dict[str, Any]:
    """Second turns of conversations with tools, as the SDKs put them together."""
    start = {"role": "user", "content": "the SDKs " + WORDS}
    more = [
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "What did Rex say then?"},
    ]
    said: dict[str, Any] = {}
    # The SDK parses strict arguments, and those of this model are cut off by the limit.
    open_tools: Any = [{**tool, "strict": False} for tool in RESPONSES_TOOLS]
    common: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0, **AT_ONCE}}
    async with (
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        for messages in ([start], [start, *more]):
            given: Any = messages
            chat = await one.chat.completions.create(
                **common,
                messages=given,
                tools=CHAT_TOOLS,  # type: ignore[arg-type]
                tool_choice="required",
                max_tokens=60,
            )
            async with one.responses.stream(
                **common,
                input=given,
                tools=open_tools,
                tool_choice="required",
                max_output_tokens=60,
            ) as events:
                response = await events.get_final_response()
            kwargs: Any = {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}
            async with other.messages.stream(
                **common, messages=given, max_tokens=60, **kwargs
            ) as pieces:
                message = await pieces.get_final_message()
            # As agents send it: with ?beta=true and a header for each beta feature.
            beta = await other.beta.messages.create(
                **common, messages=given, max_tokens=60, betas=["context-1m-2025-08-07"], **kwargs
            )
            said = {"chat": chat, "responses": response, "messages": message, "beta": beta}
    return {name: comparable(answer.model_dump()) for name, answer in said.items()}


async def test_the_sdks_put_together_what_a_plain_worker_says(stack: FeatureStack) -> None:
    """Streams of tool calls through the SDKs' own accumulators: equal in every field."""
    plain = await spoken_through_the_sdks(stack.plain)
    ours = await spoken_through_the_sdks(stack.proxy)
    assert any(block["type"] == "tool_use" for block in plain["messages"]["content"])
    assert any(item["type"] == "function_call" for item in plain["responses"]["output"])
    assert differences(plain, ours, tolerance=TOLERANCE) == []


_COMPANY = 6


async def test_a_workers_answers_in_company(
    stack: FeatureStack, session: aiohttp.ClientSession, results: report.Results
) -> None:
    """Why cases run one at a time: a plain worker's own answers change when adapters are mixed in.

    The same requests go to the plain worker alone, one by one and six at a time. Without an adapter
    among them nothing may change, or comparing answers would prove nothing; with one every sixth,
    what changes is vLLM's and is only written down.
    """
    plain_cases = [
        case for case in CASES if case.expect in (REUSED, "history_cut") and case.model == MODEL
    ]
    adapter = next(case for case in CASES if case.model == ADAPTER)
    for mixed in (False, True):
        bodies = []
        for number, case in enumerate(plain_cases):
            if mixed and number % (_COMPANY - 1) == 0:
                bodies.append((adapter, adapter.turns(f"company {number}")[1]))
            bodies.append((case, case.turns(f"company {case.feature}")[1]))
        few = asyncio.Semaphore(_COMPANY)

        async def one(case: Case, body: dict[str, Any], few: asyncio.Semaphore = few) -> Any:
            async with few:
                return comparable((await ask(session, stack.plain, case.route, body)).answer)

        by_one = [await one(*each) for each in bodies]
        at_once = await asyncio.gather(*(one(*each) for each in bodies))
        changed = [
            case.model == ADAPTER
            for (case, _), a, b in zip(bodies, by_one, at_once, strict=True)
            if differences(a, b, tolerance=TOLERANCE)
        ]
        results.company.append(
            report.Company(_COMPANY, len(bodies), mixed, len(changed), sum(changed))
        )
        if not mixed:
            assert changed == []


@pytest.mark.parametrize(
    ("method", "path", "what", "body"),
    [
        ("GET", "/v1/models", "", None),
        ("POST", "/tokenize", "text", {"model": MODEL, "prompt": "a small dog"}),
        (
            "POST",
            "/tokenize",
            "chat",
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
        ),
        ("POST", "/detokenize", "", {"model": MODEL, "tokens": [400, 500]}),
        (
            "POST",
            "/v1/messages/count_tokens",
            "",
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
        ),
        (
            "POST",
            "/v1/chat/completions/batch",
            "",
            {
                "model": MODEL,
                "messages": [
                    [{"role": "user", "content": "x"}],
                    [{"role": "user", "content": "y"}],
                ],
                "temperature": 0,
                "max_tokens": 5,
            },
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
async def test_other_routes_answer_as_the_worker_does(
    stack: FeatureStack,
    session: aiohttp.ClientSession,
    method: str,
    path: str,
    what: str,
    body: dict[str, Any] | None,
    results: report.Results,
) -> None:
    answers = []
    for url in (stack.plain, stack.proxy):
        async with session.request(method, url + path, json=body) as response:
            answers.append((response.status, comparable(await response.json())))
    results.cells.append(
        report.Cell(
            Case(path, what), False, answers[1][0], "one worker", "", 0, answers[0] != answers[1]
        )
    )
    assert answers[0] == answers[1]
    assert answers[0][0] == 200


async def test_nothing_is_left_pinned(stack: FeatureStack, session: aiohttp.ClientSession) -> None:
    """Runs last: all that decode keeps now is what the table knows, and no read was ever late."""
    async with session.get(stack.decode + "/metrics") as response:
        page = await response.text()
    late = [
        line
        for line in page.splitlines()
        if line.startswith("vllm:nixl_num_notifications_after_expiry_total")
    ]
    assert all(line.endswith(" 0.0") for line in late), late
