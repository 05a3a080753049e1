"""Each feature, streamed and not, on the real pair: the answer is that of one plain vLLM worker.

The first turn of every case goes through kvloop alone; the second goes through kvloop, where its
history comes from decode, and to a worker that computes everything itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.real.features import report
from tests.real.features.answers import assembled, cached_tokens, comparable, differences
from tests.real.features.cases import CASES, REUSED, Case
from tests.real.features.stack import MODEL, FeatureStack, running

TOLERANCE = 2e-3
"""Of log-probabilities: the order of a sum differs with the length of what is computed."""


_PATIENCE = aiohttp.ClientTimeout(total=300)
_AT_ONCE = 1
"""More is quicker, but six at once gave other answers in one case of eight, and it is not known yet
which of the two workers they changed."""
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
    """All cases, a few at a time: single requests would leave the workers idle."""
    return asyncio.run(_measure_all(stack))


@pytest.fixture(scope="module")
def results(measured: dict[tuple[Case, bool], Measured]) -> Iterator[list[report.Cell]]:
    cells = [each.cell for each in measured.values()]
    yield cells
    if path := os.environ.get("FEATURES_REPORT"):
        page = report.page(cells)
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


async def _measure_all(stack: FeatureStack) -> dict[tuple[Case, bool], Measured]:
    few = asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession(timeout=_PATIENCE) as session:

        async def one(case: Case, streamed: bool) -> Measured:
            async with few:
                try:
                    return await _measure(stack, session, case, streamed)
                except Exception as error:  # one case's, which must not hide the others
                    cell = report.Cell(case, streamed, 0, "", "", 0, True)
                    return Measured(cell, [repr(error)], (0, 0), None)

        every = [(case, streamed) for case in CASES for streamed in case.streams]
        found = await asyncio.gather(*(one(*each) for each in every))
    return dict(zip(every, found, strict=True))


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
    results: list[report.Cell],
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
    stack: FeatureStack, session: aiohttp.ClientSession, results: list[report.Cell]
) -> None:
    """``previous_response_id`` gives what the whole history gives, on the worker that has it."""
    case = Case("/v1/responses", "previous_response_id", expect="previous_response")
    for streamed in (False, True):
        first, last = case.turns(f"previous {streamed}")
        made = await ask(session, stack.proxy, case.route, first)
        follow = {k: v for k, v in last.items() if k != "input"}
        follow |= {"input": "Go on.", "previous_response_id": made.answer["id"], "stream": streamed}
        ours = await ask(session, stack.proxy, case.route, follow)
        whole = {**follow, "input": [*first["input"], *made.answer["output"]]}
        whole["input"].append({"role": "user", "content": "Go on."})
        del whole["previous_response_id"]
        plain = await ask(session, stack.plain, case.route, whole)
        found = differences(comparable(plain.answer), comparable(ours.answer), tolerance=TOLERANCE)
        reason, route = ours.headers["X-KVLoop-Reason"], ours.headers["X-KVLoop-Route"]
        results.append(report.Cell(case, streamed, ours.status, route, reason, 0, bool(found)))
        assert found == []
        assert reason == "previous_response"
        async with session.get(f"{stack.proxy}/v1/responses/{made.answer['id']}") as stored:
            assert (await stored.json())["output"] == made.answer["output"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"model": MODEL, "prompt": "a small dog"}),
        ("POST", "/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
        ("POST", "/detokenize", {"model": MODEL, "tokens": [400, 500]}),
        (
            "POST",
            "/v1/messages/count_tokens",
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
        ),
        (
            "POST",
            "/v1/chat/completions/batch",
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
    body: dict[str, Any] | None,
    results: list[report.Cell],
) -> None:
    answers = []
    for url in (stack.plain, stack.proxy):
        async with session.request(method, url + path, json=body) as response:
            answers.append((response.status, comparable(await response.json())))
    results.append(
        report.Cell(
            Case(path, ""), False, answers[1][0], "one worker", "", 0, answers[0] != answers[1]
        )
    )
    assert answers[0] == answers[1]
    assert answers[0][0] == 200


_BENCH = """\
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
"""``vllm bench serve``, whose own command looks for a distribution called vllm."""


@pytest.mark.parametrize(
    ("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
async def test_vllms_own_benchmark_client(
    stack: FeatureStack, tmp_path: Path, backend: str, path: str
) -> None:
    """Every request of ``vllm bench serve`` is answered, with all the tokens that it asked for."""
    command = [sys.executable, "-c", _BENCH, "--backend", backend, "--endpoint", path]
    command += ["--base-url", stack.proxy, "--model", MODEL, "--tokenizer", str(stack.model_folder)]
    command += ["--dataset-name", "random", "--random-input-len", "120"]
    command += ["--random-output-len", "9", "--num-prompts", "6", "--max-concurrency", "3"]
    command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--result-filename",
        "result.json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 54)


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
