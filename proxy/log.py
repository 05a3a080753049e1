"""Structured log: one JSON object a line on standard error.

Ids are hashed before they come here and no field ever holds text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that this task, or the one that started it, serves: added to each line."""

_logger = logging.getLogger("kvloop")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return _line(record.created, record.levelname.lower(), record.getMessage(), fields)


def _line(at: float, level: str, name: str, fields: dict[str, Any]) -> str:
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "event": name,
    }
    if request := request_id.get():
        line["request"] = request
    line.update(fields)
    return orjson.dumps(line, default=str).decode()


_direct: logging.StreamHandler[TextIO] | None = None
"""Where events go past logging's own records, filters and handlers, which cost several times what
a line costs; None until ``set_up``."""


def set_up(level: str) -> None:
    """Send kvloop's and uvicorn's lines to standard error as JSON."""
    # No line says from which source line, thread or process it came: finding that out costs more
    # than the line. The names are those that Python's logging documents for this.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    for name in ("kvloop", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    global _direct
    _direct = handler


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    if not _logger.isEnabledFor(level):
        return
    if _direct is None or _logger.handlers != [_direct]:
        _logger.log(level, name, extra={"fields": fields})
        return
    line = _line(time.time(), logging.getLevelName(level).lower(), name, fields)
    with suppress(OSError, ValueError):  # as logging does: nobody fails because of a line
        _direct.stream.write(line + "\n")
        _direct.stream.flush()


def exception(name: str, **fields: Any) -> None:
    """Log with the traceback of the exception being handled."""
    _logger.error(name, exc_info=True, extra={"fields": fields})
