"""Structured log: one JSON object a line on standard error.

Ids are hashed before they come here and no field ever holds text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import orjson

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that this task, or the one that started it, serves: added to each line."""

_logger = logging.getLogger("kvloop")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if request := request_id.get():
            line["request"] = request
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


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


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    if _logger.isEnabledFor(level):
        _logger.log(level, name, extra={"fields": fields})


def exception(name: str, **fields: Any) -> None:
    """Log with the traceback of the exception being handled."""
    _logger.error(name, exc_info=True, extra={"fields": fields})
