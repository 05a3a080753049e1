"""[pure] Token sequences as chains of digests: exact comparison without keeping the tokens.

A digest covers every token from the start to the end of its span, so two chains that agree at
span ``i`` agree on all tokens before it, and the longest common prefix is found by bisection.
Nothing here can be turned back into text: a record in Redis holds digests only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

SPAN_TOKENS = 64
"""Tokens per digest. Smaller: more hashing and bytes per session for the same history. Larger: an
edited history loses up to one span of reuse. 64 is also the length below which vLLM declines a
pull (``kv_recompute_threshold``), so nothing worth pulling hides inside one span."""

DIGEST_BYTES = 16
"""128 bits: chance equality of two different prefixes is out of reach at any table size."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digest chain of a token sequence.

    ``spans`` holds one digest of ``DIGEST_BYTES`` for each full span, concatenated; ``tail`` covers
    the whole sequence, its last partial span included, and is empty for an empty sequence.
    """

    token_count: int
    spans: bytes
    tail: bytes

    @property
    def span_count(self) -> int:
        return len(self.spans) // DIGEST_BYTES

    def span(self, index: int) -> bytes:
        return self.spans[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


class PromptTokens:
    """The token ids of one prompt, hashed once, comparable with any stored fingerprint.

    ``namespace`` keeps chains of different tenants, models, adapters and salts apart: equal tokens
    in different namespaces have different digests.
    """

    __slots__ = ("_namespace", "_packed", "fingerprint")

    def __init__(self, namespace: bytes, ids: Sequence[int]) -> None:
        # The ids themselves are not kept: as Python integers they take nine times the space, for as
        # long as the answer streams.
        self._namespace = namespace
        self._packed = array("I", ids).tobytes()
        self.fingerprint = _chain(namespace, self._packed, len(ids))

    def __len__(self) -> int:
        return self.fingerprint.token_count

    def common_prefix(self, stored: Fingerprint) -> int:
        """How many leading tokens are proved equal to ``stored``.

        Exact when the prompt extends all of ``stored``; otherwise rounded down to a span.
        """
        if 0 < stored.token_count <= self.fingerprint.token_count:
            whole = stored.token_count // SPAN_TOKENS
            if (
                _link(self._before(whole), self._part(whole * SPAN_TOKENS, stored.token_count))
                == stored.tail
            ):
                return stored.token_count
        low, high = 0, min(self.fingerprint.span_count, stored.span_count)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fingerprint.span(middle - 1) == stored.span(middle - 1):
                low = middle
            else:
                high = middle - 1
        return low * SPAN_TOKENS

    def extended(self, output_ids: Sequence[int]) -> Fingerprint:
        """Fingerprint of the prompt followed by ``output_ids``."""
        start = self.fingerprint.span_count * SPAN_TOKENS
        rest = self._packed[start * 4 :] + array("I", output_ids).tobytes()
        total = self.fingerprint.token_count + len(output_ids)
        spans = [self.fingerprint.spans]
        digest = (
            self.fingerprint.span(start // SPAN_TOKENS - 1) if start else _root(self._namespace)
        )
        step = SPAN_TOKENS * 4
        for offset in range(0, len(rest) - step + 1, step):
            digest = _link(digest, rest[offset : offset + step])
            spans.append(digest)
        tail = _link(digest, rest[len(rest) // step * step :]) if total else b""
        return Fingerprint(total, b"".join(spans), tail)

    def shortened(self, count: int) -> Fingerprint:
        """Fingerprint of the first ``count`` tokens of the prompt."""
        whole = count // SPAN_TOKENS
        rest = self._part(whole * SPAN_TOKENS, count)
        tail = _link(self._before(whole), rest) if count else b""
        return Fingerprint(count, self.fingerprint.spans[: whole * DIGEST_BYTES], tail)

    def _before(self, span: int) -> bytes:
        """The digest that span ``span`` is chained to."""
        return self.fingerprint.span(span - 1) if span else _root(self._namespace)

    def _part(self, start: int, end: int) -> bytes:
        return self._packed[start * 4 : end * 4]


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


def _root(namespace: bytes) -> bytes:
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"kvloop-root").digest()


def _link(previous: bytes, tokens: bytes) -> bytes:
    return blake2b(previous + tokens, digest_size=DIGEST_BYTES).digest()


def _chain(namespace: bytes, packed: bytes, count: int) -> Fingerprint:
    step = SPAN_TOKENS * 4
    digest = _root(namespace)
    spans: list[bytes] = []
    for offset in range(0, len(packed) - step + 1, step):
        digest = blake2b(digest + packed[offset : offset + step], digest_size=DIGEST_BYTES).digest()
        spans.append(digest)
    tail = _link(digest, packed[len(spans) * step :]) if count else b""
    return Fingerprint(count, b"".join(spans), tail)
