"""[pure] ``POST /v1/messages``: Anthropic's API, which the workers speak natively.

Decode serves the client's own request, so tools, thinking and streamed events are vLLM's; only the
ids come from ``/v1/messages/render``. A streamed answer carries decode's word in our plugin's event
just before ``message_stop``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.dialects import checks
from proxy.dialects.base import Dialect, dicts, parsed
from proxy.errors import ErrorParts, anthropic_shape
from proxy.relay.sse import TURN_EVENT_PREFIX
from proxy.turn import wire
from proxy.turn.reasons import Reason

_ROLES = ("user", "assistant", "system")
_TEXT_BLOCKS = frozenset(
    {
        "text", "thinking", "redacted_thinking", "tool_use", "tool_reference", "tool_addition",
        "tool_removal",
    }
)  # fmt: skip
_FIELDS: dict[str, checks.Rule] = {
    **checks.SAMPLING,
    "max_tokens": checks.POSITIVE,
    "stop_sequences": (
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        "must be an array of strings",
    ),
    "system": (
        lambda value: isinstance(value, str) or checks.objects(value),
        "must be a string or an array of blocks",
    ),
    "metadata": checks.OBJECT,
    "thinking": checks.OBJECT,
    "output_config": checks.OBJECT,
    "tools": (checks.objects, "must be an array of objects"),
    "tool_choice": checks.OBJECT,
}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_STOP_EVENT = b"event: message_stop\n"


class Messages(Dialect):
    """Anthropic's messages."""

    name: ClassVar[str] = "messages"
    path: ClassVar[str] = "/v1/messages"
    render_path: ClassVar[str] = "/v1/messages/render"
    count_path: ClassVar[str] = "/v1/messages/count_tokens"
    only_decode: ClassVar[tuple[str, ...]] = (*wire.ONLY_DECODE, "stop_sequences")

    last_events: ClassVar[tuple[bytes, ...]] = (
        TURN_EVENT_PREFIX,
        b"event: content_block_stop\n",
        b"event: message_delta\n",
        _STOP_EVENT,
    )

    def check(self, body: dict[str, Any]) -> None:
        checks.check_model(body)
        checks.require(body, "max_tokens")
        checks.require(body, "messages")
        checks.check_messages(body["messages"], roles=_ROLES)
        for index, message in enumerate(body["messages"]):
            if message.get("content") is None:
                raise checks.wrong(f"messages[{index}].content", "is required")
        checks.check_fields(body, _FIELDS)

    def alone(self, body: Mapping[str, Any]) -> Reason | None:
        return None

    def has_media(self, body: Mapping[str, Any]) -> bool:
        return any(_holds_media(message.get("content")) for message in dicts(body["messages"]))

    def render_requests(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """With thinking switched off the route asks the template for effort "none" or "low",
        whichever works for the model, or for the one that was set when the worker was started; the
        render route always says "none"."""
        leg = super().render_requests(body)[0]
        thinking = body.get("thinking")
        if not isinstance(thinking, dict) or thinking.get("type") != "disabled":
            return [leg]
        bare = {key: value for key, value in leg.items() if key != "thinking"}
        config = body.get("output_config") or {}
        return [leg] + [{**bare, "output_config": {**config, "effort": each}} for each in _EFFORTS]

    def render_probe(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "Hi"}],
            "thinking": {"type": "disabled"},
        }

    def client_answer(self, body: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        # The route leaves out what is null.
        return {k: v for k, v in answer.items() if k not in wire.TRANSFER_FIELDS}

    def stream_error(self, data: bytes) -> dict[str, Any] | None:
        event = parsed(data) if b'"error"' in data else None
        if event is None or event.get("type") != "error":
            return None
        error = event.get("error")
        return error if isinstance(error, dict) else {}

    def carries_content(self, data: bytes) -> bool:
        event = parsed(data)
        if event is None:
            return True
        if event.get("type") == "content_block_start":
            block = event.get("content_block")
            return not isinstance(block, dict) or block.get("type") not in ("text", "thinking")
        return event.get("type") not in ("message_start", "ping")

    def may_end(self, block: bytes) -> bool:
        return TURN_EVENT_PREFIX in block or _STOP_EVENT in block

    def reports_error(self, block: bytes) -> bool:
        return block.startswith(b"event: error\n")

    def broken_stream(self) -> bytes:
        parts = ErrorParts(502, "The model worker stopped answering.", "api_error")
        return b"event: error\ndata: " + anthropic_shape(parts) + b"\n\n"

    def error_shape(self, parts: ErrorParts) -> bytes:
        return anthropic_shape(parts)

    def refusal(self, status: int, body: bytes) -> bytes:
        """vLLM's render route and its request validation answer in OpenAI's shape here too."""
        answer = parsed(body)
        error = answer.get("error") if answer is not None else None
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(message, str):
            return super().refusal(status, body)
        return anthropic_shape(ErrorParts(status, message, ""))


def _holds_media(content: object) -> bool:
    for block in dicts(content):
        kind = block.get("type")
        if kind == "tool_result":
            if _holds_media(block.get("content")):
                return True
        elif kind not in _TEXT_BLOCKS:
            return True
    return False


MESSAGES = Messages()
