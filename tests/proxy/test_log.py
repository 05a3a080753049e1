"""The log: each line of a turn has its request id, and ``kvloop explain`` tells its story."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvloop import explain
from proxy import log
from proxy.turn.reasons import Reason
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, user


class Log(logging.Handler):
    """What the proxy would write, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(log._JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def story(self, request: str) -> str:
        return "\n".join(explain.tell(explain.find(explain.parse(self.lines), request)))


@pytest.fixture
def written() -> Iterator[Log]:
    handler = Log()
    logger = logging.getLogger("kvloop")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def converse(serving: Serving, *names: str, stream: bool = True) -> None:
    """A growing conversation; each turn's request id is given."""
    messages = [user(LONG)]
    for name in names:
        answer = await serving.chat(messages, stream=stream, headers={"X-Request-Id": name})
        messages += [{"role": "assistant", "content": answer.text}, user("And then?")]
    while await serving.metric("kvloop_turns_total") < len(names):
        pass


async def test_every_line_of_a_turn_has_its_request_id(serving: Serving, written: Log) -> None:
    """Also a line whose writer knows no request: the task it runs in does."""
    assert serving.prefill is not None
    serving.prefill.knobs.fail_next["/v1/completions"] = 1
    await converse(serving, "one")
    events = {line["event"]: line.get("request") for line in written.objects}
    assert events["prefill_failed"] == events["turn"] == "one"
    log.request_id.set("two")
    log.event("release_failed", holding="h")
    assert written.objects[-1]["request"] == "two"


async def test_a_reused_turn_is_explained_with_the_turns_around_it(
    serving: Serving, written: Log
) -> None:
    await converse(serving, "first", "second", "third")
    story = written.story("second")
    assert "Route prefill-with-pull, reason history_grew. The prompt extends everything" in story
    assert "left by request first" in story
    assert f"Prefill {serving.prefill.name} pulled" in story
    assert "tokens from decode" in story
    assert "estimated" in story
    assert f"Decode {serving.decode.name} sent first content after" in story
    assert "Request third at" in story
    assert "complete after" in story
    assert LONG[:20] not in story


async def test_a_cold_turn_is_explained_and_a_start_of_its_id_is_enough(
    serving: Serving, written: Log
) -> None:
    await converse(serving, "0123456789", stream=False)
    story = written.story("0123")
    assert "Request 0123456789" in story
    assert "not streamed" in story
    assert "reason new_session. No stored handle" in story
    assert "sent the whole answer after" in story
    assert "Decode keeps" in story


async def test_what_went_wrong_on_the_way_is_part_of_the_story(serve: Serve, written: Log) -> None:
    serving = await serve(prefills=2)
    for worker in serving.prefills:
        worker.knobs.fail_next["/v1/completions"] = 1
    await converse(serving, "bad")
    story = written.story("bad")
    assert story.count("prefill_failed: worker") == 2
    assert "Route decode-only, reason prefill_failed" in story
    assert "Nothing is kept" in story


async def test_lines_of_containers_and_other_output_do_no_harm(
    serving: Serving, written: Log
) -> None:
    await converse(serving, "one")
    noisy = ["Traceback (most recent call last):", "{not json", '{"a": 1}', ""]
    noisy += [f"proxy-1  | {line}" for line in written.lines]
    case = explain.find(explain.parse(noisy), "one")
    assert case.turn["request"] == "one"


async def test_unknown_and_ambiguous_requests_are_said_to_be_so(
    serving: Serving, written: Log
) -> None:
    await converse(serving, "abc1", "abc2")
    lines = explain.parse(written.lines)
    with pytest.raises(explain.Unexplained, match="No line"):
        explain.find(lines, "xyz")
    with pytest.raises(explain.Unexplained, match="2 requests begin with abc"):
        explain.find(lines, "abc")
    unfinished = [{"event": "cold_retry", "request": "q", "time": "2026-01-01T00:00:00+00:00"}]
    with pytest.raises(explain.Unexplained, match="not over"):
        explain.find(unfinished, "q")


def test_every_reason_has_a_meaning() -> None:
    """The words below each reason in its file, whole sentences."""
    assert set(explain.meanings()) >= {str(reason) for reason in Reason}
    assert all(meaning.endswith(".") for meaning in explain.meanings().values())


def test_an_event_is_the_same_line_past_logging_and_through_it(
    monkeypatch: pytest.MonkeyPatch, written: Log
) -> None:
    """The short way is taken when nobody else listens."""
    logger = logging.getLogger("kvloop")
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.25)
    log.request_id.set("r")
    log.event("turn", route="cold", at=2)
    (through,) = written.objects
    stream = io.StringIO()
    short = logging.StreamHandler(stream)
    monkeypatch.setattr(logger, "handlers", [short])
    monkeypatch.setattr(log, "_direct", short)
    log.event("turn", route="cold", at=2)
    log.event("debugging", level=logging.DEBUG)
    log.request_id.set("")
    assert stream.getvalue().endswith("\n")
    assert json.loads(stream.getvalue()) == through
    assert through["request"] == "r"
    stream.close()
    log.event("turn")  # nobody fails because the log is gone
