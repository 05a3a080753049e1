"""[io] ``kvloop bench``: run, report, export, list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from kvloop.bench.records import Run

app = typer.Typer(
    name="bench",
    help="Measure what reuse gains and costs, beside what else there is.",
    no_args_is_help=True,
    add_completion=False,
)

Scale = Annotated[float, typer.Option(min=0.001, help="Factor on all lengths, lengths excepted.")]
Count = Annotated[int, typer.Option("--conversations", min=1, help="Of each workload.")]
Seed = Annotated[int, typer.Option(help="Same seed, same conversations.")]


@app.command("run")
def run_command(
    legs: Annotated[
        str, typer.Option(help="Comma separated; see `kvloop bench list`.")
    ] = "cold,published",
    workloads: Annotated[
        str, typer.Option(help="Comma separated; see `kvloop bench list`.")
    ] = "lengths",
    conversations_file: Annotated[
        Path | None,
        typer.Option("--recorded", help="Also your own conversations, OpenAI-format JSONL."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Start the workers on this machine as well.")
    ] = False,
    prefill: Annotated[
        list[str] | None, typer.Option(help="Running prefill worker; may be given again.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="Running decode worker; may be given again.")
    ] = None,
    single: Annotated[str | None, typer.Option(help="Running aggregated vLLM.")] = None,
    other: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="Another server or router to measure beside."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="With --local: smollm2, tiny or a folder. Else the name to ask for.")
    ] = "",
    profile: Annotated[str, typer.Option(help="With --local: the workers' profile.")] = "cpu-small",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --local: of every worker."),
    ] = None,
    prefill_sets: Annotated[
        list[str] | None,
        typer.Option("--prefill-set", metavar="KEY=VALUE", help="With --local: of prefill only."),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds that decode keeps KV; sets it with --local."),
    ] = None,
    scale: Scale = 1.0,
    count: Count = 6,
    lengths: Annotated[
        str, typer.Option(help="History lengths of the workload lengths.")
    ] = "2000,4000,8000,12000,16000,24000",
    pause_scale: Annotated[float, typer.Option(min=0, help="Factor on the clients' pauses.")] = 1.0,
    clients: Annotated[int, typer.Option(min=1, help="Conversations under way at once.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Passes of loaded workloads.")] = 2,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no new turn starts.")
    ] = None,
    seed: Seed = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("bench-report"),
    title: Annotated[str, typer.Option(help="Of the run.")] = "kvloop bench",
    state_dir: Annotated[
        Path | None, typer.Option(help="Logs of what is started; a new folder.")
    ] = None,
    models_dir: Annotated[
        Path, typer.Option(envvar="KVLOOP_MODELS_DIR", help="Where built models are kept.")
    ] = Path(".kvloop/models"),
    api_key: Annotated[
        str | None, typer.Option(envvar="KVLOOP_API_KEY", help="Sent as a bearer token.")
    ] = None,
    cache_salt: Annotated[
        bool, typer.Option(help="Keep arms apart by vLLM's cache_salt; off for other servers.")
    ] = True,
    start_timeout: Annotated[float, typer.Option(min=1, help="Longest start in seconds.")] = 900,
) -> None:
    """Run workloads against legs, interleaved, and write report.html, report.md and run.json.

    With --local it starts the workers too; otherwise it uses running ones (--prefill, --decode,
    --single) and starts only the proxies, one a leg, on this machine.
    """
    from kvloop import plots
    from kvloop.bench import deployment, measure
    from kvloop.bench import legs as known
    from kvloop.bench import workloads as shapes

    try:
        plots.require()
        arms = known.arms_of(_words(legs))
        deployment.check_arms(arms)
        others = dict(_named_url(item) for item in other or [])
        if local and (prefill or decode or single):
            _fail("--local starts its own workers; leave out --prefill, --decode and --single")
        for name in _words(workloads):
            shapes.describe(name)
        sizes = shapes.Sizes(
            scale=scale,
            count=count,
            lease_seconds=lease or 480.0,
            lengths=tuple(int(word) for word in _words(lengths)),
            pause_scale=pause_scale,
            clients=clients,
        )
        pair = None
        if local:
            pair = deployment.LocalPair(
                model=model or "smollm2",
                models=models_dir,
                profile=profile,
                lease_seconds=lease or 480.0,
                sets=tuple(sets or ()),
                prefill_sets=tuple(prefill_sets or ()),
            )
        wanted = measure.Wanted(
            arms=arms,
            workloads=tuple(_words(workloads)),
            sizes=sizes,
            prefills=tuple(prefill or ()),
            decodes=tuple(decode or ()),
            single=single,
            pair=pair,
            others=others,
            recorded=conversations_file,
            repeats=repeats,
            limit=limit,
            seed=seed,
            model="" if local else model,
            api_key=api_key,
            cache_salt=cache_salt,
            lease=lease,
            title=title,
            state_dir=state_dir,
            start_timeout=start_timeout,
        )
        run = measure.measure(wanted, _tell)
    except KeyError as error:
        _fail(f"unknown workload {error}; known: {', '.join(shapes.names())}")
    except (
        plots.NoPlots,
        known.UnknownLeg,
        deployment.CannotBench,
        shapes.UnknownWorkload,
        ValueError,
        LookupError,
        OSError,
    ) as error:
        _fail(str(error))
    _write_run(run, out)
    _write_report([run], out, title)
    failed = sum(not turn.ok for turn in run.turns)
    typer.echo(f"{out / 'report.html'}: {len(run.turns)} requests, {failed} of them failed")
    raise typer.Exit(1 if failed == len(run.turns) else 0)


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="run.json files of earlier runs.")],
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("bench-report"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "kvloop bench",
) -> None:
    """One page of one or more runs. Arms of different runs are never compared with each other."""
    from kvloop import plots
    from kvloop.bench import records

    try:
        plots.require()
        found = [records.from_json(path.read_bytes(), str(path)) for path in runs]
    except (plots.NoPlots, records.RunUnreadable, OSError) as error:
        _fail(str(error))
    _write_report(found, out, title)
    typer.echo(str(out / "report.html"))


@app.command("export")
def export_command(
    workload: Annotated[str, typer.Argument(help="See `kvloop bench list`.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    scale: Scale = 1.0,
    count: Count = 6,
    words_per_token: Annotated[float, typer.Option(min=0.1, help="Of your tokenizer.")] = 0.95,
    seed: Seed = 1,
) -> None:
    """Write a workload as an AIPerf multi_turn dataset: measure with a tool that is not ours."""
    from kvloop.bench import export
    from kvloop.bench import workloads as shapes

    try:
        made = shapes.make(
            workload,
            shapes.Sizes(scale=scale, count=count),
            words_per_token=words_per_token,
            seed=seed,
        )
        out.write_text("".join(line + "\n" for line in export.aiperf_lines(made)))
    except (shapes.UnknownWorkload, export.CannotExport, OSError) as error:
        _fail(str(error))
    typer.echo(f"aiperf profile --custom-dataset-type multi_turn --input-file {out} ...")


@app.command("list")
def list_command() -> None:
    """The legs and workloads that there are."""
    from kvloop.bench import legs as known
    from kvloop.bench import workloads as shapes

    typer.echo("legs")
    for leg, arms in known.LEGS.items():
        typer.echo(f"  {leg:<13} {'; '.join(f'{arm.name}: {arm.what}' for arm in arms)}")
    typer.echo("workloads")
    for name in shapes.names():
        typer.echo(f"  {name:<13} {shapes.describe(name)}")


def _write_run(run: Run, out: Path) -> None:
    from kvloop.bench import records

    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_bytes(records.to_json(run))


def _write_report(runs: Sequence[Run], out: Path, title: str) -> None:
    from kvloop import document
    from kvloop.bench import report

    blocks = report.build(runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(document.html(title, blocks))
    folder = out / "plots"
    folder.mkdir(exist_ok=True)
    for name, svg in document.figures(blocks).items():
        (folder / f"{name}.svg").write_text(svg + "\n")
    (out / "report.md").write_text(document.markdown(title, blocks, figures="plots"))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _named_url(item: str) -> tuple[str, str]:
    name, equals, url = item.partition("=")
    if not equals or not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"--other takes NAME=http://..., not {item!r}")
    return name, url.rstrip("/")


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvloop bench: {message}", err=True)
    raise typer.Exit(2)
