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

import orjson


class KvloopError(Exception):
    """Root of everything this proxy raises on purpose."""


class ClientError(KvloopError):
    """The client must change its request. ``param`` is the field to change, if one is to blame."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
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


def openai_error(
    message: str, *, type: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """An error body as OpenAI's API shapes it."""
    return orjson.dumps({"error": {"message": message, "type": type, "param": param, "code": code}})


def http_answer(error: KvloopError) -> tuple[int, bytes, str, dict[str, str]]:
    """(status, body, content type, extra headers) for an error that ends a turn."""
    match error:
        case ClientError():
            body = openai_error(error.message, type=error.type, param=error.param, code=error.code)
            return error.status, body, "application/json", {}
        case WorkerRefused():
            return error.status, error.body, error.content_type, {}
        case NoWorker():
            body = openai_error(str(error), type="overloaded_error", code="no_worker")
            return 503, body, "application/json", {"Retry-After": "5"}
        case Overloaded():
            body = openai_error(str(error), type="overloaded_error", code=error.code)
            return 503, body, "application/json", {"Retry-After": str(error.retry_after)}
        case TableUnavailable():
            body = openai_error(str(error), type="overloaded_error", code="table_unavailable")
            return 503, body, "application/json", {"Retry-After": "1"}
        case WorkerFailed(status=503):
            body = openai_error(
                "The model worker is overloaded.", type="overloaded_error", code="worker_overloaded"
            )
            return 503, body, "application/json", {"Retry-After": "1"}
        case WorkerUnreachable(timed_out=True):
            body = openai_error(
                "The model worker did not answer in time.", type="api_error", code="worker_timeout"
            )
            return 504, body, "application/json", {}
        case WorkerError():
            body = openai_error(
                "The model worker failed to answer.", type="api_error", code="worker_failed"
            )
            return 502, body, "application/json", {}
        case _:
            body = openai_error("Internal error.", type="api_error", code="internal_error")
            return 500, body, "application/json", {}
