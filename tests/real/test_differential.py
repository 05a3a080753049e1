"""Generated conversations on a real pair: every turn's tokens are those of a cold worker.

The cold answer comes from prefill's own engine, with its prefix cache off and no transfer. Decode
has its prefix cache on, so each conversation speaks words that no other one has used.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.real.conftest import Pair, Workers, start_stack, stop_stack

KINDS = (
    "grow", "grow_named", "grow_streamed", "edit", "shorten", "regenerate", "branch", "compact",
    "reorder", "system_changed", "tools", "tools_changed", "salt_changed", "stop_string", "short",
    "template_args", "continue_final", "retokenised",
)  # fmt: skip
TURNS = 4
GROWING = ("grow", "grow_named", "grow_streamed", "retokenised")
TIE = 1e-3
"""Log-probabilities this close change their order with the order of a sum: not wrong KV."""


@dataclass
class Report:
    turns: int = 0
    pulled_turns: int = 0
    pulled_tokens: int = 0
    prompt_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    not_pulled: list[str] = field(default_factory=list)

    def markdown(self, conversations: int) -> str:
        rows = "\n".join(f"| {reason} | {n} |" for reason, n in self.reasons.most_common())
        return (
            f"# Differential run\n\n{conversations} conversations of {len(KINDS)} kinds, "
            f"{self.turns} turns, model `tiny`, greedy, each turn compared token for token with a "
            f"cold worker.\n\n* different: {len(self.different)} "
            f"(near-ties not counted: {len(self.ties)})\n* turns pulled: {self.pulled_turns}, "
            f"{self.pulled_tokens:,} of {self.prompt_tokens:,} prompt tokens\n* growing "
            f"conversations not pulled after the first turn: {len(self.not_pulled)}\n\n"
            f"| kind: reason | turns |\n|---|---|\n{rows}\n"
        )


class Talk:
    """One conversation of one kind. Its words are its own."""

    def __init__(self, kind: str, number: int, model: str) -> None:
        self.kind = kind
        self.random = random.Random(number)
        self.number = number
        self.fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 8}
        if kind != "grow" and self.random.random() < 0.5:
            self.fields["conversation_id"] = f"talk-{number}"
        if kind == "grow_named":
            self.fields["conversation_id"] = f"talk-{number}"
        self.fields["stream"] = kind == "grow_streamed" or self.random.random() < 0.3
        if kind.startswith("tools"):
            self.fields["tools"] = [self.tool("look_up")]
            self.fields["tool_choice"] = "none"  # the workers have no tool parser
        if kind == "salt_changed":
            self.fields["cache_salt"] = "one"
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.words(3 if kind == "short" else 30)},
            {"role": "user", "content": self.words(2 if kind == "short" else 60)},
        ]

    def words(self, count: int) -> str:
        made = ("".join(self.random.choices("abdegiklmnoprstuvz", k=5)) for _ in range(count))
        return f"{self.number} " + " ".join(made)

    def tool(self, name: str) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "description": self.words(5), "parameters": {}},
        }

    def next(self, answer: str) -> None:
        """What the client makes of the answer and of its history."""
        said = {"role": "assistant", "content": answer}
        ask = {"role": "user", "content": self.words(8)}
        messages = self.messages
        for field_ in ("stop", "add_generation_prompt", "continue_final_message"):
            self.fields.pop(field_, None)
        middle = self.random.randrange(len(messages))
        match self.kind:
            case "edit":
                messages[middle] = {**messages[middle], "content": self.words(40)}
                messages += [said, ask]
            case "shorten":
                messages[-1] = {"role": "user", "content": str(messages[-1]["content"])[:200]}
            case "regenerate":
                pass
            case "branch":
                messages[-1] = {"role": "user", "content": messages[-1]["content"] + ask["content"]}
            case "compact":
                self.messages = [messages[0], {"role": "user", "content": self.words(50)}, ask]
            case "reorder":
                messages += [said, ask]
                self.messages = [messages[0], *self.random.sample(messages[1:], len(messages) - 1)]
            case "system_changed":
                messages[0] = {"role": "system", "content": self.words(30)}
                messages += [said, ask]
            case "tools_changed":
                self.fields["tools"] = [*self.fields["tools"], self.tool("send")]
                messages += [said, ask]
            case "tools":
                call = {"name": "look_up", "arguments": "{}"}
                said["tool_calls"] = [{"id": "a", "type": "function", "function": call}]  # type: ignore[assignment]
                result = {"role": "tool", "tool_call_id": "a", "content": self.words(9)}
                messages += [said, result, ask]
            case "salt_changed":
                self.fields["cache_salt"] = self.random.choice(["one", "two"])
                messages += [said, ask]
            case "stop_string":
                self.fields["stop"] = [self.random.choice("aeio")]
                messages += [said, ask]
            case "template_args":
                self.fields["chat_template_kwargs"] = {"enable_thinking": middle % 2 == 0}
                messages += [said, ask]
            case "continue_final":
                messages.append(said)
                self.fields |= {"add_generation_prompt": False, "continue_final_message": True}
            case "retokenised":
                messages += [{"role": "assistant", "content": answer.strip().upper()}, ask]
            case _:
                messages += [said, ask]

    def body(self) -> dict[str, Any]:
        return {**self.fields, "messages": self.messages, "return_token_ids": True}


async def warm(workers: Workers, body: dict[str, Any]) -> tuple[str, list[int], Any]:
    """A turn through the proxy: text, ids, headers."""
    url = workers.pair.proxy + "/v1/chat/completions"
    async with workers.session.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        if not body.get("stream"):
            choice = (await reply.json())["choices"][0]
            return choice["message"]["content"] or "", list(choice["token_ids"]), reply.headers
        text, ids = "", []
        async for line in reply.content:
            if line.startswith(b"data: {"):
                for choice in (await _json(line[6:])).get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    ids += choice.get("token_ids") or []
        return text, ids, reply.headers


async def _json(data: bytes) -> Any:
    import orjson

    return orjson.loads(data)


async def is_tie(workers: Workers, body: dict[str, Any], position: int) -> bool:
    """Do the two best tokens at the first difference have practically the same probability?"""
    unstreamed = {k: v for k, v in body.items() if k not in ("stream", "conversation_id")}
    answer = await workers.post(
        workers.pair.prefill + "/v1/chat/completions",
        {**unstreamed, "logprobs": True, "top_logprobs": 2},
    )
    best = answer["choices"][0]["logprobs"]["content"][position]["top_logprobs"]
    return bool(best[0]["logprob"] - best[1]["logprob"] < TIE)


async def converse(workers: Workers, talk: Talk, report: Report) -> None:
    for turn in range(TURNS):
        body = talk.body()
        expected = await workers.cold(body)
        text, ids, headers = await warm(workers, body)
        place = f"{talk.kind} {talk.number}, turn {turn}: {headers['X-KVLoop-Reason']}"
        report.turns += 1
        report.prompt_tokens += int(headers.get("X-KVLoop-Prompt-Tokens", 0))
        pulled = int(headers.get("X-KVLoop-Pulled-Tokens", 0))
        report.pulled_tokens += pulled
        report.pulled_turns += pulled > 0
        report.reasons[f"{talk.kind}: {headers['X-KVLoop-Reason']}"] += 1
        if ids != expected:
            pairs = zip([*ids, None], [*expected, None], strict=False)
            first = next(i for i, (a, b) in enumerate(pairs) if a != b)
            tie = first < len(expected) and await is_tie(workers, body, first)
            (report.ties if tie else report.different).append(place)
        if talk.kind in GROWING and turn and not pulled:
            report.not_pulled.append(place)
        talk.next(text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, valkey_url: str) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("tiny-stack")
    try:
        yield start_stack(directory, model="tiny", environment={"KVLOOP_REDIS_URL": valkey_url})
    finally:
        stop_stack(directory)


@pytest_asyncio.fixture
async def tiny_workers(tiny: Pair) -> AsyncIterator[Workers]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        yield Workers(tiny, session)


async def run(workers: Workers, count: int, offset: int) -> Report:
    report = Report()
    try:
        for number in range(count):
            talk = Talk(KINDS[number % len(KINDS)], offset + number, workers.pair.model)
            await converse(workers, talk, report)
    finally:
        page = report.markdown(count)
        page += "".join(f"\n* {p}" for p in report.different + report.ties + report.not_pulled)
        print(page)
        if path := os.environ.get("DIFFERENTIAL_REPORT"):
            Path(path).write_text(page)  # noqa: ASYNC240  # once, at the end
    assert report.different == []
    assert report.not_pulled == []
    return report


async def test_a_sample_of_conversations_equals_cold_runs(tiny_workers: Workers) -> None:
    """No turn differs from a cold worker's, and what only grows is always pulled."""
    await run(tiny_workers, 27, offset=1000)


@pytest.mark.soak
async def test_two_hundred_conversations_equal_cold_runs(tiny_workers: Workers) -> None:
    """The same over at least two hundred conversations of all kinds."""
    report = await run(tiny_workers, 216, offset=5000)
    assert report.turns == 216 * TURNS


async def prompt_length(workers: Workers, body: dict[str, Any]) -> int:
    fields = {"model": body["model"], "messages": body["messages"]}
    return int((await workers.post(workers.pair.prefill + "/tokenize", fields))["count"])


async def fill(workers: Workers, body: dict[str, Any], goal: int) -> None:
    """Lengthen the last message until the prompt has ``goal`` tokens."""
    last = body["messages"][-1]
    while (missing := goal - await prompt_length(workers, body)) > 0:
        last["content"] += " a" * max(1, missing // 2)
    assert missing == 0, "one letter more is one token more, so every length can be met"


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_up_to_the_context_limit_equal_cold_runs(
    tiny_workers: Workers, stream: bool
) -> None:
    """The last turn that fits is pulled and cut where a cold one is; the next is a 400."""
    workers = tiny_workers
    page = await (await workers.session.get(workers.pair.prefill + "/v1/models")).json()
    limit = page["data"][0]["max_model_len"]
    body: dict[str, Any] = {
        "model": workers.pair.model,
        "messages": [{"role": "user", "content": f"limit {stream} {random.random()}"}],
        "temperature": 0,
        "stream": stream,
        "return_token_ids": True,
        "conversation_id": f"limit-{stream}",
    }
    await fill(workers, body, limit - 80)
    text, _, headers = await warm(workers, {**body, "max_tokens": 8})
    assert headers["X-KVLoop-Reason"] == "new_session"
    body["messages"] += [{"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
    await fill(workers, body, limit - 1)

    expected = await workers.cold(body)
    _, ids, headers = await warm(workers, body)
    assert (len(expected), ids) == (1, expected)
    assert int(headers["X-KVLoop-Pulled-Tokens"]) > limit - 160

    await fill(workers, body, limit)
    answers = []
    for url in (workers.pair.decode, workers.pair.proxy):
        async with workers.session.post(url + "/v1/chat/completions", json=body) as reply:
            answers.append((reply.status, (await reply.json())["error"]["message"]))
    assert answers[0][0] == 400
    assert answers[0] == answers[1]
