"""[pure] The trace of a turn when nobody records it: the W3C headers are passed on as they came.

``proxy/tracing.py`` has the one that records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_LONGEST_TRACESTATE = 512
"""Characters that W3C asks everybody to pass on."""


class TurnTrace:
    """Steps of a turn, and what goes with its calls to workers."""

    trace_id = ""
    """Of the trace that this turn is recorded in, 32 hexadecimal digits."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self._given = dict(given or {})

    def span(self, name: str) -> AbstractContextManager[None]:
        """A step of the turn."""
        return nullcontext()

    def headers(self) -> dict[str, str]:
        """For a call to a worker."""
        return self._given

    def first_content(self) -> None:
        """The answer begins: the decode step, as seen from here, is over."""

    def end(self, story: Mapping[str, Any]) -> None:
        """The turn is over. ``story``: as in the log."""


def trace_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The W3C headers of a request (lower-case names), if they are well-formed."""
    parent = headers.get(b"traceparent", b"").decode("latin-1")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    state = headers.get(b"tracestate", b"").decode("latin-1")
    usable = state and len(state) <= _LONGEST_TRACESTATE and state.isascii() and state.isprintable()
    return {"traceparent": parent, **({"tracestate": state} if usable else {})}
