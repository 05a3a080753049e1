"""[io] What has to run for the arms: the proxies always, the workers on request.

Arms with the same workers share them and differ in their proxy alone. Proxies run in processes of
their own, as in service; each has a table of its own.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvloop.bench.legs import Arm, expiry_margin
from kvloop.stack import control, local, processes
from kvloop.stack.plan import Part, ReadyWhen, StackPlan
from kvloop.stack.state import StateFolder


class CannotBench(Exception):
    """The arms cannot be set up; the message says what to change."""


@dataclass(frozen=True)
class Workers:
    """Addresses of the workers that run already. ``prefill_plain``: without prefix cache."""

    prefill_plain: tuple[str, ...] = ()
    prefill_caching: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    single: str | None = None


@dataclass(frozen=True)
class LocalPair:
    """What to start on this machine."""

    model: str = "smollm2"
    models: Path = Path(".kvloop/models")
    profile: str = "cpu-small"
    lease_seconds: float = 480.0
    sets: tuple[str, ...] = ()
    """``--set`` of every worker."""
    prefill_sets: tuple[str, ...] = ()
    """``--set`` of the prefill workers, such as a smaller cache."""


@dataclass(frozen=True)
class Ready:
    """An arm that can be asked."""

    arm: Arm
    url: str
    prefills: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()
    proxy_log: Path | None = None
    settings: Mapping[str, str] | None = None


APPEND_SETTING = "decode_local_append"
"""The proxy's switch for turns that decode computes itself."""


def proxy_appends() -> bool:
    """Has this version's proxy the route on which decode computes short additions itself?"""
    from proxy.settings import Settings

    return APPEND_SETTING in Settings.model_fields


def check_arms(arms: Sequence[Arm]) -> None:
    """Raises ``CannotBench`` for an arm that this version's proxy cannot serve."""
    if any(arm.decode_local for arm in arms) and not proxy_appends():
        raise CannotBench(
            "the leg decode-local needs a proxy that lets decode compute short additions itself; "
            "this version's proxy has no such route. Leave the leg out"
        )


def proxy_environment(
    arm: Arm,
    prefills: Sequence[str],
    decodes: Sequence[str],
    *,
    ports: Sequence[int],
    lease: float | None,
) -> dict[str, str]:
    """Settings of an arm's proxy: all equal but what the arm is about. ports: clients' and
    operators'."""
    environment = {
        # Another proxy's table would let the arms meet each other's sessions.
        "KVLOOP_REDIS_URL": "",
        "KVLOOP_HOST": "127.0.0.1",
        "KVLOOP_PORT": str(ports[0]),
        "KVLOOP_ADMIN_PORT": str(ports[1]),
        "KVLOOP_PREFILL_URLS": ",".join(prefills),
        "KVLOOP_DECODE_URLS": ",".join(decodes),
        "KVLOOP_REUSE_ENABLED": str(arm.reuse).lower(),
    }
    if lease is not None:
        environment["KVLOOP_DECODE_KV_TTL_SECONDS"] = str(lease)
        environment["KVLOOP_EXPIRY_MARGIN_SECONDS"] = str(expiry_margin(lease))
    if proxy_appends():
        environment[f"KVLOOP_{APPEND_SETTING.upper()}"] = str(arm.decode_local).lower()
    return environment


_HIDDEN = ("HOST", "PORT", "URL", "KEY", "TOKEN", "SECRET", "PASSWORD", "_DIR")
"""Parts of a variable's name: a report shows no addresses and no secrets."""


def shown_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What a report says of an arm's proxy: its ``KVLOOP_`` variables, inherited ones too."""
    return {
        name.removeprefix("KVLOOP_").lower(): value
        for name, value in sorted(environment.items())
        if name.startswith("KVLOOP_") and value and not any(word in name for word in _HIDDEN)
    }


def plan(
    arms: Sequence[Arm],
    workers: Workers,
    pair: LocalPair | None,
    *,
    lease: float | None,
    folder: StateFolder,
) -> tuple[StackPlan, list[Ready]]:
    """The processes to start, and the arms as they will be. Raises ``CannotBench``."""
    check_arms(arms)
    parts: list[Part] = []
    model = ""
    if pair is not None:
        workers, parts, model = _local_workers(arms, pair)
    ready: list[Ready] = []
    before = tuple(part.name for part in parts)
    for arm in arms:
        if not arm.needs_proxy:
            if workers.single is None:
                raise CannotBench(f"the leg {arm.name} needs --single URL")
            ready.append(Ready(arm, workers.single))
            continue
        prefills = workers.prefill_caching if arm.prefix_cache else workers.prefill_plain
        if not prefills or not workers.decode:
            kind = "with" if arm.prefix_cache else "without"
            raise CannotBench(
                f"the leg {arm.name} needs a decode worker and a prefill worker {kind} prefix "
                "cache (--decode URL, --prefill URL; start prefill with "
                f"--set enable-prefix-caching={str(arm.prefix_cache).lower()})"
            )
        ports = local.free_ports(2)
        url = f"http://127.0.0.1:{ports[0]}"
        environment = proxy_environment(arm, prefills, workers.decode, ports=ports, lease=lease)
        name = f"proxy-{arm.name}"
        parts.append(
            Part(
                name,
                (sys.executable, "-m", "proxy"),
                ReadyWhen.PROXY_SERVES,
                f"{url}/ready",
                environment,
                before,
            )
        )
        shown = shown_settings({**os.environ, **environment})
        ready.append(Ready(arm, url, prefills, workers.decode, folder.log(name), shown))
    return StackPlan(tuple(parts), url="", model=model), ready


def _local_workers(arms: Sequence[Arm], pair: LocalPair) -> tuple[Workers, list[Part], str]:
    options = local.Options(model=pair.model, models=pair.models, profile=pair.profile)
    try:
        name, model_folder, parts = local.model_part(options)
    except local.CannotStart as error:
        raise CannotBench(str(error)) from error
    after = tuple(part.name for part in parts)
    sets = [f"kv.decoder_kv_blocks_ttl={pair.lease_seconds:g}", *pair.sets]

    def worker(part: str, role: str, extra: Sequence[str]) -> str:
        port, side_port = local.free_ports(2)
        made = local.worker_part(role, name, model_folder, pair.profile, port, side_port, after)
        words = tuple(word for item in (*sets, *extra) for word in ("--set", item))
        parts.append(Part(part, (*made.argv, *words), made.ready_when, made.target, {}, after))
        return made.target.removesuffix("/health")

    plain: tuple[str, ...] = ()
    caching: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    single = None
    if any(arm.prefix_cache is False for arm in arms):
        extra = ("enable-prefix-caching=false", *pair.prefill_sets)
        plain = (worker("prefill", "prefill", extra),)
    if any(arm.prefix_cache for arm in arms):
        extra = ("enable-prefix-caching=true", *pair.prefill_sets)
        caching = (worker("prefill-caching", "prefill", extra),)
    if any(arm.needs_proxy for arm in arms):
        decode = (worker("decode", "decode", ()),)
    if any(not arm.needs_proxy for arm in arms):
        port = local.free_ports(1)[0]
        single = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "kvloop.bench.single_worker", "--profile", pair.profile]
        argv += ["--model", str(model_folder), "--served-model-name", name, "--port", str(port)]
        argv += [word for item in pair.sets for word in ("--set", item)]
        health = f"{single}/health"
        parts.append(Part("single", tuple(argv), ReadyWhen.HTTP_OK, health, {}, after))
    return Workers(plain, caching, decode, single), parts, name


@contextmanager
def running(
    arms: Sequence[Arm],
    workers: Workers,
    pair: LocalPair | None,
    *,
    lease: float | None,
    folder: StateFolder,
    start_seconds: float,
) -> Iterator[tuple[list[Ready], str]]:
    """Start it, give the arms and the model's name (empty: ask), stop it. Raises ``CannotBench``.

    Should we be killed outright, ``kvloop down --state-dir FOLDER`` stops what was started.
    """
    made: list[tuple[StackPlan, list[Ready]]] = []

    def make() -> StackPlan:
        made.append(plan(arms, workers, pair, lease=lease, folder=folder))
        return made[0][0]

    output = io.StringIO()
    console = Console(file=output, width=160)
    try:
        processes.require_linux()
        try:
            limits = control.Limits(start=start_seconds)
            code = control.start_detached(make, folder, console, limits)
        except (local.CannotStart, OSError, processes.UnsupportedPlatform) as error:
            raise CannotBench(str(error)) from error
        if code != 0 or not made:
            raise CannotBench(f"the stack did not start\n{output.getvalue()}")
        yield made[0][1], made[0][0].model
    finally:
        control.stop(folder, console)
