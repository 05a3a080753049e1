"""[io] vLLM's entry point (``vllm.general_plugins``): the turn event in answers that ask for it.

Stock vLLM 0.32.0 never returns ``kv_transfer_params`` in a stream of ``/v1/chat/completions`` or
``/v1/completions``, so decode's blocks would be pinned and nobody could use them. This plugin wraps
the two generators. A request asks with ``"kvloop": 1`` inside its ``kv_transfer_params``; all
others take the unchanged path. Requests with several choices, several prompts or beam search have
no single token sequence and get no event.

The asking key travels to the engine with the other transfer parameters, which ignores it. It makes
them non-empty, though, and a stock bidirectional decode worker pins the blocks of a request whose
parameters have neither flag set for ever: send it alone only to a worker with our connector.

In a whole answer the same object is put into the answer's ``kv_transfer_params`` under ``kvloop``.
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


def patch_chat(module: ModuleType) -> None:
    """Wrap the chat generators. Raises RuntimeError if they are not those that we know."""
    _patch(module, vllm_compat.CHAT_STREAM, _wrap_chat_stream)
    _patch(module, vllm_compat.CHAT_FULL, _wrap_chat_full)


def patch_completion(module: ModuleType) -> None:
    """Wrap the text completion generators; raises as ``patch_chat`` does."""
    _patch(module, vllm_compat.COMPLETION_STREAM, _wrap_completion_stream)
    _patch(module, vllm_compat.COMPLETION_FULL, _wrap_completion_full)


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
        # themselves, and the Anthropic one takes a comment for an error.
        if not _wants_event(request) or type(self) is not owner:
            events: Events = original(self, request, result_generator, *args, **kwargs)
            return events
        capture = TurnCapture(delta=True)
        tap = _Tap(result_generator, capture.observe)
        return _with_event(original(self, request, tap, *args, **kwargs), capture)

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
        return _with_event(original(self, request, engine_inputs, tap, *args, **kwargs), capture)

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


async def _with_event(events: Events, capture: TurnCapture) -> Events:
    async with aclosing(events):
        async for event in events:
            if event == DONE and capture.complete:
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
