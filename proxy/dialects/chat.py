"""[pure] ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.dialects import checks
from proxy.dialects.base import Dialect
from proxy.relay.sse import carries_content
from proxy.turn import tokenise
from proxy.turn.planner import has_media, may_split
from proxy.turn.reasons import Reason

_FIELDS: dict[str, checks.Rule] = {
    **checks.OPENAI_SAMPLING,
    "n": checks.POSITIVE,
    "max_tokens": checks.POSITIVE,
    "max_completion_tokens": checks.POSITIVE,
    "min_tokens": checks.COUNT,
    "logprobs": checks.BOOLEAN,
    "top_logprobs": (checks.integer(-1), "must be an integer"),
    "tools": (checks.of(list), "must be an array"),
    "tool_choice": (checks.of(str, dict), "must be a string or an object"),
    "parallel_tool_calls": checks.BOOLEAN,
    "response_format": checks.OBJECT,
    "chat_template": checks.TEXT,
    "return_token_ids": checks.BOOLEAN,
}


class Chat(Dialect):
    """OpenAI's chat completions."""

    name: ClassVar[str] = "chat"
    path: ClassVar[str] = "/v1/chat/completions"
    render_path: ClassVar[str] = "/v1/chat/completions/render"
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens", "max_completion_tokens")

    def check(self, body: dict[str, Any]) -> None:
        checks.check_model(body)
        checks.require(body, "messages")
        checks.check_messages(body["messages"])
        checks.check_fields(body, _FIELDS)
        checks.check_objects(body, "tools")

    def alone(self, body: Mapping[str, Any]) -> Reason | None:
        return may_split(body)

    def has_media(self, body: Mapping[str, Any]) -> bool:
        return has_media(body.get("messages"))

    def tokenize_request(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        return tokenise.tokenize_request(body)

    def carries_content(self, data: bytes) -> bool:
        return carries_content(data)


CHAT = Chat()
