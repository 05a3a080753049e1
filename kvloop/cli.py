"""``kvloop``: the commands. Each imports what it needs when it runs.

So ``kvloop --help`` is quick, and a machine without vLLM can run the proxy and the chat.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import kvloop
from kvloop.advise.commands import advise
from kvloop.bench.commands import app as bench

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="kvloop",
    help="Stateful prefill/decode proxy for vLLM: a conversation's KV cache flows back from the "
    "decode worker to the next turn's prefill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(bench)
app.command()(advise)

_PIPE_WIDTH = 160
"""Columns, where there is no terminal to ask."""

StateDir = Annotated[
    Path, typer.Option(envvar="KVLOOP_STATE_DIR", help="Folder of this stack: state and logs.")
]

_STATE_DIR = Path(".kvloop")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvloop {kvloop.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; leave the stack running.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="smollm2 (chats), tiny (random, quick) or a model folder.")
    ] = "smollm2",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the proxy.")] = 8000,
    host: Annotated[str, typer.Option(help="Address that the proxy listens on.")] = "127.0.0.1",
    profile: Annotated[str, typer.Option(help="Settings of the workers.")] = "cpu-small",
    state_dir: StateDir = _STATE_DIR,
    models_dir: Annotated[
        Path, typer.Option(envvar="KVLOOP_MODELS_DIR", help="Where built models are kept.")
    ] = _STATE_DIR / "models",
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Longest start in seconds.", show_default=True)
    ] = 900,
) -> None:
    """Start a store, a prefill and a decode worker and the proxy on this machine.

    Ctrl-C stops all that was started and nothing else.
    """
    from kvloop.stack import control, local, processes
    from kvloop.stack.state import StateFolder, StateUnreadable

    options = local.Options(model=model, host=host, port=port, profile=profile, models=models_dir)
    folder = StateFolder(state_dir)
    run = control.start_detached if detach else control.run_in_front
    try:
        processes.require_linux()
        code = run(
            lambda: local.plan_local_stack(options, folder),
            folder,
            _console(),
            control.Limits(start=start_timeout),
        )
    except (local.CannotStart, processes.UnsupportedPlatform, StateUnreadable, OSError) as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command()
def status(
    state_dir: StateDir = _STATE_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest wait for a part's answer in seconds.")
    ] = 5,
) -> None:
    """Show the parts of the stack. Exit code 0 only if all are ready."""
    from kvloop.stack import control
    from kvloop.stack.state import StateFolder, StateUnreadable

    try:
        code = control.status(
            StateFolder(state_dir), _console(), as_json=as_json, timeout_seconds=timeout
        )
    except StateUnreadable as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command()
def down(
    state_dir: StateDir = _STATE_DIR,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds before what a killed supervisor left is killed too."),
    ] = 15,
) -> None:
    """Stop the stack of this folder, detached or not."""
    from kvloop.stack import control
    from kvloop.stack.state import StateFolder, StateUnreadable

    try:
        code = control.stop(StateFolder(state_dir), _console(), control.Limits(grace=grace))
    except StateUnreadable as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of the proxy.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the proxy lists.")
    ] = None,
    conversation_id: Annotated[
        str | None, typer.Option(help="Sent with each turn; a new one by default.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVLOOP_API_KEY", help="If the proxy asks for one.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest silence of the proxy in seconds.")
    ] = 600,
) -> None:
    """Hold a conversation through the proxy; see after each answer what was reused.

    Reads one turn a line, also from a pipe. /help lists what else can be typed.
    """
    from kvloop import chat as conversation

    raise typer.Exit(
        conversation.run(
            conversation.Client(url, api_key=api_key, timeout_seconds=timeout),
            conversation.Settings(
                model=model,
                conversation_id=conversation_id,
                system=system,
                max_tokens=max_tokens,
                temperature=temperature,
            ),
            sys.stdin,
            _console(),
        )
    )


@app.command()
def reuse(
    state: Annotated[str, typer.Argument(help="on, off or status.")],
    redis_url: Annotated[
        str, typer.Option(envvar="KVLOOP_REDIS_URL", help="The proxies' session table.")
    ],
) -> None:
    """Switch reuse off (or on again) in every proxy that shares this Redis, within a second."""
    import redis

    key = "kvloop:reuse"
    if state not in ("on", "off", "status"):
        _fail(f"'{state}' is none of on, off, status")
    try:
        with redis.Redis.from_url(redis_url) as store:
            if state == "off":
                store.set(key, "off")
            elif state == "on":
                store.delete(key)
            typer.echo("reuse is " + ("off" if store.get(key) == b"off" else "on"))
    except (redis.RedisError, ValueError) as error:
        _fail(f"Redis: {error}")


@app.command()
def keys(
    tenant: Annotated[str, typer.Argument(help="Whose key: letters, digits, '.', '_', '-'.")],
) -> None:
    """Make an API key: the key once, for the client, and its hash, for the proxy's key file."""
    from secrets import token_urlsafe

    from proxy.tenants import KeysError, hashed, keys_from_text

    key = "kvl_" + token_urlsafe(32)
    stored = hashed(key.encode())
    try:
        keys_from_text(f"{tenant}={stored}")
    except KeysError as error:
        _fail(str(error))
    typer.echo(f"key, for the client, shown only now:\n\n    {key}\n")
    typer.echo(f'for the file named by KVLOOP_API_KEYS_FILE:\n\n    [tenants."{tenant}"]')
    typer.echo(f'    keys = ["{stored}"]')


@app.command()
def doctor(
    prefill: Annotated[str, typer.Option(help="A prefill worker: http://host:port.")],
    decode: Annotated[str, typer.Option(help="A decode worker: http://host:port.")],
    proxy: Annotated[str | None, typer.Option(help="The proxy, if it runs.")] = None,
    redis: Annotated[
        str | None, typer.Option(envvar="KVLOOP_REDIS_URL", help="The session table.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVLOOP_WORKER_API_KEY", help="If workers ask for one.")
    ] = None,
    decode_kv_ttl: Annotated[
        float,
        typer.Option(envvar="KVLOOP_DECODE_KV_TTL_SECONDS", help="The proxy's setting, seconds."),
    ] = 480,
    expiry_margin: Annotated[
        float,
        typer.Option(envvar="KVLOOP_EXPIRY_MARGIN_SECONDS", help="The proxy's setting, seconds."),
    ] = 30,
    probe_tokens: Annotated[
        int, typer.Option(min=16, help="Length of the probe's prompt; longer measures bandwidth.")
    ] = 1024,
    probe: Annotated[bool, typer.Option(help="Hold a tiny conversation on the workers.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Longest probe request, seconds.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Check a deployment and say how to mend it. Exit code 1 if something must be mended.

    Run it on the workers' machines too: there it also sees their settings, EFA and limits.
    """
    import asyncio

    from kvloop.doctor import checks, examination, report

    request = examination.Request(
        prefill=prefill.rstrip("/"),
        decode=decode.rstrip("/"),
        proxy=proxy.rstrip("/") if proxy else None,
        redis=redis,
        api_key=api_key,
        session_expiry_seconds=decode_kv_ttl - expiry_margin,
        probe_tokens=probe_tokens,
        probe=probe,
        timeout_seconds=timeout,
    )
    findings = checks.examine(asyncio.run(examination.gather_facts(request)))
    typer.echo(report.as_json(findings) if as_json else report.as_text(findings), nl=False)
    raise typer.Exit(1 if checks.failed(findings) else 0)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="X-Request-Id of the answer, or its start.")],
    log: Annotated[
        typer.FileText, typer.Argument(help="The proxy's log; - or nothing: standard input.")
    ] = "-",  # type: ignore[assignment]  # typer opens it
) -> None:
    """Tell the story of one turn from the proxy's log."""
    from kvloop import explain as stories

    try:
        for line in stories.tell(stories.find(stories.parse(log), request_id)):
            typer.echo(line)
    except stories.Unexplained as error:
        _fail(str(error))


@app.command()
def proxy() -> None:
    """Run the proxy alone (settings: flags, KVLOOP_... variables; see kvloop proxy --help)."""
    _run_proxy([])


@app.command()
def worker() -> None:
    """Run one vLLM worker, or make a small model (see kvloop worker --help)."""
    _run_worker([])


def _run_proxy(arguments: list[str]) -> None:
    from proxy.__main__ import main as serve

    serve(arguments)


def _run_worker(arguments: list[str]) -> None:
    from worker_launch.cli import app as launch

    launch(arguments, prog_name="kvloop worker")


def _console() -> Console:
    from rich.console import Console

    # Rich takes a pipe for 80 columns and would fold the status table for no reader's sake.
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvloop: {message}", err=True)
    raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the ``kvloop`` command. ``arguments``: by default those of the process."""
    given = sys.argv[1:] if arguments is None else arguments
    # What follows these two words, `--help` and `--` included, is another program's. Our own
    # parser would take it apart, so it does not see it; it only lists the two commands.
    match given:
        case ["proxy", *rest]:
            _run_proxy(rest)
        case ["worker", *rest]:
            _run_worker(rest)
        case _:
            app(given, prog_name="kvloop")


if __name__ == "__main__":
    main()
