"""[pure] What a worker's own prefix cache probably holds, guessed from what it was sent.

Digests of spans of some 64 tokens (``session/fingerprint.py``), the least recently used given up
first, as vLLM does with its blocks. It is a guess: other proxies send too, and blocks in use cannot
be given up. A wrong guess costs time and nothing else.

Of a long prompt not every span is noted but about every thirtieth part of it, each for those before
it: the places depend on nothing but their distance from the beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

from proxy.session.fingerprint import SPAN_TOKENS, Fingerprint

_SPANS_IF_UNKNOWN = 16_384
"""A million tokens: a worker whose KV capacity was not probed."""
_FINE = 32
"""Places in each doubling of the length: a guess is right to that part of it."""


class PrefixGuess:
    """The spans that one worker was sent."""

    __slots__ = ("_spans", "_weight", "limit")

    def __init__(self) -> None:
        self._spans: OrderedDict[bytes, int] = OrderedDict()
        """Digest -> spans for which it stands."""
        self._weight = 0
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
        spans = self._spans
        places = _places(min(prompt.span_count, self.limit))
        for number in range(len(places) - 1, -1, -1):
            place = places[number]
            span = prompt.span(place - 1)
            if span in spans:
                spans.move_to_end(span)
            else:
                weight = spans[span] = place - (places[number - 1] if number else 0)
                self._weight += weight
        while self._weight > self.limit:
            self._weight -= spans.popitem(last=False)[1]

    def cached(self, prompt: Fingerprint) -> int:
        """About how many leading tokens of ``prompt`` are probably there."""
        places = _places(prompt.span_count)
        low, high = 0, len(places)
        while low < high:
            middle = (low + high + 1) // 2
            if prompt.span(places[middle - 1] - 1) in self._spans:
                low = middle
            else:
                high = middle - 1
        return prompt.about_tokens(places[low - 1]) if low else 0

    def clear(self) -> None:
        """The process restarted."""
        self._spans.clear()
        self._weight = 0


@lru_cache(maxsize=256)
def _places(count: int) -> tuple[int, ...]:
    """The noted lengths up to ``count`` spans, ascending."""
    found: list[int] = []
    place = step = 1
    while place <= count:
        found.append(place)
        if place >= 2 * _FINE * step:
            step *= 2
        place += step
    return tuple(found)
