"""The page: one file, every figure, and no good face on a bad result."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvloop import document, plots
from kvloop.bench import records, report
from kvloop.bench.commands import app
from kvloop.bench.records import Run, Sample, Span, Transfer, TurnRecord, WorkerInfo
from tests.kvloop_bench.test_summary import run_of


@cache
def blocks() -> tuple[document.Block, ...]:
    """Made once: plots take a second."""
    return tuple(report.build([a_run()]))


def a_run() -> Run:
    """Six conversations a workload: ``published`` is twice as fast on lengths and slower late."""
    turns = []
    for number in range(1, 7):
        for turn in (1, 2, 3):
            for arm in ("cold", "published"):
                fast = arm == "published" and turn > 1
                base = TurnRecord(
                    "lengths",
                    f"length-800-{number}",
                    turn,
                    arm,
                    100.0 + number,
                    1.0,
                    ttft=0.1 if fast else 0.2 + number / 1000,
                    itl=(0.01, 0.02),
                    prompt_tokens=800,
                    output_tokens=3,
                    pulled_tokens=700 if fast else 0,
                    prefill_cached_tokens=0,
                    route="prefill-with-pull" if fast else "cold-prefill",
                    reason="history_grew" if fast else "new_session",
                    legs={"prefill": 0.08, "decode": 0.02, "tokenise": 0.001},
                    pull=Transfer(7e6 if fast else 0, 0.01 if fast else 0),
                    push=Transfer(8e6, 0.01),
                    history="h",
                    answer="a",
                )
                turns.append(base)
                late = replace(base, workload="late", conversation=f"late-{number}")
                turns.append(replace(late, ttft=0.4 if arm == "published" else 0.2))
    busy = [
        replace(turn, workload="burst", conversation=f"burst-{n}", loaded=True)
        for n, turn in enumerate(turns[:4])
    ]
    return run_of(
        *turns,
        *busy,
        samples=(Sample(1.0, "d", 0.0, 0.1, "lengths"), Sample(2.0, "d", 50.0, 0.2, "lengths")),
        spans=(Span("burst", "cold", 0, 0, 1), Span("burst", "published", 0, 1, 2)),
        workers=(WorkerInfo("decode 1", "decode", 32, 100, True, "0.32.0"),),
        workloads={"lengths": "fixed lengths", "late": "pauses beyond the lease"},
        notes=("<the machine was busy>",),
    )


class Page(HTMLParser):
    """What the page would load, its ids, and whether its tags are closed."""

    VOID = ("meta", "br", "path", "use", "rect", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads += [v or "" for k, v in attrs if k in ("src", "srcset", "data")]
        if tag in ("link", "script", "iframe"):
            self.loads.append(tag)
        if values.get("id"):
            self.ids.append(values["id"] or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_is_one_file_that_loads_nothing() -> None:
    page = Page()
    page.feed(document.html("Title <1>", blocks()))
    assert page.loads == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "plots share ids"


@pytest.mark.slow
def test_the_same_run_gives_the_same_page() -> None:
    assert document.html("t", report.build([a_run()])) == document.html("t", blocks())


def test_every_figure_that_was_asked_for_is_there() -> None:
    text = document.markdown("t", blocks(), figures="plots")
    for words in (
        "| lengths | published | cold | 2.",
        "TTFT p50",
        "p99",
        "ITL p50",
        "task p50",
        "output tokens/s",
        "| 800 | published | 800 | 700 |",
        "own cache",
        "MB pulled",
        "peak blocks",
        "0 of 36 answers differ",
        "kvloop bench run",
        "seed 1",
    ):
        assert words in text, words


def test_what_is_slower_is_called_slower() -> None:
    text = document.markdown("t", blocks())
    lines = [
        line for line in text.splitlines() if line.startswith("| late | published | cold | 0.")
    ]
    (line,) = lines
    assert "0.50x" in line
    assert "100%" in line
    assert "SLOWER" in line


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only words are looked at: drawing takes most of a report's time."""
    monkeypatch.setattr(plots, "_svg", lambda name, draw, height=0: "<svg></svg>")


@pytest.mark.usefixtures("no_plots")
def test_few_conversations_prove_nothing() -> None:
    run = a_run()
    few = [t for t in run.turns if t.conversation in ("length-800-1", "length-800-2")]
    text = document.markdown("t", report.build([replace(run, turns=tuple(few))]))
    assert "too few conversations to say" in text


@pytest.mark.usefixtures("no_plots")
def test_a_wrong_answer_is_counted_in_the_page() -> None:
    run = a_run()
    right, arm = run.turns[0], run.turns[2]
    assert (right.arm, arm.arm) == ("cold", "published")
    wrong = replace(arm, answer="other")
    text = document.markdown("t", report.build([replace(run, turns=(right, wrong))]))
    assert "1 of 1 answers differ" in text


def test_text_cannot_become_markup() -> None:
    page = document.html("t", blocks())
    assert "<the machine was busy>" not in page
    assert "&lt;the machine was busy&gt;" in page


@pytest.mark.usefixtures("no_plots")
def test_runs_are_joined_without_being_compared(tmp_path: Path) -> None:
    """An arm that only the second run has gets no baseline from the first."""
    run = a_run()
    cold = replace(run, turns=tuple(t for t in run.turns if t.arm == "cold"))
    warm = replace(run, turns=tuple(t for t in run.turns if t.arm == "published"))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, each in zip(files, (cold, warm), strict=True):
        file.write_bytes(records.to_json(each))
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["report", *map(str, files), "--out", str(out)])
    assert done.exit_code == 0, done.output
    text = (out / "report.md").read_text()
    assert "Effect on time to first token" not in text
    assert (out / "report.html").exists()
    assert list((out / "plots").glob("*.svg"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--legs", "fast"], "unknown leg 'fast'"),
        (["run", "--legs", "cold", "--workloads", "nothing"], "unknown workload 'nothing'"),
        (["run", "--local", "--decode", "http://d"], "--local starts its own workers"),
        (["run", "--other", "x"], "--other takes NAME=http"),
        (["export", "coding", "--out", "x"], "AIPerf cannot rewrite"),
        (["report", "no-such-file"], "no-such-file"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_the_list_names_legs_and_workloads() -> None:
    done = CliRunner().invoke(app, ["list"])
    for word in ("published", "production", "single", "decode-local", "agent", "late"):
        assert word in done.output


def test_repetitions_are_pooled_and_other_circumstances_are_kept_apart() -> None:
    run = a_run()
    pooled = report.labelled([run, replace(run, seed=2)])
    assert {turn.workload for each in pooled for turn in each.turns} == {"lengths", "late", "burst"}
    apart = report.labelled([run, replace(run, title="small cache"), replace(run, seed=2)])
    names = [{turn.workload.removeprefix("lengths") for turn in each.turns} for each in apart]
    assert " (run 1)" in names[0] & names[2]
    assert " (run 2)" in names[1]
    assert set(apart[1].workloads) == {"lengths (run 2)", "late (run 2)"}
