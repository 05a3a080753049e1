"""[io] vLLM's entry point (``vllm.general_plugins``): the turn event in answers that ask for it.

Stock vLLM 0.32.0 never returns ``kv_transfer_params`` in a stream of ``/v1/chat/completions``,
``/v1/completions`` or ``/v1/messages``, so decode's blocks would be pinned and nobody could use
them; ``/v1/responses`` returns them in its last event, but not the ids. This plugin wraps the
generators of these four routes. A request asks with ``"kvloop": 1`` inside its
``kv_transfer_params``; all others take the unchanged path. Requests with several choices, several
prompts or beam search have no single token sequence and get no event.

The asking key travels to the engine with the other transfer parameters, which ignores it. It makes
them non-empty, though, and a stock bidirectional decode worker pins the blocks of a request whose
parameters have neither flag set for ever: send it alone only to a worker with our connector.

In a whole answer the same object is put into the answer's ``kv_transfer_params`` under ``kvloop``;
so it is in the last event of a ``/v1/responses`` stream, which holds the whole answer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import ModuleType
from typing import Any

from worker_launch import cpu_tuning, vllm_compat
from worker_launch.stream_patch.capture import TurnCapture
from worker_launch.stream_patch.import_watch import when_imported
from worker_launch.transfer_keys import ASK, asks_for_event, split_handle

log = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
MESSAGE_STOP = "event: message_stop\n"
_WRAPPED = "__kvloop_wrapped__"

Events = AsyncGenerator[str, None]


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once.

    Raises RuntimeError, which stops the process at its start, when this vLLM is not a known one.
    """
    vllm_compat.check_version(vllm_compat.running_version())
    cpu_tuning.apply()  # does nothing unless the profile asks for it
    when_imported(vllm_compat.CHAT_MODULE, patch_chat)
    when_imported(vllm_compat.COMPLETION_MODULE, patch_completion)
    when_imported(vllm_compat.MESSAGES_MODULE, patch_messages)
    when_imported(vllm_compat.RESPONSES_MODULE, patch_responses)


def patch_chat(module: ModuleType) -> None:
    """Wrap the chat generators. Raises RuntimeError if they are not those that we know."""
    _patch(module, vllm_compat.CHAT_STREAM, _wrap_chat_stream)
    _patch(module, vllm_compat.CHAT_FULL, _wrap_chat_full)


def patch_completion(module: ModuleType) -> None:
    """Wrap the text completion generators; raises as ``patch_chat`` does."""
    _patch(module, vllm_compat.COMPLETION_STREAM, _wrap_completion_stream)
    _patch(module, vllm_compat.COMPLETION_FULL, _wrap_completion_full)


def patch_messages(module: ModuleType) -> None:
    """Wrap Anthropic's stream converter; raises as ``patch_chat`` does."""
    _patch(module, vllm_compat.MESSAGES_STREAM, _wrap_message_stream)


def patch_responses(module: ModuleType) -> None:
    """Wrap what makes a response whole; raises as ``patch_chat`` does."""
    _patch(module, vllm_compat.RESPONSES_FULL, _wrap_responses_full)


def _patch(
    module: ModuleType, target: vllm_compat.Target, wrap: Callable[[Any, Any], Callable[..., Any]]
) -> None:
    owner = getattr(module, target.class_name, None)
    original: Any = getattr(owner, target.method, None)
    if getattr(original, _WRAPPED, False):
        return
    vllm_compat.check_target(target, original)
    wrapper = functools.wraps(original)(wrap(original, owner))
    setattr(wrapper, _WRAPPED, True)
    setattr(owner, target.method, wrapper)


def _wrap_chat_stream(original: Any, owner: Any) -> Callable[..., Events]:
    def chat_completion_stream_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Events:
        # A subclass speaks another protocol: vLLM's Anthropic and Cohere endpoints read this stream
        # themselves, and the Anthropic one takes a comment for an error. There the capture goes
        # along, and the converter's wrapper writes the event.
        converted = type(self) is not owner
        if not _wants_event(request) or (converted and not _writes_event(type(self))):
            events: Events = original(self, request, result_generator, *args, **kwargs)
            return events
        capture = TurnCapture(delta=True)
        tap = _Tap(result_generator, capture.observe)
        events = original(self, request, tap, *args, **kwargs)
        if converted:
            return _Captured(events, capture)  # type: ignore[return-value]  # only iterated over
        return _with_event(events, capture, lambda event: event == DONE)

    return chat_completion_stream_generator


def _wrap_completion_stream(original: Any, owner: Any) -> Callable[..., Events]:
    def completion_stream_generator(
        self: Any,
        request: Any,
        engine_inputs: Any,
        result_generator: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Events:
        if not _wants_event(request) or len(engine_inputs) != 1:
            events: Events = original(
                self, request, engine_inputs, result_generator, *args, **kwargs
            )
            return events
        capture = TurnCapture(delta=True)
        # Items are (index of the prompt, result) here.
        tap = _Tap(result_generator, lambda item: capture.observe(item[1]))
        events = original(self, request, engine_inputs, tap, *args, **kwargs)
        return _with_event(events, capture, lambda event: event == DONE)

    return completion_stream_generator


def _wrap_chat_full(original: Any, owner: Any) -> Callable[..., Any]:
    def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _wants_event(request):
            result_generator = _Tap(result_generator, _describe_in_place)
        return original(self, request, result_generator, *args, **kwargs)

    return chat_completion_full_generator


def _wrap_completion_full(original: Any, owner: Any) -> Callable[..., Any]:
    def request_output_to_completion_response(
        self: Any, final_res_batch: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _wants_event(request) and len(final_res_batch) == 1:
            _describe_in_place(final_res_batch[0])
        return original(self, final_res_batch, request, *args, **kwargs)

    return request_output_to_completion_response


def _wrap_message_stream(original: Any, owner: Any) -> Callable[..., Events]:
    def message_stream_converter(self: Any, generator: Any) -> Events:
        events: Events = original(self, generator)
        if not isinstance(generator, _Captured):
            return events
        return _with_event(events, generator.capture, lambda event: event.startswith(MESSAGE_STOP))

    return message_stream_converter


def _wrap_responses_full(original: Any, owner: Any) -> Callable[..., Any]:
    def responses_full_generator(
        self: Any,
        request: Any,
        sampling_params: Any,
        result_generator: Any,
        context: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Streamed requests come here with an empty generator, when the context is complete.
        if asks_for_event(request.kv_transfer_params):
            result_generator = _AtEnd(result_generator, lambda: _describe_context(context))
        return original(self, request, sampling_params, result_generator, context, *args, **kwargs)

    return responses_full_generator


def _writes_event(handler: type) -> bool:
    """Is this a chat subclass whose stream converter we have wrapped?"""
    return getattr(getattr(handler, vllm_compat.MESSAGES_STREAM.method, None), _WRAPPED, False)


def _wants_event(request: Any) -> bool:
    return (
        asks_for_event(request.kv_transfer_params)
        and (request.n or 1) == 1
        and not request.use_beam_search
    )


class _Tap:
    """The engine's results, shown to ``look`` on their way.

    A plain iterator and not an async generator: closing, cancelling and dropping it then act on the
    engine's own generator exactly as without us, and that is what aborts a request whose client
    has gone.
    """

    __slots__ = ("_look", "_source")

    def __init__(self, source: AsyncIterator[Any], look: Callable[[Any], None]) -> None:
        self._source = source
        self._look = look

    def __aiter__(self) -> _Tap:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._source)
        self._look(item)
        return item


class _Captured:
    """A chat stream that another protocol's converter reads, and what was seen going into it."""

    __slots__ = ("_source", "capture")

    def __init__(self, source: Events, capture: TurnCapture) -> None:
        self._source = source
        self.capture = capture

    def __aiter__(self) -> Events:
        return self._source


class _AtEnd:
    """An iterator, and a call when it has given its last item."""

    __slots__ = ("_call", "_source")

    def __init__(self, source: AsyncIterator[Any], call: Callable[[], None]) -> None:
        self._source = source
        self._call = call

    def __aiter__(self) -> _AtEnd:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._source)
        except StopAsyncIteration:
            self._call()
            raise


async def _with_event(
    events: Events, capture: TurnCapture, is_end: Callable[[str], bool]
) -> Events:
    async with aclosing(events):
        async for event in events:
            if is_end(event) and capture.complete:
                try:
                    extra = capture.event()
                except (TypeError, ValueError):
                    # The client's answer is whole and right without it; only reuse is lost.
                    log.exception("kvloop: the turn event could not be written")
                else:
                    yield extra
            yield event


def _describe_in_place(result: Any) -> None:
    """Put the turn's object into the result from which vLLM builds the whole answer."""
    if not result.finished:
        return
    capture = TurnCapture(delta=False)
    capture.observe(result)
    if capture.complete:
        handle, _ = split_handle(result.kv_transfer_params)
        result.kv_transfer_params = {**(handle or {}), ASK: capture.described()}


def _describe_context(context: Any) -> None:
    """The same for ``/v1/responses``, which gathers one generation in a context.

    Contexts in which the worker runs tools itself gather several; they stay undescribed.
    """
    result = getattr(context, "final_output", None)
    if result is None or not result.finished or len(result.outputs) != 1:
        return
    capture = TurnCapture(delta=False)
    capture.observe(result)
    if capture.complete:
        handle, _ = split_handle(context.kv_transfer_params)
        context.kv_transfer_params = {**(handle or {}), ASK: capture.described()}
