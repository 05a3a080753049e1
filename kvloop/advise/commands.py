"""[io] ``kvloop advise``: read files, ask the pure parts, write the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from kvloop.advise.advice import Advice
    from kvloop.advise.fit import Check
    from kvloop.advise.model import Costs, KvModel
    from kvloop.advise.traffic import Traffic
    from kvloop.bench.records import Run


Number = TypeVar("Number", int, float)


def advise(
    traffic_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRAFFIC]",
            help="Our turn log, OpenAI-format JSONL, a log with token counts (JSON lines or CSV), "
            "or a Mooncake or Bailian trace. Without one: the measured run's own traffic.",
        ),
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option("--model", help="The model's config.json, or its folder. Required."),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="run.json of kvloop bench: speeds are fitted to it, errors stated."),
    ] = None,
    arm: Annotated[str, typer.Option(help="Of the measured run, to check pulls.")] = "published",
    kind: Annotated[
        str | None, typer.Option("--format", help="kvloop, openai, counts or hashes; found out.")
    ] = None,
    hash_block: Annotated[
        int | None, typer.Option(min=1, help="Tokens per hash of a block-hash trace.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Of a whole prefill worker, as reached and not as sold."),
    ] = None,
    gbytes_per_second: Annotated[
        float | None,
        typer.Option("--gbps", min=1e-6, help="GB/s from decode to prefill, a worker together."),
    ] = None,
    overhead_ms: Annotated[float, typer.Option(min=0, help="Of any prefill.")] = 20,
    pull_overhead_ms: Annotated[float, typer.Option(min=0, help="Of any pull.")] = 20,
    parameters: Annotated[
        float | None, typer.Option(help="Active parameters in billions, if the estimate is wrong.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="As vLLM's --kv-cache-dtype.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of a worker.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Of the workers, tokens.")] = 16,
    decode_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of all decode workers together.")
    ] = None,
    decode_tokens_per_second: Annotated[
        float | None, typer.Option(min=0.1, help="Of one decode worker, for the P:D ratio.")
    ] = None,
    expiry_margin: Annotated[
        float,
        typer.Option(
            min=0, envvar="KVLOOP_EXPIRY_MARGIN_SECONDS", help="The proxy's setting, seconds."
        ),
    ] = 30,
    prefill_cache_blocks: Annotated[
        int | None,
        typer.Option(
            min=0, help="Prefix cache of one prefill worker; 0: off. With --measured: the run's."
        ),
    ] = None,
    prefill_workers: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    append_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            envvar="KVLOOP_APPEND_TOKENS",
            help="The proxy's setting: additions that decode computes itself; 0: none. "
            "With --measured: as the arm had it, else the proxy's default.",
        ),
    ] = None,
    append_stall_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            envvar="KVLOOP_APPEND_STALL_SECONDS",
            help="The proxy's setting, by default as there: longer additions too, if decode takes "
            "no longer.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, .md and .json.")] = None,
) -> None:
    """Say from traffic whether reuse pays and with which lease, threshold, budget and P:D ratio.

    Exit code 0 also for the advice not to adopt it; 2 if nothing can be said.
    """
    from kvloop import plots
    from kvloop.advise import advice, fit, logs
    from kvloop.advise import model as models
    from kvloop.advise.replay import Appends, PrefillCache
    from kvloop.bench import records

    try:
        if model_config is None:
            _fail("--model is required: how much KV weighs depends on it")
        if out is not None:
            plots.require()
        kv = models.of_config(
            _config(model_config),
            kv_dtype=kv_dtype,
            parameters=parameters * 1e9 if parameters else None,
            tensor_parallel=tensor_parallel,
        )
        run = records.from_json(measured.read_bytes(), str(measured)) if measured else None
        if traffic_file is not None:
            with traffic_file.open(errors="replace") as lines:
                wanted = logs.Format(kind) if kind else None
                traffic = logs.read(lines, kind=wanted, block=hash_block)
        elif run is not None:
            traffic = fit.traffic_of(run, arm)
            if not traffic.turns:
                _fail(f"the run has no arm {arm!r}: {', '.join(a.name for a in run.arms)}")
        else:
            _fail("name a traffic file, or a measured run with --measured")
        costs, checks = _costs(run, kv, tflops, gbytes_per_second, overhead_ms, pull_overhead_ms)
        if prefill_cache_blocks is None and run is not None:
            cache = fit.prefill_cache(run, arm)
        else:
            cache = PrefillCache(float((prefill_cache_blocks or 0) * block_size), prefill_workers)
        if append_tokens is None and run is not None and not fit.appended(arm):
            append_tokens = 0
        pair = advice.Pair(
            block_size,
            decode_blocks,
            decode_tokens_per_second,
            cache,
            expiry_margin,
            Appends(
                _or_default(append_tokens, "append_tokens"),
                _or_default(append_stall_seconds, "append_stall_seconds"),
            ),
        )
        found = advice.advise(traffic, kv, costs, pair)
        if run is not None:
            replayed = fit.check_replay(
                run,
                arm,
                kv,
                costs,
                block=block_size,
                threshold=max(block_size, found.threshold or 1),
                appends=pair.appends,
            )
            kept = fit.check_retained(run, block=block_size)
            checks = (*checks, *replayed, *((kept,) if kept else ()))
    except (
        plots.NoPlots,
        models.UnknownModel,
        records.RunUnreadable,
        logs.UnreadableTraffic,
        fit.CannotFit,
        ValueError,
        OSError,
    ) as error:
        _fail(str(error))
    _say(found, checks, expiry_margin)
    if out is not None:
        _write(out, traffic, kv, costs, pair, found, checks)
        typer.echo(str(out / "report.html"))


def _or_default(given: Number | None, setting: str) -> Number:
    """What was given, or the proxy's own default."""
    from proxy.settings import Settings

    default: Number = Settings.model_fields[setting].default
    return default if given is None else given


def _config(path: Path) -> dict[str, object]:
    path = path / "config.json" if path.is_dir() else path
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a model's config")
    return value


def _costs(
    run: Run | None,
    model: KvModel,
    tflops: float | None,
    gbytes_per_second: float | None,
    overhead_ms: float,
    pull_overhead_ms: float,
) -> tuple[Costs, tuple[Check, ...]]:
    """Given speeds beat fitted ones."""
    from kvloop.advise import fit
    from kvloop.advise.model import Costs

    checks: tuple[Check, ...] = ()
    costs = None
    if run is not None:
        fitted = fit.fit(run, model)
        costs, checks = fitted.costs, fitted.checks
    if costs is None:
        if tflops is None or gbytes_per_second is None:
            raise ValueError("give --tflops and --gbps, or --measured with a run to fit them to")
        costs = Costs(1.0, 1.0, overhead_ms / 1000, pull_overhead_ms / 1000)
    return (
        Costs(
            tflops * 1e12 if tflops else costs.flops_per_second,
            gbytes_per_second * 1e9 if gbytes_per_second else costs.bytes_per_second,
            costs.overhead,
            costs.pull_overhead,
        ),
        checks,
    )


def _say(found: Advice, checks: tuple[Check, ...], margin: float) -> None:
    typer.echo(f"Advice: {found.verdict}")
    for reason in found.reasons:
        typer.echo(f"  - {reason}")
    if found.lease is not None and found.budget_blocks is not None:
        ttl = found.lease + margin
        typer.echo(f"lease {found.lease:g} s (decode's time to live {ttl:g} s)")
        if found.threshold is not None:
            typer.echo(f"pull threshold {found.threshold} tokens")
        share = f", {found.budget_share:.0%} of decode's" if found.budget_share else ""
        typer.echo(f"retained blocks to allow: {found.budget_blocks:,}{share}")
    if found.ratio is not None:
        typer.echo(
            f"prefill workers per decode worker: {found.ratio.with_reuse:.2f} "
            f"({found.ratio.without:.2f} without reuse)"
        )
    for check in checks:
        typer.echo(
            f"checked, {check.what}: median error {check.median_error:.0%}, bias {check.bias:+.0%} "
            f"({check.count} values)"
        )


def _write(
    out: Path,
    traffic: Traffic,
    model: KvModel,
    costs: Costs,
    pair: object,
    found: Advice,
    checks: tuple[Check, ...],
) -> None:
    from pydantic import TypeAdapter

    from kvloop import document
    from kvloop.advise import advice, report

    assert isinstance(pair, advice.Pair)
    blocks = report.build(traffic, model, costs, pair, found, checks)
    out.mkdir(parents=True, exist_ok=True)
    title = "kvloop advise"
    (out / "report.html").write_text(document.html(title, blocks))
    folder = out / "plots"
    folder.mkdir(exist_ok=True)
    for name, svg in document.figures(blocks).items():
        (folder / f"{name}.svg").write_text(svg + "\n")
    (out / "report.md").write_text(document.markdown(title, blocks, figures="plots"))
    as_json = TypeAdapter(advice.Advice).dump_json(found, indent=1)
    (out / "advice.json").write_bytes(as_json + b"\n")


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvloop advise: {message}", err=True)
    raise typer.Exit(2)
