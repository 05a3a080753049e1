"""Fingerprints: the common prefix is exact for growth, never too long for anything."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.session.fingerprint import SPAN_BYTES, SPAN_TOKENS, PromptTokens, anchors, lookup_keys

words = st.integers(0, 3) | st.sampled_from([1, 11, 111, 100_000, 200_001])
"""Few different ones, and some that begin with others."""
ids = st.lists(words, max_size=300)
NAMESPACE = b"n"


def common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@given(ids, ids, ids)
def test_common_prefix_never_exceeds_the_truth(head: list[int], a: list[int], b: list[int]) -> None:
    """Whatever the two sequences: at most what is equal, and no more missing than a span."""
    stored, prompt = head + a, head + b
    fingerprint = PromptTokens(NAMESPACE, stored).fingerprint
    found = PromptTokens(NAMESPACE, prompt).common_prefix(fingerprint)
    truth = common(stored, prompt)
    assert found <= truth
    left = stored[found:truth]
    assert len(left) * 2 <= SPAN_BYTES + len("200000,") * 2
    assert sum(len(f"{each},") for each in left) <= SPAN_BYTES + len("200000,")


@given(ids, ids)
def test_growth_is_found_exactly(stored: list[int], new: list[int]) -> None:
    """A prompt that extends the stored tokens shares all of them, to the token."""
    fingerprint = PromptTokens(NAMESPACE, stored).fingerprint
    assert PromptTokens(NAMESPACE, stored + new).common_prefix(fingerprint) == len(stored)


@given(ids, ids)
def test_extended_equals_hashing_the_whole(prompt: list[int], output: list[int]) -> None:
    """Continuing the chain with the output gives what hashing everything gives."""
    assert PromptTokens(NAMESPACE, prompt).extended(output) == (
        PromptTokens(NAMESPACE, prompt + output).fingerprint
    )


@given(ids, st.data())
def test_shortened_equals_hashing_the_part(prompt: list[int], data: st.DataObject) -> None:
    """Cutting the chain gives what hashing the shorter prompt gives."""
    count = data.draw(st.integers(0, len(prompt)))
    assert PromptTokens(NAMESPACE, prompt).shortened(count) == (
        PromptTokens(NAMESPACE, prompt[:count]).fingerprint
    )


def test_namespaces_share_nothing() -> None:
    """Equal tokens of another tenant, model or salt have no digest in common."""
    tokens = list(range(500))
    mine = PromptTokens(b"a", tokens)
    theirs = PromptTokens(b"b", tokens)
    assert mine.common_prefix(theirs.fingerprint) == 0
    assert not set(lookup_keys(mine.fingerprint)) & set(lookup_keys(theirs.fingerprint))


@given(st.integers(1, 200), st.integers(0, 200))
def test_grown_prompt_meets_an_anchor(stored_spans: int, more: int) -> None:
    """The longest span of any grown prompt's lookup that is an anchor is the holding's last."""
    each = SPAN_BYTES // len("1234,")
    words = [1000 + number % 9000 for number in range((stored_spans + more) * each)]
    stored = PromptTokens(NAMESPACE, words[: stored_spans * each + 1])
    grown = PromptTokens(NAMESPACE, words)
    found = anchors(stored.fingerprint)
    if more > 1:
        assert found[0] in lookup_keys(grown.fingerprint)
    spans = stored.fingerprint.span_count
    assert len(found) <= 2 + spans.bit_length()
    for digest in found:
        position = lookup_keys(stored.fingerprint)[::-1].index(digest) + 1
        assert position >= max(1, spans // 2)


def test_a_span_holds_about_as_many_tokens_as_is_said() -> None:
    """With ids as a vocabulary of 150 thousand gives them."""
    words = [(number * 7919) % 150_000 for number in range(10_000)]
    fingerprint = PromptTokens(NAMESPACE, words).fingerprint
    assert 0.75 * SPAN_TOKENS < 10_000 / fingerprint.span_count < 1.5 * SPAN_TOKENS
    assert abs(fingerprint.about_tokens(fingerprint.span_count) - 10_000) < 2 * SPAN_TOKENS


def test_ids_from_numbers_and_from_a_workers_text_are_the_same() -> None:
    """The text goes on to the workers as it is."""
    words = [5, 1000, 0, 149_999] * 100
    text = orjson.dumps(words)
    from_text, from_words = PromptTokens(NAMESPACE, text), PromptTokens(NAMESPACE, words)
    assert from_text.fingerprint == from_words.fingerprint
    assert from_text.json == from_words.json == text


@pytest.mark.parametrize(
    "ids", [[1.5], [-1], ["1"], [True], [[1]], [2**70], b"[1, 2]", b"1,2", b"[1,2", b"[1-2]", b""]
)
def test_what_is_no_array_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        PromptTokens(NAMESPACE, ids)
