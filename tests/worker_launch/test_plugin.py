"""The wrapped generators, against stand-ins with the real signatures."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType
from typing import Any

import pytest

from tests.worker_launch.vllm_stand_in import (
    DONE,
    Output,
    Request,
    ResponsesContext,
    Result,
    engine,
    serving_module,
)
from worker_launch import cpu_tuning, vllm_compat
from worker_launch.stream_patch import plugin

ASKED = {"kvloop": 1, "do_remote_prefill": True}
HANDLE = {"remote_block_ids": [[1, 2]], "do_remote_decode": True}
FINISHED = (
    Result([Output([7])]),
    Result([Output([8], "stop")], True, HANDLE),
)


@pytest.fixture
def module() -> ModuleType:
    made = serving_module()
    plugin.patch_chat(made)
    plugin.patch_completion(made)
    return made


async def chat_stream(module: ModuleType, request: Request, *results: Any) -> list[str]:
    serving = module.OpenAIServingChat()
    events = serving.chat_completion_stream_generator(
        request, engine(*results), "id", "m", [], None, None, mm_token_counts=None
    )
    return [event async for event in events]


async def completion_stream(
    module: ModuleType, request: Request, *results: Any, prompts: int = 1
) -> list[str]:
    serving = module.OpenAIServingCompletion()
    events = serving.completion_stream_generator(
        request,
        [{}] * prompts,
        engine(*((0, result) for result in results)),
        "id",
        0,
        "m",
        num_prompts=prompts,
        tokenizer=None,
        request_metadata=None,
    )
    return [event async for event in events]


@pytest.mark.parametrize("stream", [chat_stream, completion_stream])
async def test_one_event_just_before_done(module: ModuleType, stream: Any) -> None:
    """A request that asks gets all its ids and its handle in one event before the end."""
    events = await stream(module, Request(ASKED), *FINISHED)
    assert events[-1] == DONE
    assert json.loads(events[-2].removeprefix(": kvloop ")) == {
        "v": 1,
        "kv_transfer_params": HANDLE,
        "token_ids": [7, 8],
        "prompt_tokens": 3,
        "finish_reason": "stop",
    }
    assert [event for event in events if event.startswith(":")] == [events[-2]]


@pytest.mark.parametrize("stream", [chat_stream, completion_stream])
@pytest.mark.parametrize(
    "request_",
    [
        Request(None),
        Request({"do_remote_prefill": True}),
        Request(ASKED, n=2),
        Request(ASKED, use_beam_search=True),
    ],
)
async def test_all_others_get_what_vllm_makes(
    module: ModuleType, stream: Any, request_: Request
) -> None:
    """Not asked, several choices, beam search: byte for byte the unpatched stream."""
    patched = await stream(module, request_, *FINISHED)
    assert patched == await stream(serving_module(), request_, *FINISHED)


async def test_several_prompts_get_no_event(module: ModuleType) -> None:
    """Several prompts in one text completion have no single token sequence."""
    events = await completion_stream(module, Request(ASKED), *FINISHED, prompts=2)
    assert not [event for event in events if event.startswith(":")]


async def test_another_protocols_endpoint_gets_no_event(module: ModuleType) -> None:
    """vLLM's Anthropic endpoint is a subclass that parses the stream and knows no comments."""
    module.OpenAIServingChat = type("AnthropicServingMessages", (module.OpenAIServingChat,), {})
    events = await chat_stream(module, Request(ASKED), *FINISHED)
    assert not [event for event in events if event.startswith(":")]


async def test_a_stop_string_leaves_a_null_handle(module: ModuleType) -> None:
    """vLLM returns no handle then; the event still shows that the plugin is there."""
    events = await chat_stream(module, Request(ASKED), Result([Output([7], "stop")], True))
    assert json.loads(events[-2].removeprefix(": kvloop "))["kv_transfer_params"] is None


async def test_an_error_has_no_event(module: ModuleType) -> None:
    """A failed request ends as on an unpatched vLLM."""
    failed = (Result([Output([7])]), Result([Output([], "error")], True))
    events = await chat_stream(module, Request(ASKED), *failed)
    assert events == await chat_stream(serving_module(), Request(ASKED), *failed)


async def test_a_handle_without_a_json_form_costs_only_the_event(module: ModuleType) -> None:
    """The client's answer ends as usual when the event cannot be written."""
    odd = Result([Output([7], "stop")], True, {"remote_block_ids": {1, 2}})
    events = await chat_stream(module, Request(ASKED), odd)
    assert events[-1] == DONE
    assert not [event for event in events if event.startswith(":")]


async def test_a_client_that_leaves_stops_the_engine(module: ModuleType) -> None:
    """Closing or cancelling the wrapped stream closes the engine's generator."""
    closed = asyncio.Event()

    async def endless() -> Any:
        try:
            while True:
                yield Result([Output([7])])
                await asyncio.sleep(0)
        finally:
            closed.set()

    serving = module.OpenAIServingChat()
    events = serving.chat_completion_stream_generator(
        Request(ASKED), endless(), "id", "m", [], None, None
    )
    await anext(events)
    await events.aclose()
    del events
    await asyncio.wait_for(closed.wait(), 2)


async def test_a_whole_answer_carries_the_ids(module: ModuleType) -> None:
    """Not streamed: the object stands beside the handle, in both kinds of completion."""
    described = {"v": 1, "token_ids": [7, 8], "prompt_tokens": 3, "finish_reason": "stop"}
    result = Result([Output([7, 8], "stop")], True, dict(HANDLE))
    answer = await module.OpenAIServingChat().chat_completion_full_generator(
        Request(ASKED), engine(result), "id", "m", [], None, None, parser=None
    )
    assert answer == {"kv_transfer_params": {**HANDLE, "kvloop": described}}
    result = Result([Output([7, 8], "stop")], True, {"kvloop_pin_refused": "over_share"})
    answer = module.OpenAIServingCompletion().request_output_to_completion_response(
        [result], Request(ASKED), "id", 0, "m", None, None
    )
    assert answer == {"kv_transfer_params": {"kvloop": {**described, "pin_refused": "over_share"}}}


async def test_a_whole_answer_that_nobody_asked_for_is_unchanged(module: ModuleType) -> None:
    """Without the asking key the handle is what the engine returned."""
    result = Result([Output([7, 8], "stop")], True, dict(HANDLE))
    answer = await module.OpenAIServingChat().chat_completion_full_generator(
        Request({"do_remote_prefill": True}), engine(result), "id", "m", [], None, None
    )
    assert answer == {"kv_transfer_params": HANDLE}


async def test_patching_twice_wraps_once(module: ModuleType) -> None:
    """A second registration changes nothing: there is still one event."""
    plugin.patch_chat(module)
    events = await chat_stream(module, Request(ASKED), *FINISHED)
    assert len([event for event in events if event.startswith(":")]) == 1


def test_an_unknown_signature_is_refused() -> None:
    """A changed parameter list stops the start and says what differs."""
    module = serving_module()

    async def changed(self: Any, request: Any, results: Any) -> Any:
        yield ""

    module.OpenAIServingChat.chat_completion_stream_generator = changed
    with pytest.raises(RuntimeError, match=r"takes \(self, request, results\), not \(self,"):
        plugin.patch_chat(module)


@pytest.mark.parametrize("problem", ["gone", "plain"])
def test_a_missing_or_different_function_is_refused(problem: str) -> None:
    """No such method, or one that is no async generator: refused with its name."""
    module = serving_module()
    if problem == "gone":
        del module.OpenAIServingCompletion.completion_stream_generator
    else:
        module.OpenAIServingCompletion.completion_stream_generator = lambda self: None
    with pytest.raises(RuntimeError, match=r"OpenAIServingCompletion\.completion_stream_generator"):
        plugin.patch_completion(module)


def test_register_refuses_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is checked first, before anything is patched."""
    monkeypatch.setattr(vllm_compat, "running_version", lambda: "0.33.0")
    with pytest.raises(RuntimeError, match=r"0\.32\.x.*0\.33\.0"):
        plugin.register()


def test_register_imports_no_serving_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine process registering only leaves two names to watch for."""
    watched: list[str] = []
    monkeypatch.delenv(cpu_tuning.SWITCH, raising=False)
    monkeypatch.setattr(vllm_compat, "running_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(plugin, "when_imported", lambda name, callback: watched.append(name))
    plugin.register()
    assert watched == [
        vllm_compat.CHAT_MODULE,
        vllm_compat.COMPLETION_MODULE,
        vllm_compat.MESSAGES_MODULE,
        vllm_compat.RESPONSES_MODULE,
    ]


async def message_stream(module: ModuleType, request: Request, *results: Any) -> list[str]:
    serving = module.AnthropicServingMessages()
    chat = serving.chat_completion_stream_generator(
        request, engine(*results), "id", "m", [], None, None, mm_token_counts=None
    )
    return [event async for event in serving.message_stream_converter(chat)]


async def test_messages_get_the_event_just_before_their_last(module: ModuleType) -> None:
    """Anthropic's converter sees no comment; the client's stream has one, before message_stop."""
    plugin.patch_messages(module)
    events = await message_stream(module, Request(ASKED), *FINISHED)
    assert not any("error" in event for event in events)
    assert events[-1].startswith("event: message_stop\n")
    assert json.loads(events[-2].removeprefix(": kvloop "))["token_ids"] == [7, 8]
    plain = await message_stream(module, Request({"do_remote_prefill": True}), *FINISHED)
    assert plain == events[:-2] + events[-1:]


async def test_messages_that_failed_in_the_engine_get_no_event(module: ModuleType) -> None:
    """The converter's error stands alone."""
    plugin.patch_messages(module)
    failed = Result([Output([], "error")], True)
    events = await message_stream(module, Request(ASKED), failed)
    assert [event for event in events if event.startswith(":")] == []
    assert "error" in events[-1]


async def test_messages_are_untouched_while_their_converter_is_not_wrapped(
    module: ModuleType,
) -> None:
    """The chat patch alone must not put a comment in front of a converter that cannot read it."""
    events = await message_stream(module, Request(ASKED), *FINISHED)
    assert not any("kvloop" in event or "error" in event for event in events)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_has_its_ids_beside_the_handle(module: ModuleType, streamed: bool) -> None:
    """Streamed or not: vLLM builds the whole response in the same place."""
    plugin.patch_responses(module)
    context = ResponsesContext()

    async def generate() -> Any:
        for result in FINISHED:
            context.append_output(result)
            yield context

    results = generate()
    if streamed:
        async for _ in results:
            pass
        results = engine()
    serving = module.OpenAIServingResponses()
    answer = await serving.responses_full_generator(
        Request(ASKED), None, results, context, "m", None, None
    )
    described = answer["kv_transfer_params"].pop("kvloop")
    assert answer["kv_transfer_params"] == HANDLE
    assert described["token_ids"] == [7, 8]
    assert described["finish_reason"] == "stop"


async def test_a_response_that_did_not_ask_is_unchanged(module: ModuleType) -> None:
    """Nothing of ours in it."""
    plugin.patch_responses(module)
    context = ResponsesContext()
    context.append_output(FINISHED[-1])
    answer = await module.OpenAIServingResponses().responses_full_generator(
        Request(None), None, engine(), context, "m", None, None
    )
    assert answer == {"kv_transfer_params": HANDLE}
