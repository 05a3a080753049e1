"""[pure] What a worker's own prefix cache probably holds, guessed from what it was sent.

Digests of 64-token spans (``session/fingerprint.py``), the least recently used given up first, as
vLLM does with its blocks. It is a guess: other proxies send too, and blocks in use cannot be given
up. A wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict

from proxy.session.fingerprint import SPAN_TOKENS, Fingerprint

_SPANS_IF_UNKNOWN = 16_384
"""A million tokens: a worker whose KV capacity was not probed."""


class PrefixGuess:
    """The spans that one worker was sent."""

    __slots__ = ("_spans", "limit")

    def __init__(self) -> None:
        self._spans: OrderedDict[bytes, None] = OrderedDict()
        self.limit = _SPANS_IF_UNKNOWN
        """Most spans the worker has room for."""

    def sized(self, tokens: int | None) -> None:
        """The worker's KV capacity in tokens; None: unknown."""
        self.limit = max(1, tokens // SPAN_TOKENS) if tokens else _SPANS_IF_UNKNOWN

    def sent(self, prompt: Fingerprint) -> None:
        """The worker has computed, or read, this prompt.

        Last span first: of one prompt the beginning then counts as used last, and is given up last,
        so that what is left of it is always a prefix.
        """
        for index in range(min(prompt.span_count, self.limit) - 1, -1, -1):
            span = prompt.span(index)
            self._spans[span] = None
            self._spans.move_to_end(span)
        while len(self._spans) > self.limit:
            self._spans.popitem(last=False)

    def cached(self, prompt: Fingerprint) -> int:
        """How many leading tokens of ``prompt`` are probably there."""
        low, high = 0, prompt.span_count
        while low < high:
            middle = (low + high + 1) // 2
            if prompt.span(middle - 1) in self._spans:
                low = middle
            else:
                high = middle - 1
        return low * SPAN_TOKENS

    def clear(self) -> None:
        """The process restarted."""
        self._spans.clear()
