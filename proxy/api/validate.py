"""[pure] The bytes of a request body as a JSON object, or a clear refusal."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.errors import ClientError

MAX_DEPTH = 64
"""Levels of nested arrays and objects. Real tool schemas stay below 20; workers walk a request
recursively, and a thousand levels cost them more than they cost the sender."""
_LONG = 16 * 1024
"""Bytes from which on counting brackets costs more than looking at the objects there are."""


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
    may_be_deep = len(data) > _LONG or data.count(b"{") + data.count(b"[") > MAX_DEPTH
    if may_be_deep and _deeper_than(body, MAX_DEPTH):
        raise ClientError(
            f"The request body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json"
        )
    return body


def _deeper_than(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
