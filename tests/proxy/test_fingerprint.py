"""Fingerprints: the common prefix is exact for growth, never too long for anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.session.fingerprint import SPAN_TOKENS, PromptTokens, anchors, lookup_keys

ids = st.lists(st.integers(0, 3), max_size=300)
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
    """Whatever the two sequences: at most what is equal, at least that rounded down to a span."""
    stored, prompt = head + a, head + b
    fingerprint = PromptTokens(NAMESPACE, stored).fingerprint
    found = PromptTokens(NAMESPACE, prompt).common_prefix(fingerprint)
    truth = common(stored, prompt)
    assert truth // SPAN_TOKENS * SPAN_TOKENS <= found <= truth


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
    stored = PromptTokens(NAMESPACE, range(stored_spans * SPAN_TOKENS))
    grown = PromptTokens(NAMESPACE, range((stored_spans + more) * SPAN_TOKENS))
    found = anchors(stored.fingerprint)
    assert found[0] in lookup_keys(grown.fingerprint)
    assert len(found) <= 2 + stored_spans.bit_length()
    for digest in found:
        position = lookup_keys(stored.fingerprint)[::-1].index(digest) + 1
        assert position >= max(1, stored_spans // 2)
