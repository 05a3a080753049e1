"""Fitted speeds and stated errors."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvloop.advise import fit
from kvloop.advise.model import Costs, KvModel
from kvloop.advise.replay import Appends
from kvloop.bench.records import ArmInfo, Sample, Transfer, TurnRecord, WorkerInfo
from tests.kvloop_bench.test_summary import run_of

MODEL = KvModel("test", kv_bytes=1e5, parameters=1e9, attention=1e6)
TRUE = Costs(flops_per_second=1e12, bytes_per_second=1e9, overhead=0.03, pull_overhead=0.05)


def turns(noise: float) -> list[TurnRecord]:
    """Three turns of each conversation as ``TRUE`` takes them, give or take ``noise``."""
    dice = random.Random(1)
    found = []
    for number in range(12):
        for turn in (1, 2, 3):
            prompt = 400 * turn + 50 * number
            for arm, pulled in (("cold", 0), ("published", prompt - 100 if turn > 1 else 0)):
                record = TurnRecord(
                    "agent",
                    f"agent-{number}",
                    turn,
                    arm,
                    100.0 * turn,
                    2.0,
                    ttft=1.0,
                    prompt_tokens=prompt,
                    output_tokens=100,
                    pulled_tokens=pulled,
                    pull=Transfer(pulled * 1e5, pulled * 1e5 / TRUE.bytes_per_second),
                )
                seconds = fit.predicted(record, MODEL, TRUE) * (1 + dice.uniform(-noise, noise))
                found.append(replace(record, legs={"prefill": seconds}))
    return found


def test_exact_measurements_give_the_true_speeds_and_no_error() -> None:
    found = fit.fit(run_of(*turns(noise=0)), MODEL)
    assert found.costs.flops_per_second == pytest.approx(TRUE.flops_per_second, rel=1e-6)
    assert found.costs.bytes_per_second == pytest.approx(TRUE.bytes_per_second, rel=1e-6)
    assert found.costs.overhead == pytest.approx(TRUE.overhead, rel=1e-6)
    assert found.costs.pull_overhead == pytest.approx(TRUE.pull_overhead, rel=1e-6)
    assert [check.median_error for check in found.checks] == pytest.approx([0, 0], abs=1e-6)


def test_the_stated_error_is_of_the_size_of_the_noise() -> None:
    found = fit.fit(run_of(*turns(noise=0.2)), MODEL)
    for check in found.checks:
        assert 0.04 < check.median_error < 0.25


def test_a_machine_that_stalled_now_and_then_does_not_spoil_the_fit() -> None:
    """One turn in seven took ten times as long."""
    made = turns(noise=0)
    stalled = [
        replace(t, legs={"prefill": t.legs["prefill"] * (10 if n % 7 == 5 else 1)})
        for n, t in enumerate(made)
    ]
    found = fit.fit(run_of(*stalled), MODEL)
    assert found.costs.flops_per_second == pytest.approx(TRUE.flops_per_second, rel=0.1)
    assert all(check.median_error < 0.1 for check in found.checks)


def test_a_run_of_one_length_cannot_be_fitted() -> None:
    same = [replace(t, prompt_tokens=400, pulled_tokens=0) for t in turns(noise=0)]
    with pytest.raises(fit.CannotFit, match="two lengths"):
        fit.fit(run_of(*same), MODEL)


def test_pulls_are_predicted_from_lengths_and_times_alone() -> None:
    """Turn 2 and 3 repeat what the last turn left: prompt + 100 - 1 tokens."""
    made = [
        replace(t, pulled_tokens=(t.prompt_tokens - 400 + 99) if t.turn > 1 else 0)
        for t in turns(noise=0)
        if t.arm == "published"
    ]
    run = run_of(*made, lease_seconds=480.0)
    (check,) = fit.check_replay(run, "published", MODEL, TRUE, block=16, threshold=64)
    assert check.median_error == pytest.approx(0, abs=1e-9)
    early = replace(run, lease_seconds=10.0)
    (missed,) = fit.check_replay(early, "published", MODEL, TRUE, block=16, threshold=64)
    pulled = sum(t.pulled_tokens or 0 for t in made) / sum(t.prompt_tokens or 0 for t in made)
    assert missed.bias == pytest.approx(-pulled)


def test_what_prefill_s_own_cache_has_is_not_pulled() -> None:
    """The run says how large it is; the arms that use it have a part each."""
    made = [replace(t, arm="production", pulled_tokens=99) for t in turns(noise=0)]
    worker = WorkerInfo("p", "prefill", block_size=16, blocks=10_000, prefix_cache=True)
    arms = tuple(ArmInfo(name, "", "") for name in ("production", "prefix-cache", "cold"))
    run = replace(run_of(*made, lease_seconds=480.0), workers=(worker,), arms=arms)
    assert fit.prefill_cache(run, "production").tokens == 80_000
    assert fit.prefill_cache(run, "cold").tokens == 0
    unknown = replace(run, workers=())
    (with_cache,) = fit.check_replay(run, "production", MODEL, TRUE, block=16, threshold=64)
    (without,) = fit.check_replay(unknown, "production", MODEL, TRUE, block=16, threshold=64)
    assert with_cache.bias < without.bias


def test_turns_that_decode_computes_are_predicted_from_lengths_and_times() -> None:
    """Each turn adds 301 tokens: as many as decode computes itself, or one more than that."""
    made = [
        replace(t, arm="decode-local", route="decode-local-append" if t.turn > 1 else "")
        for t in turns(noise=0)
        if t.arm == "cold"
    ]
    run = run_of(*made, lease_seconds=480.0)
    (all_of_them,) = fit.check_replay(
        run, "decode-local", MODEL, TRUE, block=16, threshold=64, appends=Appends(301)
    )
    (none,) = fit.check_replay(
        run, "decode-local", MODEL, TRUE, block=16, threshold=64, appends=Appends(300)
    )
    assert (all_of_them.bias, none.bias) == (pytest.approx(0), pytest.approx(-2 / 3))
    assert fit.appended("decode-local")
    assert not fit.appended("production")


def test_kept_blocks_are_held_against_decode_s_own_gauge() -> None:
    """One conversation of 160 tokens kept for 10 of 20 seconds: ten blocks, five on average."""
    one = TurnRecord("agent", "a", 1, "published", 0.0, 0.0, ttft=0.1, prompt_tokens=160)
    other = replace(one, conversation="b", started=20.0, prompt_tokens=1)
    looks = tuple(Sample(t, "d", 10.0 if t <= 10 else 0.0) for t in (2.0, 7.0, 12.0, 17.0))
    arms = (ArmInfo("published", "", ""), ArmInfo("cold", "", ""))
    run = run_of(one, other, arms=arms, samples=looks, lease_seconds=10.0)
    check = fit.check_retained(run, block=16)
    assert check is not None
    assert check.bias == pytest.approx(0)
    doubled = replace(run, samples=tuple(replace(s, pinned_blocks=20.0) for s in looks))
    assert fit.check_retained(doubled, block=16).bias == pytest.approx(-0.75)
    assert fit.check_retained(replace(run, arms=arms[1:]), block=16) is None
