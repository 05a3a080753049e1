"""[pure] The OpenAPI description of the routes that FastAPI does not serve.

The generating routes and those that a worker answers take whatever the worker's vLLM takes; only
what this proxy itself reads or checks is described, and every object is open to more fields.
"""

from __future__ import annotations

from typing import Any

from proxy.dialects.base import Dialect

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_FLAG: Schema = {"type": ["boolean", "null"]}
_POSITIVE: Schema = {"type": ["integer", "null"], "minimum": 1}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_OBJECT: Schema = {"type": ["object", "null"]}
_OBJECTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}}
_ID: Schema = {"type": ["string", "null"], "maxLength": 512}
_IDS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
_CONTENT: Schema = {
    "anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, {"type": "object"}]}}]
}


def _messages(roles: tuple[str, ...] = ()) -> Schema:
    """Without ``roles`` any role, and content may be missing, as beside tool calls."""
    role = {"type": "string", "enum": list(roles)} if roles else _TEXT
    content = _CONTENT if roles else {"anyOf": [{"type": "null"}, _CONTENT]}
    message = {
        "type": "object",
        "required": ["role", "content"] if roles else ["role"],
        "properties": {"role": role, "content": content},
    }
    return {"type": "array", "minItems": 1, "items": message}


_EVERY: dict[str, Schema] = {
    "model": _NAME,
    "stream": _FLAG,
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "conversation_id": _ID,
    "prompt_cache_key": _ID,
    "cache_salt": {"type": ["string", "null"]},
}
_OPENAI: dict[str, Schema] = {
    **_EVERY,
    "seed": {"type": ["integer", "null"]},
    "stop": {"anyOf": [{"type": "null"}, _TEXT, {"type": "array", "items": _TEXT}]},
    "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "priority": {"type": ["integer", "null"]},
    "user": {"type": ["string", "null"]},
}
_BODIES: dict[str, tuple[tuple[str, ...], dict[str, Schema]]] = {
    "chat": (
        ("model", "messages"),
        {
            **_OPENAI,
            "messages": _messages(),
            "max_tokens": _POSITIVE,
            "max_completion_tokens": _POSITIVE,
            "n": _POSITIVE,
            "tools": _OBJECTS,
            "response_format": _OBJECT,
        },
    ),
    "completions": (
        ("model", "prompt"),
        {
            **_OPENAI,
            "prompt": {
                "anyOf": [
                    _TEXT,
                    {"type": "array", "minItems": 1, "items": _TEXT},
                    _IDS,
                    {"type": "array", "minItems": 1, "items": _IDS},
                ]
            },
            "max_tokens": _COUNT,
            "echo": _FLAG,
            "n": _POSITIVE,
        },
    ),
    "messages": (
        ("model", "messages", "max_tokens"),
        {
            **_EVERY,
            "messages": _messages(("user", "assistant", "system")),
            "max_tokens": {"type": "integer", "minimum": 1},
            "system": {"anyOf": [{"type": "null"}, _TEXT, _OBJECTS]},
            "stop_sequences": {"type": ["array", "null"], "items": _TEXT},
            "thinking": _OBJECT,
            "tools": _OBJECTS,
            "tool_choice": _OBJECT,
        },
    ),
    "responses": (
        ("model", "input"),
        {
            **_OPENAI,
            "input": {
                "anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"type": "object"}}]
            },
            "instructions": {"type": ["string", "null"]},
            "max_output_tokens": _POSITIVE,
            "previous_response_id": {"type": ["string", "null"]},
            "store": _FLAG,
            "background": _FLAG,
            "tools": _OBJECTS,
        },
    ),
}
_OPENAI_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": _TEXT, "type": _TEXT},
        }
    },
}
_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {**_OPENAI_ERROR["properties"], "type": {"const": "error"}},
}
_STATUSES = {
    "400": "The request is wrong; the message names the field.",
    "401": "No valid API key.",
    "404": "No such model, response, or route of the workers.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Over the tenant's limits; see Retry-After.",
    "431": "The headers are too large.",
    "502": "The worker failed.",
    "503": "No worker, no place, or stopping; see Retry-After.",
    "504": "The worker did not answer in time.",
}


def add_routes(
    document: dict[str, Any],
    dialects: tuple[Dialect, ...],
    forwarded: tuple[str, ...],
    *,
    keyed: bool,
) -> dict[str, Any]:
    """The document with the routes of ``dialects``, and with those in ``forwarded``."""
    paths: dict[str, Any] = {
        path: {method: _as_answered(operation) for method, operation in operations.items()}
        for path, operations in document.get("paths", {}).items()
    }
    for dialect in dialects:
        required, fields = _BODIES[dialect.name]
        body: Schema = {"type": "object", "required": list(required), "properties": fields}
        events: dict[str, Any] = {"text/event-stream": {}}
        paths[dialect.path] = {
            "post": _operation(
                f"Generate ({dialect.name}). Prefill and decode share it where they can.",
                dialect.path,
                body,
                events,
            )
        }
    for path in forwarded:
        summary = "Answered by one worker, if its model serves the route."
        paths[path] = {"post": _operation(summary, path, {"type": "object"}, {})}
    document = {**document, "paths": paths}
    if keyed:
        schemes = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["components"] = {**document.get("components", {}), "securitySchemes": schemes}
        document["security"] = [{name: []} for name in schemes]
    return document


def _as_answered(operation: dict[str, Any]) -> dict[str, Any]:
    """FastAPI describes its own 422 for wrong parameters; ours are 400s in OpenAI's shape."""
    responses = {k: v for k, v in operation["responses"].items() if k != "422"}
    for status in ("400", "401", "404", "503"):
        responses.setdefault(status, _problem(status, _OPENAI_ERROR))
    return {**operation, "responses": responses}


def _problem(status: str, error: Schema) -> dict[str, Any]:
    return {
        "description": _STATUSES[status],
        "content": {"application/json": {"schema": error}},
    }


def _operation(summary: str, path: str, body: Schema, more: dict[str, Any]) -> dict[str, Any]:
    error = _ANTHROPIC_ERROR if path.startswith("/v1/messages") else _OPENAI_ERROR
    problems = {status: _problem(status, error) for status in _STATUSES}
    answer = {"application/json": {"schema": {}}, **more}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "As the worker answers.", "content": answer}}
        | problems,
    }
