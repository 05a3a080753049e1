"""Traces: a span for each step, the workers' spans below them, and nothing at all when off."""

from __future__ import annotations

import asyncio
import sys

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.app import App
from proxy.settings import Settings, SettingsError
from proxy.tracing import Tracing
from proxy.turn.trace import trace_headers
from tests.fakes.worker import FakeWorker
from tests.proxy.conftest import Serve, Serving
from tests.proxy.test_turns import LONG, user

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def traced(serving: Serving) -> InMemorySpanExporter:
    """The running proxy's spans, kept in memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    serving.app.conductor._tracing = Tracing(provider)
    return exporter


async def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """By name, once the turn's own span has ended."""
    async with asyncio.timeout(5):
        while not any(span.name == "turn" for span in exporter.get_finished_spans()):
            await asyncio.sleep(0.005)
    return {span.name: span for span in exporter.get_finished_spans()}


def sent(worker: FakeWorker) -> dict[str, str]:
    """Headers of the last request to a worker."""
    return worker.headers[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_step_is_a_span_below_the_turn(
    serving: Serving, traced: InMemorySpanExporter, stream: bool
) -> None:
    """In order, within the turn, and in the client's trace."""
    await serving.chat([user(LONG)], stream=stream)
    await spans(traced)
    traced.clear()
    await serving.chat([user(LONG)], stream=stream, headers={"traceparent": PARENT})
    found = await spans(traced)
    turn = found["turn"]
    order = ["tokenise", "find", "claim", "plan", "prefill", "decode"]
    assert set(found) == {*order, "turn", "commit"}
    assert turn.parent is not None
    assert format(turn.parent.span_id, "016x") == PARENT.split("-")[2]
    for span in found.values():
        assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
        if span is not turn:
            assert span.parent.span_id == turn.context.span_id
            assert turn.start_time <= span.start_time <= span.end_time <= turn.end_time

    starts = [found[name].start_time for name in order]
    assert starts == sorted(starts)
    assert turn.attributes["kvloop.route"] == "prefill-with-pull"
    assert turn.attributes["kvloop.reused_tokens"] > 0
    assert turn.status.is_ok or turn.status.is_unset


async def test_workers_hang_their_spans_below_the_step_that_called_them(
    serving: Serving, traced: InMemorySpanExporter
) -> None:
    await serving.chat([user(LONG)], stream=True)
    found = await spans(traced)
    for name, worker in (("prefill", serving.prefill), ("decode", serving.decode)):
        _, trace, parent, flags = sent(worker)["traceparent"].split("-")
        assert trace == format(found[name].context.trace_id, "032x")
        assert parent == format(found[name].context.span_id, "016x")
        assert int(flags, 16) & 1  # sampled


async def test_decodes_span_ends_with_the_first_content(
    serving: Serving, traced: InMemorySpanExporter
) -> None:
    """What follows is the client's reading, not decode's answer to the call."""
    serving.decode.knobs.answer = "x" * 40
    serving.decode.knobs.chunk_delay = 0.005
    await serving.chat([user(LONG)], stream=True)
    found = await spans(traced)
    (event,) = found["turn"].events
    assert event.name == "first content"
    assert found["decode"].end_time < found["turn"].end_time - 0.1e9


async def test_a_failed_leg_and_a_failed_turn_are_errors(
    serving: Serving, traced: InMemorySpanExporter
) -> None:
    serving.decode.knobs.fail_next["/v1/chat/completions"] = 10
    answer = await serving.chat([user(LONG)])
    assert answer.status == 502
    found = await spans(traced)
    assert not found["decode"].status.is_ok
    assert not found["turn"].status.is_ok
    assert found["turn"].attributes["kvloop.outcome"] == "error"


async def test_without_traces_the_clients_context_goes_on_to_the_workers(serving: Serving) -> None:
    await serving.chat([user(LONG)], headers={"traceparent": PARENT, "tracestate": "a=1"})
    assert sent(serving.decode)["traceparent"] == PARENT
    assert sent(serving.prefill)["traceparent"] == PARENT
    assert sent(serving.decode)["tracestate"] == "a=1"
    await serving.chat([user(LONG)])
    assert "traceparent" not in sent(serving.decode)


@pytest.mark.parametrize(
    "headers",
    [
        {b"traceparent": b"nonsense"},
        {b"traceparent": PARENT.encode() + b"\r\nX-Evil: 1"},
        {b"tracestate": b"a=1"},
        {},
    ],
)
def test_a_malformed_context_is_not_passed_on(headers: dict[bytes, bytes]) -> None:
    assert trace_headers(headers) == {}


def test_an_overlong_state_is_left_out() -> None:
    given = {b"traceparent": PARENT.encode(), b"tracestate": b"a" * 513}
    assert trace_headers(given) == {"traceparent": PARENT}


async def test_spans_reach_a_collector(serve: Serve) -> None:
    """Over OTLP and HTTP, and the last ones when the proxy stops."""
    received: list[str] = []

    async def take(request: web.Request) -> web.Response:
        batch = ExportTraceServiceRequest.FromString(await request.read())
        for resource in batch.resource_spans:
            received.extend(span.name for scope in resource.scope_spans for span in scope.spans)
        return web.Response()

    collector = web.Application()
    collector.router.add_post("/v1/traces", take)
    runner = web.AppRunner(collector)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    serving = await serve(otlp_endpoint=url)
    await serving.chat([user(LONG)])
    while not await serving.metric("kvloop_turns_total"):
        await asyncio.sleep(0.005)
    assert serving.app.tracing is not None
    await asyncio.to_thread(serving.app.tracing.close)
    assert sorted(received) == [
        "commit", "decode", "find", "plan", "prefill", "tokenise", "turn",
    ]  # fmt: skip
    await runner.cleanup()


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.sampling", None)
    with pytest.raises(SettingsError, match=r"kvloop\[otel\]"):
        App(Settings(decode_urls=("http://d:1",), otlp_endpoint="http://c:4318/v1/traces"))
