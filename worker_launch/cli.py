"""[io] ``kvloop worker``: prefill, decode, model. Also ``python -m worker_launch``.

Exit codes: 2 for a request that makes no sense, 1 for an environment that cannot carry it out, else
the worker's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from worker_launch import launcher, models, profiles

app = typer.Typer(
    name="worker",
    help="Start vLLM workers that exchange KV blocks in both directions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: an error must be found by grep, and not be broken at a frame's edge.
    rich_markup_mode=None,
)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": False}

Profile = Annotated[str, typer.Option(help="Settings for a kind of machine.")]
Model = Annotated[str, typer.Option(help="Model folder or Hugging Face name.")]
ServedName = Annotated[str, typer.Option(help="Name under which clients ask for the model.")]
Host = Annotated[str, typer.Option(help="Address for HTTP.")]
Port = Annotated[int, typer.Option(help="Port for HTTP.")]
SideHost = Annotated[str, typer.Option(help="Own address as the other worker reaches it (NIXL).")]
SidePort = Annotated[int, typer.Option(help="Port of the NIXL side channel.")]
Mode = Annotated[
    profiles.TransferMode,
    typer.Option(
        help="pull: workers read each other's blocks; push: prefill writes into decode, by vLLM's "
        "own connector, and no history flows back. Equal on both workers."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")]
Explain = Annotated[bool, typer.Option("--explain", help="With --dry-run: say why, per setting.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a vLLM flag, a connector setting (kv.KEY) or a variable (env.NAME); "
        "an empty value removes it.",
    ),
]


@app.command(context_settings=_PASS_ON)
def prefill(
    context: typer.Context,
    model: Model,
    served_model_name: ServedName,
    profile: Profile = profiles.CPU_SMALL.name,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    side_channel_host: SideHost = "127.0.0.1",
    side_channel_port: SidePort = 5600,
    transfer_mode: Mode = profiles.TransferMode.PULL,
    sets: Sets = None,
    dry_run: DryRun = False,
    explain: Explain = False,
) -> None:
    """Run a prefill worker. Arguments after -- go to vLLM unchanged."""
    _run_worker(
        profiles.Role.PREFILL,
        profile,
        model=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        side_channel_host=side_channel_host,
        side_channel_port=side_channel_port,
        transfer_mode=transfer_mode,
        sets=sets or [],
        extra=context.args,
        dry_run=dry_run,
        explain=explain,
    )


@app.command(context_settings=_PASS_ON)
def decode(
    context: typer.Context,
    model: Model,
    served_model_name: ServedName,
    profile: Profile = profiles.CPU_SMALL.name,
    host: Host = "127.0.0.1",
    port: Port = 8200,
    side_channel_host: SideHost = "127.0.0.1",
    side_channel_port: SidePort = 5700,
    transfer_mode: Mode = profiles.TransferMode.PULL,
    sets: Sets = None,
    dry_run: DryRun = False,
    explain: Explain = False,
) -> None:
    """Run a decode worker. Arguments after -- go to vLLM unchanged."""
    _run_worker(
        profiles.Role.DECODE,
        profile,
        model=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        side_channel_host=side_channel_host,
        side_channel_port=side_channel_port,
        transfer_mode=transfer_mode,
        sets=sets or [],
        extra=context.args,
        dry_run=dry_run,
        explain=explain,
    )


def _run_worker(
    role: profiles.Role,
    profile: str,
    *,
    model: str,
    served_model_name: str,
    host: str,
    port: int,
    side_channel_host: str,
    side_channel_port: int,
    transfer_mode: profiles.TransferMode,
    sets: list[str],
    extra: list[str],
    dry_run: bool,
    explain: bool,
) -> None:
    try:
        command = profiles.build_command(
            profiles.profile_named(profile),
            role,
            model=model,
            served_model_name=served_model_name,
            host=host,
            port=port,
            side_channel_host=side_channel_host,
            side_channel_port=side_channel_port,
            python_executable=launcher.own_interpreter(),
            transfer_mode=transfer_mode,
            overrides=profiles.parse_overrides(sets),
            extra_args=extra,
        )
    except profiles.LaunchError as error:
        _fail(str(error), 2)
    if dry_run:
        sys.stdout.write(command.shell(explain=explain))
        return
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        _fail(f"no model folder at {model}; 'kvloop worker model chat --out {model}' makes one", 2)
    try:
        launcher.check_environment()
        code = launcher.run(command)
    except launcher.EnvironmentUnfit as error:
        _fail(str(error), 1)
    raise typer.Exit(code)


@app.command("model")
def make_model(
    kind: Annotated[str, typer.Argument(help="chat (SmolLM2-135M-Instruct) or tiny (random).")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    seed: Annotated[int, typer.Option(help="Of the tiny model's weights.")] = models.TINY_SEED,
) -> None:
    """Make a small model's folder, unless it is there already."""
    if kind not in ("chat", "tiny"):
        _fail(f"unknown model {kind!r}; known: chat, tiny", 2)
    try:
        if kind == "chat":
            models.ensure_chat_model(out)
        else:
            models.ensure_tiny_model(out, seed)
    except models.ModelUnavailable as error:
        _fail(str(error), 1)
    typer.echo(str(out))


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"kvloop worker: {message}", err=True)
    raise typer.Exit(code)
