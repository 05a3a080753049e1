"""[pure] A run, or several, as a page. Every number comes from the records.

The order is that of a reader who must decide: what was compared, where it wins, where it does not,
what it costs, whether answers were right, and how to check all this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from kvloop import plots
from kvloop.bench import summary
from kvloop.bench.legs import KNOWN_ARMS
from kvloop.bench.records import Run, TurnRecord
from kvloop.bench.stats import Estimate
from kvloop.bench.workloads import LENGTHS
from kvloop.document import Block, Bullets, Code, Figure, Heading, Table, Text

ARM_COLOURS = dict(zip([*KNOWN_ARMS], plots.COLOURS, strict=False))

FEWEST_CONVERSATIONS = 5
"""Below this an interval over conversations is too narrow to be believed: with two, the bootstrap
sees three mixtures in all."""


def build(runs: Sequence[Run]) -> list[Block]:
    """The page of these runs. Turns of different runs are never compared with each other."""
    runs = labelled(runs)
    turns = joined(runs)
    blocks: list[Block] = []
    blocks += _what(runs)
    blocks += _effect(turns)
    blocks += _published(turns)
    blocks += _times(turns)
    blocks += _throughput(runs)
    blocks += _where_from(turns)
    blocks += _cost(runs, turns)
    blocks += _answers(turns)
    blocks += _again(runs)
    return blocks


def labelled(runs: Sequence[Run]) -> list[Run]:
    """Runs of one title are repetitions and are pooled. Runs of different titles were measured
    under different circumstances: names of workloads then say in which run."""
    if len({run.title for run in runs}) < 2:
        return list(runs)
    numbers: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        numbers.setdefault(run.title, number)
    return [
        _renamed(run, {name: f"{name} (run {numbers[run.title]})" for name in run.workloads})
        for run in runs
    ]


def _renamed(run: Run, names: Mapping[str, str]) -> Run:
    return replace(
        run,
        turns=tuple(replace(t, workload=names.get(t.workload, t.workload)) for t in run.turns),
        samples=tuple(replace(s, workload=names.get(s.workload, s.workload)) for s in run.samples),
        spans=tuple(replace(s, workload=names.get(s.workload, s.workload)) for s in run.spans),
        workloads={names.get(name, name): what for name, what in run.workloads.items()},
    )


def joined(runs: Sequence[Run]) -> list[TurnRecord]:
    """All turns. Conversations of two runs share names, not circumstances: they get new ones."""
    return [
        replace(record, conversation=f"{number}/{record.conversation}")
        for number, run in enumerate(runs, start=1)
        for record in run.turns
    ]


def _what(runs: Sequence[Run]) -> list[Block]:
    arms = {arm.name: arm for run in runs for arm in run.arms}
    workloads = {name: what for run in runs for name, what in run.workloads.items()}
    several = (
        f"{len(runs)} runs. Arms are interleaved within a run; nothing is compared across runs."
        if len(runs) > 1
        else "One run; arms are interleaved in it."
    )
    machines = dict.fromkeys(run.machine for run in runs)
    models = dict.fromkeys(run.model for run in runs)
    first = min(run.started for run in runs)
    blocks: list[Block] = [
        Text(
            f"Model {', '.join(models)} on {'; '.join(machines)}. "
            f"{datetime.fromtimestamp(first, UTC):%d %B %Y}. {several}"
        ),
        Heading("What was compared"),
        Bullets(tuple(f"Run {number}: {run.title}." for number, run in enumerate(runs, start=1))),
        Table(("arm", "what it is"), tuple((arm.name, arm.what) for arm in arms.values())),
        Table(("workload", "what it stands for"), tuple(workloads.items())),
        Heading("Held constant", 3),
        Bullets(tuple(dict.fromkeys(line for run in runs for line in run.constant))),
    ]
    if notes := tuple(dict.fromkeys(note for run in runs for note in run.notes)):
        blocks += [Heading("To know before reading on", 3), Bullets(notes)]
    return blocks


def _effect(turns: Sequence[TurnRecord]) -> list[Block]:
    found = summary.compare(turns)
    if not found:
        return []
    intervals = [
        plots.Interval(f"{e.workload}: {e.arm} / {e.baseline}", e.ratio.value, *_ends(e.ratio))
        for e in found
    ]
    chart = plots.forest(
        "effect", intervals, x="TTFT of the baseline over TTFT of the arm", neutral=1.0
    )
    return [
        Heading("Effect on time to first token"),
        Text(
            "Each turn is compared with the same turn of the same conversation on the arm that "
            "differs in one thing, and production also with one aggregated worker. Median of the "
            "ratios with a 95 % bootstrap interval over conversations; above 1 the arm is faster. "
            "First turns, with nothing to reuse, are left out where a workload has later ones."
        ),
        Figure("effect", chart, "Green: faster; red: slower; grey: the interval includes 1."),
        *effect_table(found),
    ]


def effect_table(found: Sequence[summary.Comparison]) -> list[Block]:
    """The comparisons as rows."""
    rows = tuple(
        (
            each.workload,
            each.arm,
            each.baseline,
            f"{each.ratio.value:.2f}x {_interval(each.ratio, '.2f', 'x')}",
            f"{each.saved.value * 1000:,.0f}",
            f"{each.slower:.0%}",
            f"{each.ratio.count} / {each.ratio.clusters}",
            _verdict(each.ratio),
        )
        for each in found
    )
    return [
        Table(
            (
                "workload",
                "arm",
                "baseline",
                "faster by (95 %)",
                "saved, ms",
                "turns slower",
                "turns / conversations",
                "reading",
            ),
            rows,
        ),
    ]


def _ends(ratio: Estimate) -> tuple[float, float]:
    """The interval as drawn: everything, where too little is known."""
    if ratio.clusters < FEWEST_CONVERSATIONS:
        return 0.0, float("inf")
    return ratio.low, ratio.high


def _verdict(ratio: Estimate) -> str:
    if ratio.clusters < FEWEST_CONVERSATIONS:
        return "too few conversations to say"
    if ratio.low > 1:
        return "faster"
    if ratio.high < 1:
        return "SLOWER"
    return "no difference shown"


def _published(turns: Sequence[TurnRecord]) -> list[Block]:
    mine = [record for record in turns if _of_lengths(record) and record.turn > 1]
    if not mine:
        return []
    asked = sorted({int(record.conversation.split("-")[1]) for record in mine})

    def by_length(record: TurnRecord) -> int:
        return int(record.conversation.split("-")[1])

    rows = summary.quantiles(mine, by_length)
    arms = list(dict.fromkeys(row.arm for row in rows))
    curves = []
    for arm in arms:
        each = [row for row in rows if row.arm == arm]
        known = all(row.p50.clusters > 1 for row in each)
        curves.append(
            plots.Line(
                arm,
                [_length(mine, by_length, row.group) for row in each],
                [row.p50.value * 1000 for row in each],
                [row.p50.low * 1000 for row in each] if known else (),
                [row.p50.high * 1000 for row in each] if known else (),
                colour=ARM_COLOURS.get(arm, ""),
            )
        )
    blocks: list[Block] = [
        Heading("TTFT against prompt length: the published experiment"),
        Text(
            "Turns 2 and later of conversations whose history has a fixed length. Published for a "
            "P5en pair, not measured here: Qwen3-32B 158 to 122 ms at 2k and 778 to 460 ms at 24k; "
            "GLM-5-FP8 500 to 358 ms at 2k and 2,334 to 702 ms at 20k (reuse off to on, prefill "
            "without prefix cache)."
        ),
        Figure(
            "lengths",
            plots.lines("lengths", curves, x="prompt tokens", y="TTFT, ms (median)"),
            "Median TTFT with its 95 % interval.",
        ),
        _quantile_table(rows, "history"),
    ]
    parts = summary.splits(mine, by_length)
    if parts:
        labels = [f"{each.group:,} {each.arm}" for each in parts]
        chart = plots.stacked(
            "split",
            labels,
            {
                "tokenise": [each.tokenise * 1000 for each in parts],
                "pull from decode": [each.pull * 1000 for each in parts],
                "prefill computes": [each.compute * 1000 for each in parts],
                "decode to its first token": [each.decode * 1000 for each in parts],
            },
            x="ms (medians)",
        )
        blocks += [
            Heading("Where the time goes", 3),
            Text(
                "Legs as the proxy logs them. The pull is what prefill's NIXL counters say of this "
                "turn; what is left of the prefill leg is compute, queue and HTTP. The decode leg "
                "holds the transfer from prefill."
            ),
            Figure("split", chart, f"Turns 2 and later, by history length ({len(asked)} lengths)."),
            _split_table(parts, "history"),
        ]
    return blocks


def _of_lengths(record: TurnRecord) -> bool:
    return record.workload.split(" ")[0] == LENGTHS


def _length(turns: Sequence[TurnRecord], group: summary.Group, name: object) -> float:
    found = [record.prompt_tokens or 0 for record in turns if group(record) == name]
    return sorted(found)[len(found) // 2]


def _split_table(parts: Sequence[summary.Split], first: str) -> Table:
    return Table(
        (
            first,
            "arm",
            "prompt",
            "pulled",
            "tokenise, ms",
            "pull, ms",
            "compute, ms",
            "decode leg, ms",
            "MB pulled",
            "MB pushed",
        ),
        tuple(
            (
                f"{each.group:,}" if isinstance(each.group, int) else str(each.group),
                each.arm,
                f"{each.prompt_tokens:,.0f}",
                f"{each.pulled_tokens:,.0f}",
                f"{each.tokenise * 1000:,.0f}",
                f"{each.pull * 1000:,.0f}",
                f"{each.compute * 1000:,.0f}",
                f"{each.decode * 1000:,.0f}",
                f"{each.bytes_pulled / 1e6:,.1f}",
                f"{each.bytes_pushed / 1e6:,.1f}",
            )
            for each in parts
        ),
    )


def _times(turns: Sequence[TurnRecord]) -> list[Block]:
    others = [record for record in turns if not _of_lengths(record)]
    if not others:
        return []
    blocks: list[Block] = [Heading("TTFT by workload, turn and length")]
    blocks.append(_quantile_table(summary.quantiles(others, lambda r: r.workload), "workload"))
    quiet = [record for record in others if not record.loaded]
    for workload in dict.fromkeys(record.workload for record in quiet):
        mine = [record for record in quiet if record.workload == workload]
        if max(record.turn for record in mine) < 3:
            continue
        rows = summary.quantiles(mine, lambda r: r.turn)
        curves = [
            plots.Line(
                arm,
                [float(str(row.group)) for row in rows if row.arm == arm],
                [row.p50.value * 1000 for row in rows if row.arm == arm],
                colour=ARM_COLOURS.get(arm, ""),
            )
            for arm in dict.fromkeys(row.arm for row in rows)
        ]
        name = f"turns-{re.sub(r'[^a-z0-9]+', '-', workload).strip('-')}"
        chart = plots.lines(name, curves, x="turn", y="TTFT, ms (median)", log_y=True)
        blocks.append(Figure(name, chart, f"{workload}: median TTFT by turn, logarithmic."))
        blocks.append(_quantile_table(rows, f"{workload}, turn"))
    classes = summary.length_classes(others)
    by_length = summary.quantiles(others, summary.length_group(classes))
    blocks.append(_quantile_table(by_length, "prompt length about"))
    blocks += [
        Heading("Inter-token latency and whole conversations", 3),
        Text("ITL: gaps between content chunks; with one token a chunk that is time per token."),
        _quantile_table(summary.itl(others), "workload", unit="ITL"),
        Text(
            "Whole conversations: the sum of their turns from request to last byte, without the "
            "client's own pauses; only those that every turn of was answered."
        ),
        _quantile_table(summary.task_seconds(others), "workload", unit="task"),
    ]
    return blocks


def _quantile_table(rows: Sequence[summary.Row], first: str, *, unit: str = "TTFT") -> Table:
    scale, name, digits = (1.0, "s", ",.2f") if unit == "task" else (1000.0, "ms", ",.0f")
    if unit == "ITL":
        digits = ",.1f"
    return Table(
        (first, "arm", f"{unit} p50, {name} (95 %)", f"p95, {name}", f"p99, {name}", "values"),
        tuple(
            (
                f"{row.group:,}" if isinstance(row.group, int) else str(row.group),
                row.arm,
                f"{row.p50.value * scale:{digits}} {_interval(row.p50, digits, '', scale)}",
                f"{row.p95 * scale:{digits}}",
                f"{row.p99 * scale:{digits}}",
                f"{row.p50.count:,}",
            )
            for row in rows
        ),
    )


def _interval(estimate: Estimate, digits: str, unit: str = "", scale: float = 1.0) -> str:
    if estimate.clusters < 2:
        return "(?)"
    return f"({estimate.low * scale:{digits}}{unit}-{estimate.high * scale:{digits}}{unit})"


def _throughput(runs: Sequence[Run]) -> list[Block]:
    rows = []
    for run in runs:
        for each in summary.throughput(run.turns, run.spans):
            rows.append(
                (
                    each.workload,
                    each.arm,
                    str(each.passes),
                    f"{each.seconds.value:,.1f} {_interval(each.seconds, ',.1f')}",
                    f"{each.turns_per_second:.2f}",
                    f"{each.output_per_second:,.1f}",
                    f"{each.prompt_per_second:,.0f}",
                )
            )
    if not rows:
        return []
    return [
        Heading("Throughput at equal load"),
        Text("All clients at once, arms in turn, pass by pass, forwards and backwards."),
        Table(
            (
                "workload",
                "arm",
                "passes",
                "seconds a pass",
                "turns/s",
                "output tokens/s",
                "prompt tokens/s",
            ),
            tuple(rows),
        ),
    ]


def _where_from(turns: Sequence[TurnRecord]) -> list[Block]:
    found = summary.sources(turns)
    labels = [f"{each.workload}: {each.arm}" for each in found]
    chart = plots.stacked(
        "sources",
        labels,
        {
            "computed": [each.computed / max(1, each.prompt) for each in found],
            "worker's own cache": [each.cached / max(1, each.prompt) for each in found],
            "pulled from decode": [each.pulled / max(1, each.prompt) for each in found],
        },
        x="share of prompt tokens",
    )
    return [
        Heading("Where prompt tokens came from"),
        Figure("sources", chart, "Shares of all prompt tokens of an arm's turns."),
        Table(
            (
                "workload",
                "arm",
                "turns",
                "errors",
                "later turns that pulled",
                "prompt tokens",
                "pulled",
                "own cache",
                "computed",
                "reasons",
            ),
            tuple(
                (
                    each.workload,
                    each.arm,
                    str(each.turns),
                    str(each.errors),
                    f"{each.hits} of {each.later}" if each.later else "-",
                    f"{each.prompt:,}",
                    f"{each.pulled / max(1, each.prompt):.0%}",
                    f"{each.cached / max(1, each.prompt):.0%}",
                    f"{each.computed / max(1, each.prompt):.0%}",
                    ", ".join(f"{reason} {count}" for reason, count in each.reasons.items()),
                )
                for each in found
            ),
        ),
    ]


def _cost(runs: Sequence[Run], turns: Sequence[TurnRecord]) -> list[Block]:
    blocks: list[Block] = []
    curves = []
    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(runs, start=1):
        if not any(sample.pinned_blocks is not None for sample in run.samples):
            continue
        start = run.samples[0].time
        known = [s for s in run.samples if s.pinned_blocks is not None]
        label = f"run {number}: {', '.join(dict.fromkeys(s.workload for s in known))}"
        curves.append(
            plots.Line(
                label, [s.time - start for s in known], [s.pinned_blocks or 0 for s in known]
            )
        )
        for each in summary.retained(run):
            share = f"{each.peak / each.of_blocks:.0%}" if each.of_blocks else "?"
            rows.append((each.workload, f"{each.mean:,.0f}", f"{each.peak:,.0f}", share))
    if curves:
        chart = plots.lines(
            "retained", curves, x="seconds", y="KV blocks kept on decode", steps=True
        )
        blocks += [
            Heading("What it costs: KV kept on decode"),
            Text(
                "Blocks that decode keeps for turns that may come, from its own gauge, over all "
                "arms of a run that share it. Kept blocks are missing for running requests."
            ),
            Figure("retained", chart, "Blocks kept over time."),
            Table(
                ("workload", "mean blocks", "peak blocks", "peak share of decode's"), tuple(rows)
            ),
        ]
    moved = summary.splits(
        [record for record in turns if not record.loaded], lambda record: record.workload
    )
    if moved:
        blocks += [
            Heading("Bytes moved and time of each leg, by workload", 3),
            Text("Medians over all turns of an arm, first turns included."),
            _split_table(moved, "workload"),
        ]
    return blocks


def _answers(turns: Sequence[TurnRecord]) -> list[Block]:
    found = summary.answers(turns)
    if not found:
        return []
    wrong = sum(each.different for each in found)
    total = sum(each.compared for each in found)
    return [
        Heading("Were the answers the same?"),
        Text(
            f"Greedy decoding, identical messages: {wrong} of {total} answers differ from the "
            "reference arm's. A difference is either wrong KV or arithmetic in another order, as "
            "other batch shapes bring on a GPU; the arm cold-again, where it was run, shows the "
            "second alone. "
            "After a difference the histories part and later turns are not compared."
        ),
        Table(
            ("workload", "arm", "reference", "compared", "different", "not compared"),
            tuple(
                (
                    each.workload,
                    each.arm,
                    each.reference,
                    str(each.compared),
                    str(each.different),
                    str(each.parted),
                )
                for each in found
            ),
        ),
    ]


def _again(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = [Heading("Run it again")]
    for number, run in enumerate(runs, start=1):
        length = (run.ended - run.started) / 60
        blocks.append(
            Text(
                f"Run {number}: {run.title}, {length:.1f} minutes, seed {run.seed}, "
                f"commit {run.commit}, {len(run.turns)} requests."
            )
        )
        blocks.append(Code(run.command))
        workers = tuple(
            (
                worker.role,
                worker.version or "?",
                _known(worker.block_size),
                _known(worker.blocks),
                {True: "on", False: "off", None: "?"}[worker.prefix_cache],
            )
            for worker in run.workers
        )
        blocks.append(Table(("worker", "vLLM", "block", "KV blocks", "prefix cache"), workers))
        for arm in run.arms:
            if arm.settings:
                settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
                blocks.append(Text(f"Proxy of {arm.name}: {settings}."))
    return blocks


def _known(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
