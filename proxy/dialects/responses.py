"""[pure] ``POST /v1/responses``: OpenAI's responses, which the workers speak natively.

Decode serves the client's own request. Its handle comes in the answer, or in the stream's last
event, ``response.completed``; our plugin puts the turn's ids beside it.

A stored response lives in the memory of the decode worker that made it (vLLM:
``VLLM_ENABLE_RESPONSES_API_STORE``), so later requests that name it must find that worker. The
proxy chooses the id, and the id says where: a random part and a digest of it with the tenant and
the worker. Any proxy finds the worker by trying its few workers, nothing is stored, and the id
leads another tenant nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from secrets import token_hex
from types import MappingProxyType
from typing import Any, ClassVar

import orjson

from proxy.dialects import checks
from proxy.dialects.base import Dialect, dicts, parsed
from proxy.errors import ClientError
from proxy.relay.sse import event_data, split_events
from proxy.session.identity import Caller
from proxy.turn import wire
from proxy.turn.reasons import Reason

_FIELDS: dict[str, checks.Rule] = {
    **checks.OPENAI_SAMPLING,
    "instructions": checks.TEXT,
    "max_output_tokens": checks.POSITIVE,
    "previous_response_id": checks.TEXT,
    "background": checks.BOOLEAN,
    "store": checks.BOOLEAN,
    "metadata": checks.OBJECT,
    "reasoning": checks.OBJECT,
    "text": checks.OBJECT,
    "tools": (checks.objects, "must be an array of objects"),
    "tool_choice": (checks.of(str, dict), "must be a string or an object"),
    "parallel_tool_calls": checks.BOOLEAN,
    "top_logprobs": checks.COUNT,
    "include": (checks.of(list), "must be an array"),
}
_CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})
_TEXT_PARTS = frozenset(
    {"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"}
)
_TEXT_ITEMS = frozenset({"function_call", "reasoning", "custom_tool_call"})
_OUTPUT_ITEMS = frozenset({"function_call_output", "custom_tool_call_output"})
_LAST_EVENT = b"event: response.completed\n"
_RANDOM_DIGITS = 24
_DIGEST_DIGITS = 32


class Responses(Dialect):
    """OpenAI's responses."""

    name: ClassVar[str] = "responses"
    path: ClassVar[str] = "/v1/responses"
    render_path: ClassVar[str] = "/v1/responses/render"
    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)
    only_decode: ClassVar[tuple[str, ...]] = (*wire.ONLY_DECODE, "include", "request_id")
    prefill_adds: ClassVar[Mapping[str, Any]] = MappingProxyType({"store": False})
    returns_ids: ClassVar[bool] = False

    last_events: ClassVar[tuple[bytes, ...]] = (
        b"event: response.output_text.done\n",
        b"event: response.content_part.done\n",
        b"event: response.output_item.done\n",
        _LAST_EVENT,
    )

    def check(self, body: dict[str, Any]) -> None:
        checks.check_model(body)
        checks.require(body, "input")
        given = body["input"]
        if not isinstance(given, str) and not (given and checks.objects(given)):
            raise checks.wrong("input", "must be a string or a non-empty array of objects")
        checks.check_fields(body, _FIELDS)

    def alone(self, body: Mapping[str, Any]) -> Reason | None:
        if body.get("previous_response_id"):
            return Reason.PREVIOUS_RESPONSE
        if body.get("background"):
            return Reason.BACKGROUND
        if any(tool.get("type") not in _CLIENT_TOOLS for tool in dicts(body.get("tools"))):
            # The worker then runs several generations with one set of transfer parameters.
            return Reason.BUILTIN_TOOLS
        return None

    def has_media(self, body: Mapping[str, Any]) -> bool:
        return any(map(_holds_media, dicts(body["input"])))

    def cuts_prompt(self, body: Mapping[str, Any]) -> bool:
        return body.get("truncation") not in (None, "disabled")

    def bound_to(self, body: Mapping[str, Any], caller: Caller, decodes: list[str]) -> str:
        named = body.get("previous_response_id")
        return worker_of(str(named), caller, decodes) if named else ""

    def shared_fields(self, caller: Caller, worker: str) -> dict[str, Any]:
        return {"request_id": new_response_id(caller, worker)}  # here the id is in the body

    def adapt_decode_leg(self, leg: dict[str, Any], caller: Caller, worker: str) -> None:
        leg["request_id"] = new_response_id(caller, worker)

    def ending_of_answer(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> wire.Ending:
        return wire.ending_of_answer({}, answer)

    def client_answer(self, body: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return wire.without_transfer(answer)

    def stream_error(self, data: bytes) -> dict[str, Any] | None:
        event = parsed(data) if b'"error"' in data or b'"response.failed"' in data else None
        if event is None or event.get("type") not in ("error", "response.failed"):
            return event.get("error") if event is not None and "type" not in event else None
        return event

    def carries_content(self, data: bytes) -> bool:
        event = parsed(data)
        if event is None:
            return True
        if event.get("type") == "response.output_item.added":
            item = event.get("item")
            return not isinstance(item, dict) or item.get("type") not in ("message", "reasoning")
        return event.get("type") not in _BEFORE_CONTENT

    def may_end(self, block: bytes) -> bool:
        return _LAST_EVENT in block

    def take_ending(self, block: bytes) -> tuple[bytes, wire.Ending]:
        rest: list[bytes] = []
        ending = wire.Ending()
        for event in split_events(block):
            data = event_data(event) if event.startswith(_LAST_EVENT) else None
            last = parsed(data) if data is not None else None
            response = last.get("response") if last is not None else None
            if last is None or not isinstance(response, dict):
                rest.append(event)
                continue
            ending = wire.ending_of_answer({}, response)
            last["response"] = wire.without_transfer(response)
            rest.append(_LAST_EVENT + b"data: " + orjson.dumps(last) + b"\n\n")
        return b"".join(rest), ending

    def reports_error(self, block: bytes) -> bool:
        return block.startswith((b"event: error\n", b"event: response.failed\n", b'data: {"error"'))

    def broken_stream(self) -> bytes:
        event = {
            "type": "error",
            "code": "worker_failed",
            "message": "The model worker stopped answering.",
            "param": None,
            "sequence_number": 0,
        }
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


_BEFORE_CONTENT = frozenset(
    {
        "response.queued",
        "response.created",
        "response.in_progress",
        "response.content_part.added",
        "response.reasoning_part.added",
    }
)


def new_response_id(caller: Caller, worker: str) -> str:
    """An id for a response that ``worker`` makes."""
    random = token_hex(_RANDOM_DIGITS // 2)
    return f"resp_{random}{_digest(random, caller, worker)}"


def worker_of(response_id: str, caller: Caller, workers: list[str]) -> str:
    """The worker that made a response. Raises ``ClientError`` (404): not this caller's, or gone."""
    random = response_id.removeprefix("resp_")[:_RANDOM_DIGITS]
    for worker in workers:
        if response_id == f"resp_{random}{_digest(random, caller, worker)}":
            return worker
    raise ClientError(
        "Response with this id not found.",
        status=404,
        param="previous_response_id",
        code="response_not_found",
    )


def _digest(random: str, caller: Caller, worker: str) -> str:
    text = "\0".join((random, caller.tenant, worker)).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=_DIGEST_DIGITS // 2, person=b"kvloop response").hexdigest()


def _holds_media(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    if kind in _TEXT_ITEMS:
        return False
    content = item.get("output" if kind in _OUTPUT_ITEMS else "content")
    if kind != "message" and kind not in _OUTPUT_ITEMS:
        return True
    return any(part.get("type") not in _TEXT_PARTS for part in dicts(content))


RESPONSES = Responses()
