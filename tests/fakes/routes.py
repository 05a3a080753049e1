"""The fake worker's other generating routes: completions, messages, responses.

Shapes are those of vLLM 0.32.0; the tokens, the blocks and the misbehaviour are the fake's own.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from tests.fakes.worker import FakeWorker

TEXT_START = 320


def text_ids(prompt: str) -> list[int]:
    """The fake's tokeniser for plain text."""
    return [TEXT_START, *prompt.encode()]


_WIDTHS = {"low": 1, "medium": 2, "high": 3, "xhigh": 4, "max": 4}
"""The fake's template shows the effort: all at different lengths, but for the last two."""


def chat_of_messages(body: dict[str, Any], disabled: str = "none") -> dict[str, Any]:
    """An Anthropic request as the chat request that the fake's template takes. ``disabled``: the
    effort that stands for thinking switched off."""
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        text = system if isinstance(system, str) else "".join(b["text"] for b in system)
        messages.append({"role": "system", "content": text})
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(
                b["text"] if isinstance(b, dict) and "text" in b else json.dumps(b) for b in content
            )
        messages.append({"role": message["role"], "content": content})
    effort = (body.get("output_config") or {}).get("effort")
    if (body.get("thinking") or {}).get("type") == "disabled":
        effort = disabled
    if effort:
        shown = f"effort {effort}".ljust(20 + _WIDTHS.get(effort, 0), ".")
        messages.append({"role": "system", "content": shown})
    return {"messages": messages, "tools": body.get("tools")}


def chat_of_response(body: dict[str, Any]) -> dict[str, Any]:
    """A Responses request as the chat request that the fake's template takes."""
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = (
        [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    )
    for item in items:
        content = item.get("content") or item.get("output") or item.get("arguments") or ""
        messages.append({"role": item.get("role", "tool"), "content": content})
    return {"messages": messages, "tools": body.get("tools")}


def cached(params: dict[str, Any] | None) -> int:
    """What decode reports as cached: prefill's own word (vLLM's output processor)."""
    return int((params or {}).get("remote_prefill_cached_tokens") or 0)


class Streamed:
    """An event stream in the making."""

    def __init__(self, worker: FakeWorker, request: web.Request) -> None:
        self.worker = worker
        self.request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8"}
        )

    async def begin(self) -> None:
        await self.response.prepare(self.request)

    async def raw(self, data: bytes) -> None:
        await self.response.write(data)

    async def data(self, chunk: dict[str, Any]) -> None:
        await self.raw(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def event(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, **fields}
        await self.raw(
            f"event: {kind}\n".encode() + b"data: " + json.dumps(event).encode() + b"\n\n"
        )

    async def letters(self) -> Any:
        """The answer's letters, with the fake's delays and its death."""
        knobs = self.worker.knobs
        for number, letter in enumerate(knobs.answer):
            if knobs.die_after_chunks == number:
                assert self.request.transport is not None
                self.request.transport.abort()
                return
            if knobs.chunk_delay:
                await asyncio.sleep(knobs.chunk_delay)
            yield letter

    @property
    def dead(self) -> bool:
        return self.worker.knobs.die_after_chunks is not None


async def completion(
    worker: FakeWorker, request: web.Request, body: dict[str, Any], prompt: list[int]
) -> web.StreamResponse:
    """``/v1/completions`` on decode."""
    params, output, answer = body.get("kv_transfer_params"), worker.output(), worker.knobs.answer
    base = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": body["model"]}

    def choice(text: str, finish: str | None) -> dict[str, Any]:
        rest = {"finish_reason": finish, "stop_reason": None}
        return {"index": 0, "text": text, "logprobs": None, **rest}

    usage = worker.usage(prompt, output, cached(params))
    if not body.get("stream"):
        handle = worker.kept(params, prompt, output)
        count = len(body["prompt"]) if isinstance(body["prompt"][0], (list, str)) else 1
        choices = [
            {**choice(answer, worker.knobs.finish_reason), "index": i}
            for i in range(1 if isinstance(body["prompt"], str) else count)
        ]
        return web.json_response(
            {
                **base,
                "choices": choices,
                "usage": usage,
                "kv_transfer_params": worker.described(params, handle, prompt, output),
                "ec_transfer_params": None,
            }
        )
    stream = Streamed(worker, request)
    await stream.begin()
    if worker.error_in_stream():
        await stream.data({"error": {"message": "Internal server error", "code": 500}})
        await stream.raw(b"data: [DONE]\n\n")
        return stream.response
    async for letter in stream.letters():
        await stream.data({**base, "choices": [choice(letter, None)]})
    if stream.dead:
        return stream.response
    await stream.data({**base, "choices": [choice("", worker.knobs.finish_reason)]})
    if (body.get("stream_options") or {}).get("include_usage"):
        await stream.data({**base, "choices": [], "usage": usage})
    handle = worker.kept(params, prompt, output)
    await stream.raw(worker.turn_event(params, handle, prompt, output) + b"data: [DONE]\n\n")
    return stream.response


async def message(
    worker: FakeWorker, request: web.Request, body: dict[str, Any], prompt: list[int]
) -> web.StreamResponse:
    """``/v1/messages`` on decode."""
    params, output, answer = body.get("kv_transfer_params"), worker.output(), worker.knobs.answer
    usage = {
        "input_tokens": len(prompt) - cached(params),
        "output_tokens": len(output),
        "cache_read_input_tokens": cached(params),
    }
    base = {"id": "chatcmpl-x", "type": "message", "role": "assistant", "model": body["model"]}
    stop = "end_turn" if worker.knobs.finish_reason == "stop" else "max_tokens"
    if not body.get("stream"):
        handle = worker.kept(params, prompt, output)
        content = [{"type": "text", "text": answer}]
        whole = {**base, "content": content, "stop_reason": stop, "usage": usage}
        described = worker.described(params, handle, prompt, output)
        if described is not None:  # the route leaves out what is null
            whole["kv_transfer_params"] = described
        return web.json_response(whole)
    stream = Streamed(worker, request)
    await stream.begin()
    await stream.event("message_start", message={**base, "content": [], "usage": usage})
    if worker.error_in_stream():
        await stream.event("error", error={"type": "internal_error", "message": "bad chunk"})
        return stream.response
    await stream.event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    async for letter in stream.letters():
        delta = {"type": "text_delta", "text": letter}
        await stream.event("content_block_delta", index=0, delta=delta)
    if stream.dead:
        return stream.response
    await stream.event("content_block_stop", index=0)
    await stream.event("message_delta", delta={"stop_reason": stop}, usage=usage)
    handle = worker.kept(params, prompt, output)
    await stream.raw(worker.turn_event(params, handle, prompt, output))
    await stream.event("message_stop")
    return stream.response


async def response(
    worker: FakeWorker, request: web.Request, body: dict[str, Any], prompt: list[int]
) -> web.StreamResponse:
    """``/v1/responses`` on decode, with its store."""
    params, output, answer = body.get("kv_transfer_params"), worker.output(), worker.knobs.answer
    previous = body.get("previous_response_id")
    if previous and previous not in worker.stored_responses:
        return web.json_response(
            {"error": {"message": "not found", "type": "invalid_request_error", "code": 404}},
            status=404,
        )
    base = {
        "id": body.get("request_id", "resp_x"),
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        "previous_response_id": previous,
        "output": [],
        "usage": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }

    def whole() -> dict[str, Any]:
        handle = worker.kept(params, prompt, output)
        text = {"type": "output_text", "text": answer, "annotations": []}
        item = {"id": "msg_x", "type": "message", "role": "assistant", "content": [text]}
        made = {
            **base,
            "status": "completed",
            "output": [item],
            "usage": {
                "input_tokens": len(prompt),
                "output_tokens": len(output),
                "total_tokens": len(prompt) + len(output),
                "input_tokens_details": {"cached_tokens": cached(params)},
            },
            "kv_transfer_params": worker.described(params, handle, prompt, output),
        }
        if body.get("store", True):
            worker.stored_responses[made["id"]] = made  # with the handle, as vLLM does
        return made

    if not body.get("stream"):
        return web.json_response(whole())
    stream = Streamed(worker, request)
    await stream.begin()
    await stream.event("response.created", response={**base, "status": "in_progress"})
    await stream.event("response.in_progress", response={**base, "status": "in_progress"})
    if worker.error_in_stream():
        assert request.transport is not None
        request.transport.abort()  # vLLM's own error event does not pass its validation
        return stream.response
    item = {"id": "msg_x", "type": "message", "role": "assistant", "content": []}
    await stream.event("response.output_item.added", output_index=0, item=item)
    place = {"output_index": 0, "content_index": 0, "item_id": "msg_x"}
    part = {"type": "output_text", "text": "", "annotations": []}
    await stream.event("response.content_part.added", **place, part=part)
    async for letter in stream.letters():
        await stream.event("response.output_text.delta", **place, delta=letter)
    if stream.dead:
        return stream.response
    await stream.event("response.output_text.done", **place, text=answer)
    await stream.event("response.completed", response=whole())
    return stream.response
