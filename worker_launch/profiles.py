"""[pure] The profile for small CPUs, all profiles by name, and the vLLM command of one.

What a profile is: ``launch_profile``. Those for GPUs: ``profiles_gpu``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker_launch.launch_profile import (
    CONNECTOR_SETTINGS,
    FAIL_CLEANLY,
    PULL_ONLY,
    PUSH_SETTINGS,
    SCALE_OUT,
    LaunchProfile,
    Setting,
    Value,
)
from worker_launch.launch_profile import Role as Role  # callers name it with the rest
from worker_launch.launch_profile import TransferMode as TransferMode
from worker_launch.profiles_gpu import GPU_PROFILES

VLLM_MODULE = "vllm.entrypoints.openai.api_server"
CONNECTOR_NAME = "NixlConnector"
CONNECTOR_MODULE = "worker_launch.connector.retaining_connector"
PUSH_CONNECTOR_NAME = "NixlPushConnector"


class LaunchError(ValueError):
    """What was asked for makes no worker; the message says what to change."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A worker's command: argument list, the variables that we set, and the settings behind it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    settings: tuple[Setting, ...]

    def shell(self, *, explain: bool = False) -> str:
        """The command for a POSIX shell, one option a line; with the reasons as comments first."""
        lines = []
        if explain:
            lines += [f"# {item.name} = {_text(item.value)}: {item.why}" for item in self.settings]
        parts = ["env", *(f"{name}={shlex.quote(value)}" for name, value in self.env.items())]
        # The interpreter, -m and the module belong on one line; after that one option each.
        parts.append(shlex.join(self.argv[:3]))
        for word in self.argv[3:]:
            if word.startswith("--") or not parts[-1].startswith("--") or " " in parts[-1]:
                parts.append(shlex.quote(word))
            else:
                parts[-1] += f" {shlex.quote(word)}"
        return "\n".join([*lines, " \\\n  ".join(parts)]) + "\n"


_BLOCK_SIZE = 32


def _recompute_threshold(tokens: int) -> Setting:
    return Setting(
        "kv_recompute_threshold",
        tokens,
        "prefill reads from decode only if that saves at least these many tokens, one block: a "
        "read parks the request for an engine step or more, so a part of a block is cheaper to "
        "compute; the default of 64 would also refuse a whole block that the proxy counts on",
    )


CPU_SMALL = LaunchProfile(
    name="cpu-small",
    summary="a prefill and a decode worker with a small model on two CPU cores",
    engine=(
        Setting(
            "dtype",
            "float32",
            "bfloat16 kills the worker on CPUs whose AMX attention kernel is not usable",
        ),
        Setting("enforce-eager", True, "compiling costs minutes of start and gains nothing here"),
        Setting(
            "block-size",
            _BLOCK_SIZE,
            "equal on both workers or every transfer fails; the CPU backend takes multiples of 32, "
            "and 32 wastes least in a conversation's last block",
        ),
        Setting("max-model-len", 4096, "room for a long chat; its KV fits the memory below"),
        Setting("max-num-seqs", 16, "more at once only slow each other down on two cores"),
        Setting(
            "distributed-executor-backend",
            "uni",
            "the model runs in the engine's process: no worker process, whose message queue spins; "
            "needs VLLM_ENABLE_V1_MULTIPROCESSING=0, or the CPU platform makes it 'mp' again",
        ),
        Setting(
            "enable-prompt-tokens-details",
            True,
            "usage then reports cached tokens, which clients look for",
        ),
        SCALE_OUT,
    ),
    prefill_engine=(
        Setting(
            "enable-prefix-caching",
            False,
            "all reuse then comes from decode and can be read off the numbers; with it on, "
            "prefill's own cache supplies a part and only the rest is read, which is just as right",
        ),
    ),
    transfer=(
        FAIL_CLEANLY,
        Setting("kv_buffer_device", "cpu", "the KV cache itself is in CPU memory"),
    ),
    connector=(
        *CONNECTOR_SETTINGS,
        _recompute_threshold(_BLOCK_SIZE),
        Setting(
            "num_threads", 0, "transfer threads of NIXL's own; with two cores they only compete"
        ),
    ),
    environment=(
        Setting(
            "VLLM_CPU_KVCACHE_SPACE",
            2,
            "GiB of KV cache, some 45,000 tokens of the chat model; there are two workers",
        ),
        Setting(
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            0,
            "lets distributed-executor-backend be 'uni'; the HTTP server stays a process apart",
        ),
        Setting("OMP_NUM_THREADS", 1, "one compute thread a worker: there are two cores"),
        Setting(
            "VLLM_CPU_OMP_THREADS_BIND",
            "nobind",
            "two workers that bind themselves take the same cores",
        ),
        Setting("UCX_TLS", "tcp,self,sm", "loopback transports that every machine has"),
        Setting(
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
            120,
            "seconds; the default of 5 closes idle connections while the proxy reuses them",
        ),
        Setting("HF_HUB_OFFLINE", 1, "the model is a local folder; a start needs no network"),
        Setting("VLLM_NO_USAGE_STATS", 1, "a local run reports nothing to anyone"),
        Setting(
            "KVLOOP_CPU_TUNING",
            1,
            "our plugin then lets idle workers sleep and leaves threads unpinned; without it two "
            "idle workers keep two cores busy and single prefills took 30 s",
        ),
    ),
)

PROFILES: Mapping[str, LaunchProfile] = {
    profile.name: profile for profile in (CPU_SMALL, *GPU_PROFILES)
}


def profile_named(name: str) -> LaunchProfile:
    """Raises LaunchError for an unknown name."""
    try:
        return PROFILES[name]
    except KeyError:
        known = ", ".join(sorted(PROFILES))
        raise LaunchError(f"unknown profile {name!r}; known profiles: {known}") from None


@dataclass(frozen=True, slots=True)
class Overrides:
    """``--set`` arguments, sorted by where they go."""

    engine: Mapping[str, str]
    connector: Mapping[str, str]
    environment: Mapping[str, str]


_OWN_OPTIONS = frozenset({"model", "served-model-name", "host", "port", "kv-transfer-config"})
"""Flags that are made from our own options."""


def parse_overrides(items: Iterable[str]) -> Overrides:
    """``key=value``: an engine flag, ``kv.key`` a connector setting, ``env.NAME`` a variable.

    An empty value removes the setting. Raises LaunchError for what is none of these.
    """
    engine: dict[str, str] = {}
    connector: dict[str, str] = {}
    environment: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise LaunchError(f"--set takes key=value, not {item!r}")
        if key.startswith("kv."):
            connector[key.removeprefix("kv.")] = value
        elif key.startswith("env."):
            environment[key.removeprefix("env.")] = value
        else:
            flag = key.lstrip("-").replace("_", "-")
            if flag in _OWN_OPTIONS:
                raise LaunchError(f"--set {flag}: use the option of that name, or kv.<key>=<value>")
            engine[flag] = value
    return Overrides(engine, connector, environment)


def build_command(
    profile: LaunchProfile,
    role: Role,
    *,
    model: str,
    served_model_name: str,
    host: str,
    port: int,
    side_channel_host: str,
    side_channel_port: int,
    python_executable: str,
    transfer_mode: TransferMode = TransferMode.PULL,
    overrides: Overrides | None = None,
    extra_args: Sequence[str] = (),
) -> LaunchCommand:
    """The command of one worker. Raises LaunchError for values that cannot work.

    ``transfer_mode``: push takes vLLM's own connector, equal on both workers.

    ``side_channel_host`` is what the *other* worker connects to, so it must be an address of this
    machine that is reachable from there. ``extra_args`` go to vLLM last and unchanged.
    """
    _check_port("port", port)
    _check_port("side channel port", side_channel_port)
    if port == side_channel_port:
        raise LaunchError(f"port and side channel port are both {port}; they must differ")
    if not model or not served_model_name or not host or not side_channel_host:
        raise LaunchError("model, served model name, host and side channel host must not be empty")
    if side_channel_host in ("0.0.0.0", "::", "*"):
        raise LaunchError(
            f"side channel host {side_channel_host} is no address that the other worker can "
            "connect to; give this machine's own address"
        )
    if any(word.partition("=")[0] == "--kv-transfer-config" for word in extra_args):
        raise LaunchError("--kv-transfer-config is made from the profile; use --set kv.<key>=...")

    overrides = overrides or Overrides({}, {}, {})
    engine = _apply(profile.engine_for(role), overrides.engine)
    connector = _apply(_connector_settings(profile, transfer_mode), overrides.connector)
    environment = _apply(profile.environment_for(role), overrides.environment)
    transfer = {
        **_connector_class(transfer_mode),
        "kv_role": role.kv_role,
        **{item.name: item.value for item in profile.transfer},
        "kv_connector_extra_config": {item.name: item.value for item in connector},
    }
    argv = [
        python_executable,
        "-m",
        VLLM_MODULE,
        *("--model", model),
        *("--served-model-name", served_model_name),
        *("--host", host),
        *("--port", str(port)),
    ]
    for item in engine:
        argv += _flag(item)
    argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":")), *extra_args]
    env = {item.name: _text(item.value) for item in environment}
    env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = side_channel_host
    env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
    return LaunchCommand(tuple(argv), env, (*engine, *profile.transfer, *connector, *environment))


def _connector_class(mode: TransferMode) -> dict[str, str]:
    if mode is TransferMode.PUSH:
        return {"kv_connector": PUSH_CONNECTOR_NAME}
    return {"kv_connector": CONNECTOR_NAME, "kv_connector_module_path": CONNECTOR_MODULE}


def _connector_settings(profile: LaunchProfile, mode: TransferMode) -> tuple[Setting, ...]:
    if mode is TransferMode.PULL:
        return profile.connector
    kept = (item for item in profile.connector if item.name not in PULL_ONLY)
    return (*kept, *PUSH_SETTINGS)


def _check_port(what: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise LaunchError(f"{what} {port} is not between 1 and 65535")


def _apply(settings: Iterable[Setting], changes: Mapping[str, str]) -> tuple[Setting, ...]:
    """The settings with the changes; an empty value removes one, a new name is added at the end."""
    known = {item.name: item for item in settings}
    for name, text in changes.items():
        if text == "":
            known.pop(name, None)
        else:
            known[name] = Setting(name, _value(text), "set on the command line")
    return tuple(known.values())


def _value(text: str) -> Value:
    """A scalar or a list of strings as JSON reads it, else the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    return value if isinstance(value, str | int | float | bool) else text


def _text(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool | tuple) else str(value)


def _flag(item: Setting) -> list[str]:
    if item.value is True:
        return [f"--{item.name}"]
    if item.value is False:
        return [f"--no-{item.name}"]
    return [f"--{item.name}", _text(item.value)]
