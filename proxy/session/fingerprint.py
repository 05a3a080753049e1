"""[pure] Token sequences as chains of digests: exact comparison without keeping the tokens.

What is hashed is the ids as JSON writes them, ``12,345,6``: that is how a worker gives them and how
workers want them back, so a long prompt is compared without ever making integers of it. Equal text
is equal ids, and a worker that wrote the same ids otherwise would only not be recognised.

A digest covers everything from the start to the end of its span, so two chains that agree at span
``i`` agree on all before it, and the longest common prefix is found by bisection. Nothing here can
be turned back into text: a record in Redis holds digests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

SPAN_BYTES = 384
"""Bytes of text for each digest, a multiple of the hash's own block. Smaller: more hashing and more
bytes per session for the same history. Larger: an edited history loses up to one span of reuse."""

SPAN_TOKENS = 64
"""About that many tokens: with ids of up to six digits (vocabularies of 100 to 200 thousand). It is
also the length below which vLLM declines a pull (``kv_recompute_threshold``), so nothing worth
pulling hides inside one span."""

DIGEST_BYTES = 16
"""128 bits of SHA-256: chance equality of two different prefixes is out of reach at any table size.
Of the library's hashes it is the fastest where the processor has instructions for it."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digest chain of a token sequence.

    ``spans`` holds one digest of ``DIGEST_BYTES`` for each full span of its text, concatenated;
    ``tail`` covers the whole sequence, its last partial span included, and is empty for an empty
    sequence. ``size`` is the length of the text in bytes.
    """

    token_count: int
    size: int
    spans: bytes
    tail: bytes

    @property
    def span_count(self) -> int:
        return len(self.spans) // DIGEST_BYTES

    def span(self, index: int) -> bytes:
        return self.spans[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def about_tokens(self, spans: int) -> int:
        """Roughly how many tokens the first ``spans`` spans hold."""
        return self.token_count * spans * SPAN_BYTES // self.size if self.size else 0


def ids_json(ids: Sequence[int]) -> bytes:
    """Token ids as a JSON array, in the one form that is hashed. Raises ValueError."""
    try:
        return orjson.dumps(list(ids))
    except TypeError as error:
        raise ValueError(str(error)) from None


class PromptTokens:
    """The token ids of one prompt, hashed once, comparable with any stored fingerprint.

    ``namespace`` keeps chains of different tenants, models, adapters and salts apart: equal tokens
    in different namespaces have different digests.
    """

    __slots__ = ("_root", "_state", "fingerprint", "json")

    def __init__(self, namespace: bytes, ids: Sequence[int] | bytes) -> None:
        """``ids``: numbers, or a JSON array of them without blanks. Raises ValueError for what is
        neither."""
        # As numbers they would take nine times the space, for as long as the answer streams.
        self.json = ids if isinstance(ids, bytes) else ids_json(ids)
        count = _tokens(self.json)
        self._root = sha256(namespace).digest()
        self._state = sha256(self._root)
        text = memoryview(self.json)[1:-1]
        spans = _digests(self._state, text)
        rest = bytes(text[len(text) // SPAN_BYTES * SPAN_BYTES :])
        tail = _tail(self._root, spans, rest, count)
        self.fingerprint = Fingerprint(count, len(text), spans, tail)

    def __len__(self) -> int:
        return self.fingerprint.token_count

    def common_prefix(self, stored: Fingerprint) -> int:
        """How many leading tokens are proved equal to ``stored``.

        Exact when the prompt extends all of ``stored``; otherwise rounded down to what fits into
        whole spans.
        """
        mine = self.fingerprint
        if 0 < stored.size <= mine.size and self.json[stored.size + 1] in b",]":
            whole = stored.size // SPAN_BYTES
            spans = mine.spans[: whole * DIGEST_BYTES]
            rest = self._text(whole * SPAN_BYTES, stored.size)
            if _tail(self._root, spans, rest, stored.token_count) == stored.tail:
                return stored.token_count
        low, high = 0, min(mine.span_count, stored.span_count)
        while low < high:
            middle = (low + high + 1) // 2
            if mine.span(middle - 1) == stored.span(middle - 1):
                low = middle
            else:
                high = middle - 1
        # The number in which the last span ends may go on differently: it does not count.
        return self.json.count(b",", 1, 1 + low * SPAN_BYTES)

    def extended(self, output_ids: Sequence[int]) -> Fingerprint:
        """Fingerprint of the prompt followed by ``output_ids``."""
        if not output_ids:
            return self.fingerprint
        start = self.fingerprint.span_count * SPAN_BYTES
        more = ids_json(output_ids)[1:-1]
        rest = b"%b,%b" % (self._text(start), more) if len(self) else more
        spans = self.fingerprint.spans + _digests(self._state.copy(), memoryview(rest))
        total = self.fingerprint.token_count + len(output_ids)
        tail = _tail(self._root, spans, rest[len(rest) // SPAN_BYTES * SPAN_BYTES :], total)
        return Fingerprint(total, start + len(rest), spans, tail)

    def shortened(self, count: int) -> Fingerprint:
        """Fingerprint of the first ``count`` tokens of the prompt."""
        end = len(self.json) - 1 if count else 1
        if count:
            for _ in range(len(self) - count):
                end = self.json.rindex(b",", 0, end)
        size = end - 1
        whole = size // SPAN_BYTES
        spans = self.fingerprint.spans[: whole * DIGEST_BYTES]
        tail = _tail(self._root, spans, self._text(whole * SPAN_BYTES, size), count)
        return Fingerprint(count, size, spans, tail)

    def _text(self, start: int, end: int | None = None) -> bytes:
        return self.json[start + 1 : -1 if end is None else end + 1]


def anchors(fingerprint: Fingerprint) -> list[bytes]:
    """Span digests under which a holding is indexed, longest first.

    They thin out towards the middle and stop there: a prompt that shares less than half of a
    holding must not claim it, because claiming consumes the whole handle. The number grows with the
    logarithm of the history.
    """
    count = fingerprint.span_count
    found: list[bytes] = []
    back = 0
    while count - back >= max(1, count // 2):
        found.append(fingerprint.span(count - back - 1))
        back = back * 2 if back else 1
    return found


def lookup_keys(prompt: Fingerprint) -> list[bytes]:
    """Span digests at which a prompt may meet an anchor, longest first."""
    return [prompt.span(index) for index in range(prompt.span_count - 1, -1, -1)]


def _tokens(json: bytes) -> int:
    """How many ids there are."""
    between = json.translate(None, b"0123456789")
    if between != b"[%b]" % (b"," * (len(between) - 2)):
        raise ValueError("no JSON array of token ids without blanks")
    return len(between) - 1 if len(json) > 2 else 0


def _digests(state: Any, text: memoryview) -> bytes:
    """One digest for each full span; ``state`` has then taken in all of them and nothing more."""
    update, digest = state.update, state.digest
    found = []
    for start in range(0, len(text) - SPAN_BYTES + 1, SPAN_BYTES):
        update(text[start : start + SPAN_BYTES])
        found.append(digest()[:DIGEST_BYTES])
    return b"".join(found)


def _tail(root: bytes, spans: bytes, rest: bytes, count: int) -> bytes:
    """Digest of everything, from the digest of all full spans and what follows them."""
    if not count:
        return b""
    before = spans[-DIGEST_BYTES:] or root
    return sha256(b"tail%b%b" % (before, rest)).digest()[:DIGEST_BYTES]
