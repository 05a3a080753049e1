"""The decisions, from values alone."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import (
    Holding,
    Match,
    best_match,
    decode,
    encode,
    held_tokens,
    usable_handle,
)
from proxy.turn.plan import ColdPrefill, PrefillWithPull
from proxy.turn.planner import (
    HolderState,
    Limits,
    has_media,
    may_split,
    plan_push,
    plan_turn,
    wants_claim,
)
from proxy.turn.reasons import Reason
from proxy.turn.wire import transfer_for_prefill

N = b"n"


def handle(tokens: int, block: int, groups: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(ceil(tokens / block)))] * groups,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 1.0,
        **more,
    }


def holding(ids: list[int], block: int = 16, *, groups: int = 1, computed: int = 0) -> Holding:
    """A holding whose blocks hold ``ids``; its handle counts ``computed`` tokens more."""
    return Holding(
        "id",
        "d:1",
        "1",
        PromptTokens(N, ids).fingerprint,
        handle(len(ids) + computed, block, groups),
    )


@given(
    stored=st.lists(st.integers(0, 2), min_size=1, max_size=400),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=400),
    keep=st.integers(0, 400),
    block=st.sampled_from([16, 32, 64, None]),
    groups=st.sampled_from([1, 1, 2]),
    computed=st.sampled_from([0, 0, 1]),
    threshold=st.sampled_from([1, 64]),
)
def test_no_plan_ever_pulls_a_token_that_differs(
    stored: list[int],
    prompt: list[int],
    keep: int,
    block: int | None,
    groups: int,
    computed: int,
    threshold: int,
) -> None:
    """The pulled part is equal, count and list fit the block size, all that is claimed is used."""
    prompt = stored[:keep] + prompt
    held = holding(stored, block or 16, groups=groups, computed=computed)
    tokens = PromptTokens(N, prompt)
    match = best_match(tokens, [held])
    assert match is not None
    plan = plan_turn(match=match, holder=HolderState(True, "1", block), limits=Limits(threshold))
    if isinstance(plan, PrefillWithPull):
        params = transfer_for_prefill(plan)
        count = params["remote_num_tokens"]
        assert count >= threshold
        assert prompt[:count] == stored[:count]
        assert len(params["remote_block_ids"]) == groups
        assert held.handle is not None
        for got, whole in zip(
            params["remote_block_ids"], held.handle["remote_block_ids"], strict=True
        ):
            assert len(got) == ceil(count / (block or 16))
            assert got == whole[: len(got)]
        if groups > 1:
            assert count == held.handle["remote_num_tokens"]
    else:
        assert isinstance(plan, ColdPrefill)
        assert plan.release is held


def test_grown_history_is_always_pulled() -> None:
    """Growth never goes cold, whatever is unknown of the worker."""
    for block in (16, None):
        for groups in (1, 2):
            match = best_match(PromptTokens(N, [1] * 300), [holding([1] * 200, groups=groups)])
            assert match is not None
            plan = plan_turn(match=match, holder=HolderState(True, "", block), limits=Limits())
            assert isinstance(plan, PrefillWithPull)
            assert (plan.tokens, plan.reason) == (200, Reason.HISTORY_GREW)


def test_a_handle_whose_list_contradicts_its_count_is_not_pulled() -> None:
    """A list longer than the count needs would be read from its wrong end."""
    held = holding([1] * 200, block=8)
    match = best_match(PromptTokens(N, [1] * 300), [held])
    assert match is not None
    plan = plan_turn(match=match, holder=HolderState(True, "1", 16), limits=Limits())
    assert plan == ColdPrefill(Reason.UNCUTTABLE, release=held)


@pytest.mark.parametrize(
    ("holder", "allowed", "reason", "released"),
    [
        (HolderState(False), True, Reason.DECODE_RESTARTED, False),
        (HolderState(True, "2", 16), True, Reason.DECODE_RESTARTED, False),
        (HolderState(True, "1", 16), False, Reason.PULL_BLOCKED, False),
    ],
)
def test_what_forbids_a_pull_is_named(
    holder: HolderState, allowed: bool, reason: Reason, released: bool
) -> None:
    """Gone or restarted decode, paused pulls: cold, and no release call that could only hang."""
    match = Match(holding([1] * 200), 200)
    plan = plan_turn(match=match, holder=holder, limits=Limits(), pull_allowed=allowed)
    assert plan == ColdPrefill(reason)


def test_anonymous_turns_claim_only_what_they_mostly_use() -> None:
    """By prefix alone at least half of a holding must be shared; a named one is always claimed."""
    held = holding([1] * 200)
    assert wants_claim(Match(held, 100), named=False)
    assert not wants_claim(Match(held, 99), named=False)
    assert wants_claim(Match(held, 0), named=True)


def test_best_match_prefers_the_longest_then_the_newest() -> None:
    """Of several branches the one that shares most is taken."""
    prompt = PromptTokens(N, [1] * 300)
    short, long, also_long = holding([1] * 100), holding([1] * 200), holding([1] * 200)
    match = best_match(prompt, [short, long, also_long])
    assert match is not None
    assert match.holding is long
    assert best_match(prompt, []) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        "x",
        [],
        {},
        5,
        {"do_remote_decode": True},
        handle(10, 16, remote_block_ids=[]),
        handle(10, 16, remote_block_ids=[[]]),
        handle(10, 16, remote_block_ids=[["a"]]),
        handle(10, 16, remote_block_ids="x"),
        handle(10, 16, remote_num_tokens=0),
        handle(10, 16, remote_num_tokens="9"),
        handle(10, 16, remote_host=None),
        handle(10, 16, do_remote_decode=False),
    ],
)
def test_what_is_no_handle_is_never_used(value: Any) -> None:
    """null, strings, lists, objects without blocks or address (bugs B5)."""
    assert usable_handle(value) is None


def test_a_real_handle_is_usable_whatever_else_it_holds() -> None:
    """Unknown fields do not matter and are kept."""
    value = handle(10, 16, new_field={"x": [1]})
    assert usable_handle(value) == value


@given(
    prompt=st.integers(1, 200),
    output=st.integers(0, 100),
    hidden=st.integers(0, 3),
    ahead=st.integers(0, 3),
)
def test_held_tokens_claim_nothing_that_the_ids_do_not_prove(
    prompt: int, output: int, hidden: int, ahead: int
) -> None:
    """Never more tokens than computed, never a token that is not the one computed."""
    prompt_ids = list(range(prompt))
    output_ids = list(range(1000, 1000 + output))
    computed = prompt + output - 1 + ahead
    truth = PromptTokens(N, [*prompt_ids, *output_ids, 7, 7, 7, 7][: max(0, computed)])
    for shown, complete in ((output_ids, True), (output_ids[hidden:], False)):
        found = held_tokens(PromptTokens(N, prompt_ids), shown, computed, ids_complete=complete)
        if found is not None:
            assert found.token_count <= computed
            assert truth.common_prefix(found) == found.token_count
        if output and (complete or (hidden == 0 and ahead == 0)):
            assert found is not None
            assert found.token_count == prompt + output - 1


def test_records_survive_storage() -> None:
    """What is stored comes back equal; foreign bytes come back as nothing."""
    held = holding(list(range(300)))
    assert decode("id", encode(held)) == held
    tombstone = Holding("t", "d", "", held.fingerprint, None, Reason.PIN_REFUSED)
    assert decode("t", encode(tombstone)) == tombstone
    for junk in (b"", b"abc", encode(held)[:20], b"\0\0\0\2{}"):
        assert decode("x", junk) is None


def test_stored_records_hold_no_tokens() -> None:
    """Redis sees digests and block ids; the token ids cannot be read back."""
    secret = list(range(70000, 70200))
    record = encode(Holding("i", "d", "", PromptTokens(N, secret).fingerprint, None))
    for token in secret:
        assert str(token).encode() not in record


@pytest.mark.parametrize(
    ("obstacle", "together"),
    [
        ({}, True),
        ({"engines": None}, True),
        ({"place_known": False}, False),
        ({"engines": 2}, False),
        ({"steady": False}, False),
        ({"decode_waiting": 1}, False),
    ],
)
def test_push_legs_go_together_only_where_they_surely_meet(
    obstacle: dict[str, Any], together: bool
) -> None:
    """Decode would wait for ever for writes of an engine that does not get the prefill."""
    facts: dict[str, Any] = {"place_known": True, "engines": 1, "steady": True, "decode_waiting": 0}
    plan = plan_push(**{**facts, **obstacle})
    assert plan.together is together
    assert plan.reason is (Reason.PUSH_ONE_WAY if together else Reason.PUSH_IN_TURN)


def test_may_split_names_what_one_worker_must_do() -> None:
    """n, beam search, prompt_logprobs and echo are not split; explicit defaults are."""
    assert may_split({"n": 2}) is Reason.MULTIPLE_CHOICES
    assert may_split({"best_of": 2}) is Reason.MULTIPLE_CHOICES
    assert may_split({"prompt_logprobs": 0}) is Reason.PROMPT_LOGPROBS
    assert may_split({"n": 1, "echo": False, "prompt_logprobs": None}) is None


def test_media_is_seen_wherever_it_stands() -> None:
    """Any part that is not text counts, typed or not."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert has_media([{"role": "user", "content": [{"type": "text", "text": "a"}, image]}])
    assert has_media([{"role": "user", "content": [{"image_url": "x"}]}])
    assert has_media([{"role": "user", "content": [{"type": "new_kind"}]}])
    assert not has_media([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    assert not has_media([{"role": "user", "content": "a"}])
