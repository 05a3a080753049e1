"""[pure] What makes a request certainly wrong. Refused here, before any worker is touched.

Only what is certainly wrong is refused: a missing or wrong-typed field, a value outside the API's
own range. Unknown fields pass through; what only the model's server can judge is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.errors import ClientError

Check = Callable[[Any], bool]
Rule = tuple[Check, str]
"""A check, and what the value must be, in words that follow 'it'."""


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Rule]) -> None:
    """Raises ``ClientError`` naming the first field of ``fields`` that is present and wrong."""
    for field, (check, meaning) in fields.items():
        value = body.get(field)
        if value is not None and not check(value):
            raise wrong(field, meaning)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise wrong("stream_options", "is only allowed when 'stream' is true")


def check_model(body: Mapping[str, Any]) -> None:
    require(body, "model")
    if not isinstance(body["model"], str) or not body["model"]:
        raise wrong("model", "must be a non-empty string")


def check_objects(body: Mapping[str, Any], field: str) -> None:
    """``field`` (absent or an array already) holds objects only."""
    for index, each in enumerate(body.get(field) or ()):
        if not isinstance(each, dict):
            raise wrong(f"{field}[{index}]", "must be an object")


def check_messages(messages: Any, *, roles: tuple[str, ...] = ()) -> None:
    """An array of messages with roles (any string when ``roles`` is empty) and sound content."""
    if not isinstance(messages, list):
        raise wrong("messages", "must be an array")
    if not messages:
        raise wrong("messages", "must hold at least one message")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(place, "must be an object")
        if "role" not in message:
            raise ClientError(
                f"Missing required parameter: '{place}.role'.",
                param=f"{place}.role",
                code="missing_required_parameter",
            )
        if not isinstance(message["role"], str):
            raise wrong(f"{place}.role", "must be a string")
        if roles and message["role"] not in roles:
            raise wrong(f"{place}.role", f"must be one of {', '.join(roles)}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise wrong(f"{place}.content", "must be a string or an array of parts")
        for part_index, part in enumerate(content):
            if not isinstance(part, (dict, str)):
                raise wrong(f"{place}.content[{part_index}]", "must be an object")


def require(body: Mapping[str, Any], field: str) -> None:
    if body.get(field) is None:
        raise ClientError(
            f"Missing required parameter: '{field}'.",
            param=field,
            code="missing_required_parameter",
        )


def wrong(field: str, meaning: str) -> ClientError:
    return ClientError(f"Invalid '{field}': it {meaning}.", param=field, code="invalid_value")


def integer(low: int | None = None, high: int | None = None) -> Check:
    """A whole number; 5.0 is one, as for JSON Schema and for vLLM."""

    def check(value: Any) -> bool:
        whole = type(value) is int or (type(value) is float and value.is_integer())
        return whole and (low is None or value >= low) and (high is None or value <= high)

    return check


def number(low: float | None = None, high: float | None = None) -> Check:
    def check(value: Any) -> bool:
        return (
            type(value) in (int, float)
            and (low is None or value >= low)
            and (high is None or value <= high)
        )

    return check


def of(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def strings(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    )


def objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def token_ids(value: Any) -> bool:
    """A non-empty array of token ids: integers of 0 or more, 32 bits."""
    return (
        isinstance(value, list)
        and bool(value)
        and set(map(type, value)) == {int}
        and min(value) >= 0
        and max(value) < 2**32
    )


BOOLEAN: Rule = (of(bool), "must be true or false")
OBJECT: Rule = (of(dict), "must be an object")
TEXT: Rule = (of(str), "must be a string")
POSITIVE: Rule = (integer(1), "must be an integer of at least 1")
COUNT: Rule = (integer(0), "must be an integer of at least 0")

SAMPLING: dict[str, Rule] = {
    "stream": BOOLEAN,
    "temperature": (number(0), "must be a number of at least 0"),
    "top_p": (number(0, 1), "must be a number between 0 and 1"),
    "top_k": (integer(), "must be an integer"),
    "cache_salt": TEXT,
    "chat_template_kwargs": OBJECT,
    "vllm_xargs": OBJECT,
}
"""Fields of every generating route."""

OPENAI_SAMPLING: dict[str, Rule] = {
    **SAMPLING,
    "stream_options": OBJECT,
    "presence_penalty": (number(-2, 2), "must be a number between -2 and 2"),
    "frequency_penalty": (number(-2, 2), "must be a number between -2 and 2"),
    "seed": (integer(), "must be an integer"),
    "stop": (strings, "must be a string or an array of strings"),
    "logit_bias": OBJECT,
    "user": TEXT,
    "priority": (integer(), "must be an integer"),
}
"""Fields of OpenAI's generating routes."""
