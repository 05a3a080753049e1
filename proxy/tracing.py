"""[io] OpenTelemetry traces of turns: optional, off without ``otlp_endpoint``.

Each turn is a span; its steps (tokenise, find, claim, plan, prefill, decode to the first content,
commit) are spans below it. The W3C ``traceparent`` goes on to the workers, so that vLLM's own spans
hang below the step that called it. This module is imported only when traces are on. Spans hold no
text and no id that a client chose, except the request's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as api
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.settings import Settings, SettingsError
from proxy.turn.trace import TurnTrace, trace_headers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()


class _RecordedTrace(TurnTrace):
    def __init__(self, tracer: api.Tracer, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self._tracer = tracer
        parent = _PROPAGATOR.extract(given)
        self._root = tracer.start_span("turn", context=parent, kind=api.SpanKind.SERVER)
        self._open = [self._root]
        self.trace_id = format(self._root.get_span_context().trace_id, "032x")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        context = api.set_span_in_context(self._root)
        span = self._tracer.start_span(name, context=context, kind=api.SpanKind.CLIENT)
        self._open.append(span)
        try:
            yield
        except BaseException as error:
            if span.is_recording():
                span.set_status(api.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            if span.is_recording():  # else it has ended, at the first content
                span.end()
            self._open.remove(span)

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=api.set_span_in_context(self._open[-1]))
        return carrier

    def first_content(self) -> None:
        self._root.add_event("first content")
        if len(self._open) > 1 and self._open[-1].is_recording():
            self._open[-1].end()

    def end(self, story: Mapping[str, Any]) -> None:
        span = self._root
        for field, name in _ATTRIBUTES.items():
            if (value := story.get(field)) not in (None, ""):
                span.set_attribute(name, value)
        if story["outcome"] != "ok":
            span.set_status(api.StatusCode.ERROR, story["outcome"])
        span.end()


_ATTRIBUTES = {
    "request": "kvloop.request_id",
    "session": "kvloop.session",
    "route": "kvloop.route",
    "reason": "kvloop.reason",
    "outcome": "kvloop.outcome",
    "reused_tokens": "kvloop.reused_tokens",
    "pulled_tokens": "kvloop.pulled_tokens",
    "prefill": "kvloop.prefill_worker",
    "decode": "kvloop.decode_worker",
    "attempts": "kvloop.attempts",
    "kept": "kvloop.kept",
    # The name that OpenTelemetry's conventions give it.
    "prompt_tokens": "gen_ai.usage.input_tokens",
}


class Tracing:
    """Makes the traces of a process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvloop", __version__)

    def turn(self, headers: Mapping[bytes, bytes]) -> TurnTrace:
        """A trace for a request with these headers (lower-case names)."""
        return _RecordedTrace(self._tracer, trace_headers(headers))

    def close(self) -> None:
        """Send what is left. Blocks for some seconds if the collector does not answer."""
        self._provider.shutdown()


def exporting(settings: Settings) -> TracerProvider:
    """Sends to ``otlp_endpoint`` in the background. Raises ``SettingsError`` without the SDK."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise SettingsError(
            f"kvloop: otlp_endpoint is set, but {error.name} is not installed: "
            "pip install 'kvloop[otel]'"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "kvloop", "service.version": __version__}),
        sampler=ParentBased(TraceIdRatioBased(settings.trace_share)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=5))
    )
    return provider
