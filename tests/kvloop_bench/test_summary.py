"""Figures from records: each against a case small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvloop.bench import records, summary
from kvloop.bench.records import ArmInfo, Run, RunUnreadable, Sample, Span, Transfer, TurnRecord
from kvloop.bench.stats import Estimate

COLD = TurnRecord("agent", "agent-1", 2, "cold", 100.0, 2.0, ttft=1.0, history="h", answer="a")


def run_of(*turns: TurnRecord, **changes: object) -> Run:
    made = Run(
        title="test",
        started=0,
        ended=1,
        command="kvloop bench run",
        commit="c",
        machine="m",
        model="model",
        seed=1,
        constant=(),
        arms=(ArmInfo("cold", "cold", ""),),
        workers=(),
        turns=turns,
    )
    return replace(made, **changes)


def test_a_run_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    """Zero and unknown are different things, in the file too."""
    zero = replace(COLD, pulled_tokens=0, legs={"prefill": 0.5}, pull=Transfer(0.0, 0.0))
    run = run_of(COLD, zero, samples=(Sample(1.0, "d", 0.0, None), Sample(2.0, "d", None, 0.5)))
    file = tmp_path / "run.json"
    file.write_bytes(records.to_json(run))
    assert records.from_json(file.read_bytes(), file.name) == run


def test_a_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(RunUnreadable, match=r"other\.json"):
        records.from_json(file.read_bytes(), file.name)


def test_arms_are_compared_turn_by_turn() -> None:
    """A slow conversation must not tip the scales: ratios are taken within pairs."""
    turns = []
    for number, slow in enumerate((1.0, 10.0, 100.0), start=1):
        name = f"agent-{number}"
        turns.append(replace(COLD, conversation=name, ttft=2 * slow))
        turns.append(replace(COLD, conversation=name, arm="published", ttft=slow))
    (found,) = summary.compare(turns)
    assert (found.arm, found.baseline) == ("published", "cold")
    assert found.ratio == Estimate(2.0, 2.0, 2.0, 3, 3)
    assert found.slower == 0


def test_first_turns_count_only_where_there_are_no_others() -> None:
    first = replace(COLD, turn=1)
    pair = [first, replace(first, arm="published", ttft=0.5)]
    later = [COLD, replace(COLD, arm="published", ttft=0.25)]
    (found,) = summary.compare([*pair, *later])
    assert found.ratio.value == 4
    (alone,) = summary.compare(pair)
    assert alone.ratio.value == 2


def test_failed_turns_are_counted_and_not_timed() -> None:
    failed = replace(COLD, arm="published", ttft=None, error="HTTP 500")
    assert summary.compare([COLD, failed]) == []
    assert [s.errors for s in summary.sources([failed])] == [1]


def test_prompt_tokens_are_split_by_where_they_came_from() -> None:
    turn = replace(
        COLD,
        prompt_tokens=100,
        pulled_tokens=60,
        prefill_cached_tokens=30,
        route="prefill-with-pull",
    )
    (found,) = summary.sources([turn])
    assert (found.pulled, found.cached, found.computed, found.hits, found.later) == (
        60,
        30,
        10,
        1,
        1,
    )


def test_a_server_without_our_headers_is_read_by_its_usage() -> None:
    turn = replace(COLD, arm="single", prompt_tokens=100, cached_tokens=90)
    (found,) = summary.sources([turn])
    assert (found.pulled, found.cached, found.computed) == (0, 90, 10)


def test_answers_are_compared_only_after_equal_histories() -> None:
    same = replace(COLD, arm="published")
    other = replace(COLD, arm="published", turn=3, answer="b")
    parted = replace(COLD, arm="published", turn=4, history="elsewhere", answer="c")
    reference = [COLD, replace(COLD, turn=3), replace(COLD, turn=4)]
    (found,) = summary.answers([*reference, same, other, parted])
    assert (found.compared, found.different, found.parted) == (2, 1, 1)


def test_the_prefill_leg_is_split_into_transfer_and_the_rest() -> None:
    turn = replace(COLD, legs={"prefill": 0.5, "decode": 0.1}, pull=Transfer(1e6, 0.2))
    (found,) = summary.splits([turn, replace(turn, legs={})], lambda r: r.workload)
    assert (found.turns, found.pull, found.decode) == (1, 0.2, 0.1)
    assert found.compute == pytest.approx(0.3)


def test_a_conversation_that_was_cut_short_is_no_faster_task() -> None:
    whole = [replace(COLD, turn=turn) for turn in (1, 2, 3)]
    short = [replace(COLD, arm="published", turn=turn) for turn in (1, 2)]
    (row,) = summary.task_seconds([*whole, *short])
    assert (row.arm, row.p50.value) == ("cold", 6.0)


def test_throughput_is_what_all_passes_got_done() -> None:
    turns = [replace(COLD, loaded=True, output_tokens=30, prompt_tokens=300) for _ in range(4)]
    spans = [Span("agent", "cold", 0, 0.0, 2.0), Span("agent", "cold", 1, 5.0, 9.0)]
    (found,) = summary.throughput(turns, spans)
    assert (found.passes, found.output_per_second, found.turns_per_second) == (2, 20.0, 4 / 6)


def test_kept_blocks_are_summed_over_decode_workers() -> None:
    looks = (
        Sample(1.0, "d1", 10.0, workload="agent"),
        Sample(1.0, "d2", 5.0, workload="agent"),
        Sample(2.0, "d1", 1.0, workload="agent"),
    )
    (found,) = summary.retained(run_of(samples=looks))
    assert (found.mean, found.peak) == (8.0, 15.0)


def test_production_is_compared_with_what_one_would_run_instead_too() -> None:
    arms = {"prefix-cache": 1.0, "production": 0.5, "single": 0.25, "elsewhere": 9.0}
    turns = [replace(COLD, arm=arm, ttft=seconds) for arm, seconds in arms.items()]
    found = {(each.arm, each.baseline): each.ratio.value for each in summary.compare(turns)}
    assert found == {("production", "prefix-cache"): 2.0, ("production", "single"): 0.5}
