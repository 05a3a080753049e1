"""[pure] Advice as a page."""

from __future__ import annotations

from collections.abc import Sequence

from kvloop import plots
from kvloop.advise import replay
from kvloop.advise.advice import DECODE_SHARE, LEASES, Advice, Pair, Verdict
from kvloop.advise.fit import Check
from kvloop.advise.model import Costs, KvModel
from kvloop.advise.traffic import Traffic
from kvloop.document import Block, Bullets, Code, Figure, Heading, Table, Text


def build(
    traffic: Traffic,
    model: KvModel,
    costs: Costs,
    pair: Pair,
    advice: Advice,
    checks: Sequence[Check] = (),
) -> list[Block]:
    """The whole page."""
    blocks: list[Block] = [Heading(f"Advice: {advice.verdict}"), Bullets(advice.reasons)]
    blocks += _settings(advice, costs, pair, model)
    blocks += _sharing(traffic)
    if traffic.timed and advice.outcomes:
        blocks += _leases(traffic, advice, pair, model)
    blocks += _crossover(model, costs, pair, advice)
    blocks += _trust(traffic, model, costs, pair, checks)
    return blocks


def _settings(advice: Advice, costs: Costs, pair: Pair, model: KvModel) -> list[Block]:
    if advice.verdict is not Verdict.ADOPT or advice.chosen is None or advice.lease is None:
        return []
    chosen, ttl = advice.chosen, advice.lease + pair.margin
    rows = [
        (
            "lease",
            f"{advice.lease:g} s",
            f"decode keeps blocks {ttl:g} s: the proxy's margin of {pair.margin:g} s longer",
        ),
        (
            "pull threshold",
            f"{advice.threshold:,} tokens" if advice.threshold else "no pulls",
            "proxy: KVLOOP_PULL_THRESHOLD",
        ),
        (
            "additions computed on decode",
            f"up to {pair.appends.tokens:,} tokens" if pair.appends.tokens else "none",
            f"or up to {pair.appends.stall * 1000:,.0f} ms; needs kvloop's connector and plugin"
            if pair.appends.tokens
            else "proxy: KVLOOP_DECODE_LOCAL_APPEND",
        ),
        (
            "retained blocks to allow",
            f"{advice.budget_blocks:,}"
            + (f" ({advice.budget_share:.0%} of decode's)" if advice.budget_share else ""),
            f"{model.bytes_of((advice.budget_blocks or 0) * pair.block) / 2**30:,.1f} GiB",
        ),
        (
            "bandwidth from decode to prefill",
            f"{chosen.peak_bytes_per_second / 1e9:,.2f} GB/s",
            "busiest ten seconds of the traffic",
        ),
    ]
    if advice.ratio is not None:
        rows.append(
            (
                "prefill workers per decode worker",
                f"{advice.ratio.with_reuse:.2f}",
                f"{advice.ratio.without:.2f} without reuse",
            )
        )
    proxy = [f"KVLOOP_DECODE_KV_TTL_SECONDS={ttl:g}"]
    prefill = ["kvloop worker prefill ..."]
    if advice.threshold:
        proxy.append(f"KVLOOP_PULL_THRESHOLD={advice.threshold}")
        prefill.append(f"--set kv.kv_recompute_threshold={advice.threshold}")
    if pair.appends.tokens:
        proxy.append(f"KVLOOP_APPEND_TOKENS={pair.appends.tokens}")
    else:
        proxy.append("KVLOOP_DECODE_LOCAL_APPEND=false")
    decode = f"kvloop worker decode ... --set kv.decoder_kv_blocks_ttl={ttl:g}"
    environment = "\n".join((" ".join(proxy), decode, " ".join(prefill)))
    return [Table(("setting", "value", "note"), tuple(rows)), Code(environment)]


def _sharing(traffic: Traffic) -> list[Block]:
    rows = replay.repeats(traffic)
    blocks: list[Block] = [
        Heading("What repeats"),
        Text(
            f"{replay.repeated_share(traffic):.0%} of all prompt tokens are what the turn before "
            "left in the KV cache. By turn of a conversation:"
        ),
        Table(
            ("turn", "requests", "prompt tokens, median", "of these repeated, median"),
            tuple(
                (str(r.number), f"{r.turns:,}", f"{r.prompt:,.0f}", f"{r.shared:.0%}") for r in rows
            ),
        ),
    ]
    if len(rows) > 1:
        curves = [
            plots.Line("prompt", [r.number for r in rows], [r.prompt for r in rows]),
            plots.Line("repeated", [r.number for r in rows], [r.prompt * r.shared for r in rows]),
        ]
        chart = plots.lines("repeats", curves, x="turn", y="tokens (median)")
        blocks.insert(
            2, Figure("repeats", chart, "Prompt length, and what of it repeats, by turn.")
        )
    return blocks


def _leases(traffic: Traffic, advice: Advice, pair: Pair, model: KvModel) -> list[Block]:
    found = [gap for gap in replay.gaps(traffic) if gap > 0]
    blocks: list[Block] = [Heading("Gaps and leases")]
    if found:
        x, y = plots.cumulative(found)
        marks = {f"{advice.lease:g} s": advice.lease} if advice.lease else {}
        chart = plots.lines(
            "gaps",
            [plots.Line("gaps", x, y, marks=False)],
            x="seconds to the next turn",
            y="share of next turns",
            log_x=True,
            vertical=marks,
        )
        blocks.append(Figure("gaps", chart, "Share of next turns that come within a time."))
    limit = pair.decode_blocks * DECODE_SHARE if pair.decode_blocks else None
    curves = [
        plots.Line("mean", LEASES, [o.retention.mean for o in advice.outcomes]),
        plots.Line("95 % of the time below", LEASES, [o.retention.p95 for o in advice.outcomes]),
    ]
    if limit:
        curves.append(
            plots.Line(
                "decode's limit", [LEASES[0], LEASES[-1]], [limit, limit], dashed=True, marks=False
            )
        )
    chart = plots.lines("kept", curves, x="lease, s", y="KV blocks kept", log_x=True)
    blocks.append(Figure("kept", chart, "Blocks kept on decode for each lease."))
    blocks.append(
        Table(
            (
                "lease, s",
                "next turns caught",
                "turns that pull",
                "computed on decode",
                "prompt tokens pulled",
                "prefill time saved",
                "saved a pull, ms, p50",
                "blocks kept, mean",
                "p95",
                "peak",
                "peak, GiB",
            ),
            tuple(
                (
                    f"{o.lease:g}",
                    f"{o.caught / max(1, o.later):.0%}",
                    f"{o.pulls:,}",
                    f"{o.appends:,}",
                    f"{o.pulled / max(1.0, o.prompt):.0%}",
                    f"{o.saved_share:.1%}",
                    f"{sorted(o.saved_per_turn)[len(o.saved_per_turn) // 2] * 1000:,.0f}"
                    if o.saved_per_turn
                    else "-",
                    f"{o.retention.mean:,.0f}",
                    f"{o.retention.p95:,.0f}",
                    f"{o.retention.peak:,.0f}",
                    f"{model.bytes_of(o.retention.peak * pair.block) / 2**30:,.1f}",
                )
                for o in advice.outcomes
            ),
        )
    )
    return blocks


def _crossover(model: KvModel, costs: Costs, pair: Pair, advice: Advice) -> list[Block]:
    lengths = [pair.block * 2**step for step in range(14)]
    lengths = [length for length in lengths if length <= 200_000]
    curves = [
        # Without what any prefill costs: a turn that pulls its prefix pays that too.
        plots.Line(
            "compute",
            lengths,
            [(costs.compute(model, n) - costs.overhead) * 1000 for n in lengths],
        ),
        plots.Line("pull", lengths, [costs.pull(model, n) * 1000 for n in lengths]),
    ]
    marks = {f"{advice.crossover:,}": float(advice.crossover)} if advice.crossover else {}
    chart = plots.lines(
        "crossover", curves, x="prefix, tokens", y="ms", log_x=True, log_y=True, vertical=marks
    )
    sentence = (
        f"From {advice.crossover:,} tokens on, pulling a prefix is quicker than computing it."
        if advice.crossover
        else "At these speeds no prefix is quicker to pull than to compute."
    )
    speeds = (1, 5, 12.5, 25, 50, 100)
    rows = []
    for speed in speeds:
        other = Costs(
            costs.flops_per_second, speed * 1e9, costs.overhead, costs.pull_overhead
        ).crossover(model, block=pair.block)
        rows.append((f"{speed:g} GB/s", f"{other:,}" if other else "never"))
    return [
        Heading("When a pull beats computing"),
        Text(sentence),
        Figure("crossover", chart, "Time of a prefix by its length, both axes logarithmic."),
        Table(("bandwidth", "pull wins from, tokens"), tuple(rows)),
    ]


def _trust(
    traffic: Traffic, model: KvModel, costs: Costs, pair: Pair, checks: Sequence[Check]
) -> list[Block]:
    cache = pair.cache
    given = [
        f"source: {traffic.source}, {len(traffic.turns):,} turns",
        f"model {model.name}: {model.kv_bytes * model.copies / 1024:,.1f} KiB of KV a token, "
        f"{model.parameters / 1e9:,.2f} billion active parameters",
        f"prefill {costs.flops_per_second / 1e12:,.3g} TFLOP/s, "
        f"{costs.bytes_per_second / 1e9:,.3g} GB/s from decode, "
        f"{costs.overhead * 1000:,.0f} ms a prefill, "
        f"{costs.pull_overhead * 1000:,.0f} ms more a pull",
        f"block of {pair.block} tokens; decode blocks "
        + (f"{pair.decode_blocks:,}" if pair.decode_blocks else "not given"),
        f"prefill's own cache: {cache.tokens:,.0f} tokens in each of {cache.workers} workers"
        if cache.tokens
        else "prefill's own cache: off",
    ]
    blocks: list[Block] = [
        Heading("What this rests on"),
        Bullets((*given, *traffic.assumed)),
        Text(
            "Not modelled: queueing (saved prefill time shortens queues, so TTFT gains more under "
            "load), the effect of kept blocks on running requests, transfers that share a link."
        ),
    ]
    if traffic.skipped:
        blocks.append(
            Bullets(
                tuple(f"{count:,} lines left out: {why}" for why, count in traffic.skipped.items())
            )
        )
    if checks:
        blocks += [
            Heading("The model beside measured runs", 3),
            Text("Speeds fitted on half of the conversations and tried on the others, both ways."),
            Table(
                ("predicted", "values", "median error", "bias"),
                tuple(
                    (c.what, f"{c.count:,}", f"{c.median_error:.0%}", f"{c.bias:+.0%}")
                    for c in checks
                ),
            ),
        ]
    else:
        blocks.append(Text("Not checked against a run: give one with --measured run.json."))
    return blocks
