"""[pure] Is this a request that a worker could answer? Refused here, before any worker is touched.

Only what is certainly wrong is refused: a missing or wrong-typed field, a value outside the API's
own range. Unknown fields pass through; what only the model's server can judge is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from proxy.errors import ClientError

_Check = Callable[[Any], bool]


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ``ClientError``."""
    if not data:
        raise ClientError("The request body is empty; a JSON object is expected.")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ClientError(
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}.",
            code="invalid_json",
        ) from None
    if not isinstance(body, dict):
        raise ClientError("The request body must be a JSON object.", code="invalid_json")
    return body


def check_chat(body: dict[str, Any]) -> None:
    """Raises ``ClientError`` naming the first wrong field of a chat completion request."""
    _require(body, "model")
    if not isinstance(body["model"], str) or not body["model"]:
        raise _wrong("model", "must be a non-empty string")
    _require(body, "messages")
    _check_messages(body["messages"])
    for field, (check, meaning) in _FIELDS.items():
        value = body.get(field)
        if value is not None and not check(value):
            raise _wrong(field, meaning)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise _wrong("stream_options", "is only allowed when 'stream' is true")
    for index, tool in enumerate(body.get("tools") or ()):
        if not isinstance(tool, dict):
            raise _wrong(f"tools[{index}]", "must be an object")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise _wrong("messages", "must be an array")
    if not messages:
        raise _wrong("messages", "must hold at least one message")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _wrong(place, "must be an object")
        if "role" not in message:
            raise ClientError(
                f"Missing required parameter: '{place}.role'.",
                param=f"{place}.role",
                code="missing_required_parameter",
            )
        if not isinstance(message["role"], str):
            raise _wrong(f"{place}.role", "must be a string")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise _wrong(f"{place}.content", "must be a string or an array of parts")
        for part_index, part in enumerate(content):
            if not isinstance(part, (dict, str)):
                raise _wrong(f"{place}.content[{part_index}]", "must be an object")


def _require(body: dict[str, Any], field: str) -> None:
    if body.get(field) is None:
        raise ClientError(
            f"Missing required parameter: '{field}'.",
            param=field,
            code="missing_required_parameter",
        )


def _wrong(field: str, meaning: str) -> ClientError:
    return ClientError(f"Invalid '{field}': it {meaning}.", param=field, code="invalid_value")


def _integer(low: int | None = None, high: int | None = None) -> _Check:
    def check(value: Any) -> bool:
        return (
            type(value) is int and (low is None or value >= low) and (high is None or value <= high)
        )

    return check


def _number(low: float | None = None, high: float | None = None) -> _Check:
    def check(value: Any) -> bool:
        return (
            type(value) in (int, float)
            and (low is None or value >= low)
            and (high is None or value <= high)
        )

    return check


def _of(*kinds: type) -> _Check:
    return lambda value: isinstance(value, kinds)


def _strings(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    )


_FIELDS: dict[str, tuple[_Check, str]] = {
    "stream": (_of(bool), "must be true or false"),
    "stream_options": (_of(dict), "must be an object"),
    "n": (_integer(1), "must be an integer of at least 1"),
    "max_tokens": (_integer(1), "must be an integer of at least 1"),
    "max_completion_tokens": (_integer(1), "must be an integer of at least 1"),
    "min_tokens": (_integer(0), "must be an integer of at least 0"),
    "temperature": (_number(0), "must be a number of at least 0"),
    "top_p": (_number(0, 1), "must be a number between 0 and 1"),
    "presence_penalty": (_number(-2, 2), "must be a number between -2 and 2"),
    "frequency_penalty": (_number(-2, 2), "must be a number between -2 and 2"),
    "seed": (_integer(), "must be an integer"),
    "stop": (_strings, "must be a string or an array of strings"),
    "logprobs": (_of(bool), "must be true or false"),
    "top_logprobs": (_integer(-1), "must be an integer"),
    "logit_bias": (_of(dict), "must be an object"),
    "tools": (_of(list), "must be an array"),
    "tool_choice": (_of(str, dict), "must be a string or an object"),
    "parallel_tool_calls": (_of(bool), "must be true or false"),
    "response_format": (_of(dict), "must be an object"),
    "user": (_of(str), "must be a string"),
    "cache_salt": (_of(str), "must be a string"),
    "chat_template": (_of(str), "must be a string"),
    "chat_template_kwargs": (_of(dict), "must be an object"),
    "return_token_ids": (_of(bool), "must be true or false"),
    "priority": (_integer(), "must be an integer"),
}
