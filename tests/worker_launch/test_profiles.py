"""Launch profiles: the command that follows from a profile, and what is refused."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from worker_launch.profiles import (
    CPU_SMALL,
    PROFILES,
    LaunchCommand,
    LaunchError,
    LaunchProfile,
    Role,
    TransferMode,
    build_command,
    parse_overrides,
    profile_named,
)


def command(role: Role = Role.PREFILL, **changes: Any) -> LaunchCommand:
    arguments: dict[str, Any] = {
        "model": "/models/small model",
        "served_model_name": "small",
        "host": "127.0.0.1",
        "port": 8100,
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 5600,
        "python_executable": "/usr/bin/python3",
    }
    return build_command(CPU_SMALL, role, **{**arguments, **changes})


def option(made: LaunchCommand, name: str) -> str:
    return made.argv[made.argv.index(f"--{name}") + 1]


def transfer(made: LaunchCommand) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(option(made, "kv-transfer-config"))
    return config


def test_what_describes_the_blocks_is_equal_on_both_roles() -> None:
    """Prefill is the producer and decode the consumer of blocks of one size, otherwise alike."""
    prefill, decode = command(Role.PREFILL), command(Role.DECODE)
    assert transfer(prefill)["kv_role"] == "kv_producer"
    assert transfer(decode)["kv_role"] == "kv_consumer"
    assert {**transfer(prefill), "kv_role": ""} == {**transfer(decode), "kv_role": ""}
    assert option(prefill, "block-size") == option(decode, "block-size") == "32"
    assert prefill.env == decode.env


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_push_mode_takes_the_stock_connector_with_nothing_that_it_refuses(
    profile: LaunchProfile,
) -> None:
    """vLLM refuses to start NixlPushConnector as bidirectional, and does not know our settings."""
    made = build_command(
        profile,
        Role.DECODE,
        model="m",
        served_model_name="m",
        host="127.0.0.1",
        port=8200,
        side_channel_host="10.0.0.2",
        side_channel_port=5700,
        python_executable="python3",
        transfer_mode=TransferMode.PUSH,
    )
    config = transfer(made)
    assert config["kv_connector"] == "NixlPushConnector"
    assert "kv_connector_module_path" not in config
    extra = config["kv_connector_extra_config"]
    assert "bidirectional_kv_xfer" not in extra
    assert not [name for name in extra if name.startswith("kvloop")]
    assert extra["push_registration_timeout"] == 60
    kept = {item.name for item in profile.connector} & set(extra)
    assert kept == {"num_threads"} if profile is CPU_SMALL else "backends" in kept


@pytest.mark.parametrize("role", list(Role))
def test_transfers_are_bidirectional_and_fail_cleanly(role: Role) -> None:
    """Both roles load our connector, read both ways and fail instead of hanging."""
    config = transfer(command(role))
    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_connector_module_path"] == "worker_launch.connector.retaining_connector"
    assert config["kv_load_failure_policy"] == "fail"
    extra = config["kv_connector_extra_config"]
    assert extra["bidirectional_kv_xfer"] is True
    assert extra["decoder_kv_blocks_ttl"] == 480
    assert extra["kv_recompute_threshold"] == 32


def test_side_channel_and_keep_alive_are_set() -> None:
    """The address for the other worker is set, dev mode is not, connections outlive the proxy's."""
    env = command(side_channel_host="10.0.0.7", side_channel_port=5700).env
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert int(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) >= 60
    assert "VLLM_SERVER_DEV_MODE" not in env


def test_vllm_is_started_by_module() -> None:
    """The CPU build's own ``vllm`` script does not start, so the module is run."""
    assert command().argv[:3] == ("/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server")


def test_shell_text_is_the_command() -> None:
    """Pasted into a shell, the dry run is exactly the environment and the arguments."""
    made = command(extra_args=["--seed", "1"])
    words = shlex.split(made.shell(explain=True).replace("\\\n", ""), comments=True)
    assert words[0] == "env"
    assert words[1 : 1 + len(made.env)] == [f"{name}={value}" for name, value in made.env.items()]
    assert words[1 + len(made.env) :] == list(made.argv)


def test_every_setting_has_a_reason_that_is_shown() -> None:
    """``--explain`` prints one comment with a reason per setting of the profile."""
    for profile in PROFILES.values():
        for item in (*profile.engine, *profile.transfer, *profile.connector, *profile.environment):
            assert len(item.why) > 15, item
    comments = [line for line in command().shell(explain=True).splitlines() if line[0] == "#"]
    assert len(comments) == len(command().settings)


def test_overrides_reach_their_place() -> None:
    """A flag, a connector setting and a variable are changed, added and removed by ``--set``."""
    made = command(
        overrides=parse_overrides(
            [
                "max_model_len=1024",
                "enforce-eager=false",
                "max-num-seqs=",
                "num-gpu-blocks-override=24",
                "kv.decoder_kv_blocks_ttl=60",
                "env.OMP_NUM_THREADS=2",
                "env.UCX_TLS=",
            ]
        )
    )
    assert option(made, "max-model-len") == "1024"
    assert "--no-enforce-eager" in made.argv
    assert "--max-num-seqs" not in made.argv
    assert option(made, "num-gpu-blocks-override") == "24"
    assert transfer(made)["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 60
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert "UCX_TLS" not in made.env


@pytest.mark.parametrize("item", ["novalue", "=1", "port=1", "--model=x", "kv_transfer_config={}"])
def test_senseless_overrides_are_refused(item: str) -> None:
    """What is no key=value, or belongs to an option of its own, is a launch error."""
    with pytest.raises(LaunchError):
        parse_overrides([item])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"port": 0}, "port 0 is not between 1 and 65535"),
        ({"port": 70000}, "port 70000"),
        ({"side_channel_port": -1}, "side channel port -1"),
        ({"side_channel_port": 8100}, "must differ"),
        ({"model": ""}, "must not be empty"),
        ({"side_channel_host": "0.0.0.0"}, "no address that the other worker can connect to"),
        ({"extra_args": ["--kv-transfer-config={}"]}, "made from the profile"),
    ],
)
def test_values_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    """The error names the value and what is wrong with it."""
    with pytest.raises(LaunchError, match=words):
        command(**changes)


def test_an_unknown_profile_lists_the_known_ones() -> None:
    """The error names what there is to choose from."""
    with pytest.raises(LaunchError, match="cpu-small"):
        profile_named("gpu-huge")
