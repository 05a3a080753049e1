"""Errors, by who is to blame, and the one place that turns them into answers.

    KvloopError
    ├── ClientError         the request is wrong: 4xx, the field named, no worker touched
    ├── WorkerError         a worker could not do its part
    │   ├── WorkerRefused   it answered 4xx: passed to the client, status and body unchanged
    │   ├── WorkerFailed    it answered 5xx, or something that is not an answer
    │   └── WorkerUnreachable  no connection, broken connection, or no answer in time
    ├── NoWorker            nobody healthy is left to serve: 503 with Retry-After
    ├── Overloaded          no place, or this proxy is being stopped: 503 with Retry-After
    └── TableUnavailable    Redis did not answer; ends no turn (it goes cold), only admin calls: 503

Worker bodies are kept out of messages: they may hold prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson


class KvloopError(Exception):
    """Root of everything this proxy raises on purpose."""


class ClientError(KvloopError):
    """The client must change its request. ``param`` is the field to change, if one is to blame.

    ``retry_after`` (seconds, 0 for none): the same request may succeed then.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.status = status
        self.param = param
        self.code = code
        self.type = type


class WorkerError(KvloopError):
    """A worker could not do its part; ``worker`` is its name."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(f"{worker}: {message}")
        self.worker = worker


class WorkerRefused(WorkerError):
    """The worker answered 4xx: the request is at fault, another worker would refuse it too."""

    def __init__(self, worker: str, status: int, body: bytes, content_type: str) -> None:
        super().__init__(worker, f"refused with status {status}")
        self.status = status
        self.body = body
        self.content_type = content_type


class WorkerFailed(WorkerError):
    """The worker answered 5xx or nonsense. ``status`` is 0 when an in-stream error said so."""

    def __init__(self, worker: str, status: int, message: str = "") -> None:
        super().__init__(worker, message or f"failed with status {status}")
        self.status = status


class WorkerUnreachable(WorkerError):
    """No connection, a broken one, or no answer within the time allowed.

    ``timed_out`` tells the last kind: the worker may still be working on the request.
    """

    def __init__(self, worker: str, message: str, *, timed_out: bool = False) -> None:
        super().__init__(worker, message)
        self.timed_out = timed_out


class NoWorker(KvloopError):
    """No healthy worker can serve the request."""


class Overloaded(KvloopError):
    """This proxy takes no further turn now. ``code`` says why, ``retry_after`` is in seconds."""

    def __init__(self, message: str, *, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class TableUnavailable(KvloopError):
    """The session table did not answer in time.

    ``certain``: the operation had no effect and never will. Otherwise the command may sit in a
    socket and take effect later, unseen.
    """

    def __init__(self, message: str, *, certain: bool = False) -> None:
        super().__init__(message)
        self.certain = certain


@dataclass(frozen=True, slots=True)
class ErrorParts:
    """What an error answer says, whatever its shape. ``retry_after`` is in seconds, 0 for none."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after: int = 0


def openai_error(
    message: str, *, type: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """An error body as OpenAI's API shapes it."""
    return orjson.dumps({"error": {"message": message, "type": type, "param": param, "code": code}})


def openai_shape(parts: ErrorParts) -> bytes:
    return openai_error(parts.message, type=parts.type, param=parts.param, code=parts.code)


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_shape(parts: ErrorParts) -> bytes:
    """An error body as Anthropic's API shapes it: there the type follows from the status."""
    known = _ANTHROPIC_TYPES.get(parts.status)
    kind = known or ("invalid_request_error" if parts.status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": parts.message}})


def error_parts(error: KvloopError) -> ErrorParts:
    """What the client is told of an error that ends its request."""
    match error:
        case ClientError():
            return ErrorParts(
                error.status, error.message, error.type, error.code, error.param, error.retry_after
            )
        case NoWorker():
            return ErrorParts(503, str(error), "overloaded_error", "no_worker", retry_after=5)
        case Overloaded():
            return ErrorParts(
                503, str(error), "overloaded_error", error.code, retry_after=error.retry_after
            )
        case TableUnavailable():
            return ErrorParts(
                503, str(error), "overloaded_error", "table_unavailable", retry_after=1
            )
        case WorkerFailed(status=503):
            return ErrorParts(
                503,
                "The model worker is overloaded.",
                "overloaded_error",
                "worker_overloaded",
                retry_after=1,
            )
        case WorkerUnreachable(timed_out=True):
            return ErrorParts(
                504, "The model worker did not answer in time.", "api_error", "worker_timeout"
            )
        case WorkerError():
            return ErrorParts(
                502, "The model worker failed to answer.", "api_error", "worker_failed"
            )
        case _:
            return ErrorParts(500, "Internal error.", "api_error", "internal_error")


def http_answer(
    error: KvloopError, shape: Callable[[ErrorParts], bytes] = openai_shape
) -> tuple[int, bytes, str, dict[str, str]]:
    """(status, body, content type, extra headers) for an error that ends a request."""
    if isinstance(error, WorkerRefused):
        return error.status, error.body, error.content_type, {}
    parts = error_parts(error)
    headers = {"Retry-After": str(parts.retry_after)} if parts.retry_after else {}
    return parts.status, shape(parts), "application/json", headers
