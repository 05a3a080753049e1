"""[io] One run: set the arms up, play the workloads, collect what was found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from kvloop.bench import client, deployment, observe, recorded, workloads
from kvloop.bench.deployment import LocalPair, Ready, Workers
from kvloop.bench.legs import Arm
from kvloop.bench.machine import commit, machine
from kvloop.bench.records import ArmInfo, Run, TurnRecord
from kvloop.bench.runner import Found, Runner, Target
from kvloop.bench.workloads import Sizes, Workload
from kvloop.stack.state import StateFolder

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    arms: tuple[Arm, ...]
    workloads: tuple[str, ...]
    sizes: Sizes
    prefills: tuple[str, ...] = ()
    """Workers that run already."""
    decodes: tuple[str, ...] = ()
    single: str | None = None
    pair: LocalPair | None = None
    """Workers to start here; then none may be named."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Name -> address of other servers."""
    recorded: Path | None = None
    repeats: int = 2
    """Passes of loaded workloads."""
    limit: float | None = None
    """Seconds after which no new turn starts."""
    seed: int = 1
    model: str = ""
    """To ask for; empty: the first that is served."""
    api_key: str | None = None
    cache_salt: bool = True
    lease: float | None = None
    title: str = "kvloop bench"
    state_dir: Path | None = None
    """Of what is started; None: a folder that is removed if all went well."""
    start_timeout: float = 900.0


def measure(wanted: Wanted, tell: Tell) -> Run:
    """Set up, play, collect; ``tell`` is given a line now and then.

    Raises ``CannotBench``, ``LookupError`` (a server does not answer as one must), ``OSError`` and
    ``ValueError`` (a file or workload is not what it should be).
    """
    with contextlib.ExitStack() as exits:
        folder = wanted.state_dir or Path(exits.enter_context(_log_folder()))
        workers = asyncio.run(_sorted_workers(wanted))
        tell(f"starting what is needed; logs are in {folder}/logs")
        ready, model = exits.enter_context(
            deployment.running(
                wanted.arms,
                workers,
                wanted.pair,
                lease=wanted.lease,
                folder=StateFolder(folder),
                start_seconds=wanted.start_timeout,
            )
        )
        return asyncio.run(_play(wanted, ready, model or wanted.model, tell))


@contextlib.contextmanager
def _log_folder() -> Iterator[str]:
    """A folder that stays when something failed, for its logs."""
    path = tempfile.mkdtemp(prefix="kvloop-bench-")
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def _sorted_workers(wanted: Wanted) -> Workers:
    """Which prefill workers have a prefix cache. Raises ``CannotBench`` where none can tell."""
    plain: list[str] = []
    caching: list[str] = []
    async with aiohttp.ClientSession() as session:
        for url in (item.rstrip("/") for item in wanted.prefills):
            info = await observe.worker(session, url, "prefill")
            if info.prefix_cache is None:
                raise deployment.CannotBench(
                    f"{url}/metrics does not say whether its prefix cache is on "
                    "(vllm:cache_config_info); is it a vLLM worker, and does it run?"
                )
            (caching if info.prefix_cache else plain).append(url)
    return deployment.Workers(
        tuple(plain),
        tuple(caching),
        tuple(item.rstrip("/") for item in wanted.decodes),
        wanted.single.rstrip("/") if wanted.single else None,
    )


async def _play(wanted: Wanted, ready: Sequence[Ready], model: str, tell: Tell) -> Run:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    started, version = time.time(), commit()
    load = os.getloadavg()[0]
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        urls = {item.arm.name: item.url for item in ready} | dict(wanted.others)
        if not urls:
            raise LookupError("nothing to measure: name a leg or --other NAME=URL")
        if not model:
            model = await client.first_model(session, next(iter(urls.values())), wanted.api_key)
        by_name = {item.arm.name: item for item in ready}
        targets = []
        for name, url in urls.items():
            item = by_name.get(name)
            endpoint = client.Endpoint(url, model, wanted.api_key, wanted.cache_salt)
            targets.append(
                Target(name, endpoint, item.prefills if item else (), item.decodes if item else ())
            )
        rate = await client.words_per_token(session, targets[0].endpoint)
        for target in targets:
            await _warm_up(session, target)
        played = _workloads(wanted, rate)
        runner = Runner(session, targets, seed=wanted.seed, tell=tell)
        deadline = time.monotonic() + wanted.limit if wanted.limit else None
        stopped = await _stopped_early(runner, played, wanted.repeats, deadline)
        roles = [(url, "prefill") for item in ready for url in item.prefills]
        roles += [(url, "decode") for item in ready for url in item.decodes]
        roles += [(item.url, "single") for item in ready if not item.arm.needs_proxy]
        infos = [await observe.worker(session, url, role) for url, role in dict.fromkeys(roles)]
    return Run(
        title=wanted.title,
        started=started,
        ended=time.time(),
        command=own_command(sys.argv[1:]),
        commit=version,
        machine=f"{machine()} (the client's machine)",
        model=model,
        seed=wanted.seed,
        constant=_constant(wanted),
        arms=tuple(
            ArmInfo(
                name,
                by_name[name].arm.what if name in by_name else "another server",
                url if name in wanted.others else "",
                dict(by_name[name].settings or {}) if name in by_name else {},
            )
            for name, url in urls.items()
        ),
        workers=tuple(replace(info, name=f"{info.role} {n}") for n, info in enumerate(infos, 1)),
        turns=tuple(_with_legs(runner.found, ready)),
        samples=tuple(runner.found.samples),
        spans=tuple(runner.found.spans),
        workloads={workload.name: workload.what for workload in played},
        lease_seconds=wanted.lease,
        notes=(*_notes(runner.found, wanted, load), *([STOPPED] if stopped else [])),
    )


STOPPED = "the run was stopped from outside before its end: later conversations are missing"


async def _stopped_early(
    runner: Runner, played: Sequence[Workload], repeats: int, deadline: float | None
) -> bool:
    """Play. Ctrl-C and SIGTERM end the playing and not the run: what was measured is kept."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        for workload in played:
            await runner.run(workload, repeats=repeats, deadline=deadline)
    except asyncio.CancelledError:
        task.uncancel()
        return True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return False


async def _warm_up(session: aiohttp.ClientSession, target: Target) -> None:
    """Two short turns: connections, NIXL handshakes and first use are not the workload's cost."""
    name = f"warm-up-{target.name}-{time.time_ns()}"
    history = [{"role": "user", "content": "Warm up. " + "river stone window " * 40}]
    for _ in range(2):
        answer = await client.ask(
            session, target.endpoint, history, max_tokens=8, conversation=name, salt=name
        )
        if answer.error:
            raise LookupError(f"{target.name} ({target.endpoint.url}) fails: {answer.error}")
        history += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "Go on."},
        ]


def _workloads(wanted: Wanted, rate: float) -> list[Workload]:
    played = [
        workloads.make(name, wanted.sizes, words_per_token=rate, seed=wanted.seed)
        for name in wanted.workloads
    ]
    if wanted.recorded is not None:
        with wanted.recorded.open() as lines:
            played.append(
                recorded.workload_of(lines, name="recorded", clients=wanted.sizes.clients)
            )
    return played


def _with_legs(found: Found, ready: Sequence[Ready]) -> Iterator[TurnRecord]:
    """Records with what the proxies logged of their requests."""
    logs = {
        item.arm.name: observe.legs_by_request(item.proxy_log) for item in ready if item.proxy_log
    }
    for index, record in enumerate(found.turns):
        legs = logs.get(record.arm, {}).get(found.requests.get(index, ""), {})
        yield replace(record, legs=dict(legs))


def _constant(wanted: Wanted) -> tuple[str, ...]:
    lines = [
        "identical messages for all arms as long as their answers are the same; greedy decoding",
        "streamed chat completions from one client process",
        "arms that share workers differ in their proxy's settings alone",
        "unloaded workloads: each turn is asked of all arms in random order, one at a time",
    ]
    if wanted.cache_salt:
        lines.append("each arm has its own cache_salt: none is helped by another's prefix cache")
    if wanted.lease is not None:
        lines.append(f"decode keeps KV for {wanted.lease:g} s")
    return tuple(lines)


def _notes(found: Found, wanted: Wanted, load: float) -> Iterator[str]:
    errors: dict[str, int] = {}
    for record in found.turns:
        if record.error:
            key = f"{record.arm}: {record.error}"
            errors[key] = errors.get(key, 0) + 1
    for text, count in errors.items():
        yield f"{count} requests failed, {text}"
    if wanted.limit:
        yield f"no turn was started after {wanted.limit:g} s: later conversations may be shorter"
    cores = os.cpu_count() or 1
    if wanted.pair is not None:
        yield (
            f"client, proxies and all workers share {cores} cores of one machine: read ratios, not "
            f"milliseconds (load average {load:.1f} before the first request, "
            f"{os.getloadavg()[0]:.1f} after the last)"
        )


_OURS = ("--api-key", "--state-dir", "--models-dir", "--out")
"""Options that say nothing of a measurement: a secret, and folders of one machine."""


def own_command(arguments: Sequence[str]) -> str:
    """What was typed, for the report."""
    words, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word in _OURS:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in _OURS)):
            words.append(word)
    return shlex.join(["kvloop", *words])
