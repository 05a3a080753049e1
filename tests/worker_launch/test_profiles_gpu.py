"""The GPU profiles against the published command lines, and all profiles against vLLM's parser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from worker_launch.launch_profile import LaunchProfile
from worker_launch.profiles import (
    PROFILES,
    LaunchCommand,
    Role,
    build_command,
    parse_overrides,
    profile_named,
)

PUBLISHED_MODELS = {
    "qwen3-32b-p5en": ("Qwen/Qwen3-32B", "Qwen"),
    "glm-5-fp8-p5en": ("zai-org/GLM-5-FP8", "GLM"),
}

# The blog's script, expanded for BIDIR=true: flags, kv-transfer-config, environment.
PUBLISHED_FLAGS = {
    Role.PREFILL: {
        "dtype": "bfloat16",
        "tensor-parallel-size": "8",
        "max-model-len": "32768",
        "max-num-seqs": "8",
        "no-enable-prefix-caching": None,
        "port": "8100",
    },
    Role.DECODE: {
        "dtype": "bfloat16",
        "tensor-parallel-size": "8",
        "max-model-len": "32768",
        "max-num-seqs": "8",
        "port": "8200",
    },
}
PUBLISHED_TRANSFER = {
    role: {
        "kv_connector": "NixlConnector",
        "kv_buffer_device": "cuda",
        "kv_role": kv_role,
        "engine_id": engine_id,
        "kv_rank": rank,
        "kv_parallel_size": 2,
        "kv_connector_extra_config": {
            "backends": ["LIBFABRIC"],
            "kv_recompute_threshold": 64,
            "decoder_kv_blocks_ttl": 480,
            "bidirectional_kv_xfer": True,
        },
    }
    for role, kv_role, engine_id, rank in (
        (Role.PREFILL, "kv_producer", "prefill-engine-001", 0),
        (Role.DECODE, "kv_consumer", "decode-engine-001", 1),
    )
}
PUBLISHED_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
}

LEFT_OUT = {
    "kv_rank": "vLLM 0.32.0 refuses the key",
    "kv_parallel_size": "vLLM 0.32.0 refuses the key",
    "engine_id": "a fixed id survives a restart, so a handle from before it would be read as if "
    "its blocks were still there; the random default makes such a read fail",
}
ADDED_TRANSFER = {
    "kv_connector_module_path": "our connector, a subclass that limits pinned blocks",
    "kv_load_failure_policy": "vLLM's default, stated because the other value hangs prefill",
}
ADDED_CONNECTOR = {"kvloop_max_pinned_fraction": "our connector's limit"}
ADDED_FLAGS = {
    "model": "the published positional argument",
    "served-model-name": "published, from our own option",
    "host": "a container has to listen on more than localhost",
    "enable-prompt-tokens-details": "usage shows reuse to clients",
    "enable-scale-out": "exact token ids from /render",
}
ADDED_ENVIRONMENT = {
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "the proxy keeps connections",
    "VLLM_NO_USAGE_STATS": "no reports to outside",
}


def command(profile: LaunchProfile, role: Role, **changes: Any) -> LaunchCommand:
    model, served = PUBLISHED_MODELS.get(profile.name, ("/models/m", "m"))
    arguments: dict[str, Any] = {
        "model": model,
        "served_model_name": served,
        "host": "0.0.0.0",
        "port": 8100 if role is Role.PREFILL else 8200,
        "side_channel_host": "10.0.0.1",
        "side_channel_port": 5600,
        "python_executable": "/usr/bin/python3",
    }
    return build_command(profile, role, **{**arguments, **changes})


def flags(made: LaunchCommand) -> dict[str, str | None]:
    """Flag -> value; None for a bare flag."""
    found: dict[str, str | None] = {}
    words = made.argv[3:]
    for word, after in zip(words, (*words[1:], "--"), strict=True):
        if word.startswith("--"):
            found[word[2:]] = None if after.startswith("--") else after
    return found


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
@pytest.mark.parametrize("role", list(Role))
def test_the_p5en_profiles_are_the_published_benchmark(name: str, role: Role) -> None:
    """Every published flag, key and variable is there; every departure is in a list with a reason.

    Nothing else is added or left out.
    """
    made = command(profile_named(name), role)
    ours = flags(made)
    config = json.loads(ours.pop("kv-transfer-config") or "")
    assert (ours["model"], ours["served-model-name"]) == PUBLISHED_MODELS[name]
    assert {key: ours[key] for key in ours if key not in ADDED_FLAGS} == PUBLISHED_FLAGS[role]

    published = dict(PUBLISHED_TRANSFER[role])
    extra, published_extra = (c.pop("kv_connector_extra_config") for c in (config, published))
    assert {k: v for k, v in extra.items() if k not in ADDED_CONNECTOR} == published_extra
    assert {k: v for k, v in config.items() if k not in ADDED_TRANSFER} == {
        k: v for k, v in published.items() if k not in LEFT_OUT
    }
    assert {
        k: v for k, v in made.env.items() if k not in ADDED_ENVIRONMENT
    } == PUBLISHED_ENVIRONMENT


def test_one_machine_is_split_in_halves() -> None:
    """On a single machine no GPU serves both workers, and the network is not needed."""
    profile = profile_named("single-node-h200")
    prefill, decode = (command(profile, role).env for role in Role)
    halves = [set(env["CUDA_VISIBLE_DEVICES"].split(",")) for env in (prefill, decode)]
    assert halves[0].isdisjoint(halves[1])
    size = int(flags(command(profile, Role.PREFILL))["tensor-parallel-size"] or 0)
    assert [len(half) for half in halves] == [size, size]
    assert "FI_PROVIDER" not in prefill


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_every_profile_serves_what_the_proxy_asks_for(profile: LaunchProfile) -> None:
    """Each profile is bidirectional, fails cleanly, renders prompts, and gives every reason."""
    for role in Role:
        ours = flags(command(profile, role))
        config = json.loads(ours["kv-transfer-config"] or "")
        assert config["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
        assert config["kv_load_failure_policy"] == "fail"
        assert "enable-scale-out" in ours
        for item in (*profile.engine_for(role), *profile.environment_for(role)):
            assert len(item.why) > 15, item
    assert profile.summary


def test_a_list_can_be_set_by_hand() -> None:
    """``--set kv.backends=["UCX"]`` replaces the list, and ``env.`` empties the provider."""
    made = command(
        profile_named("qwen3-32b-p5en"),
        Role.DECODE,
        overrides=parse_overrides(['kv.backends=["UCX"]', "env.FI_PROVIDER="]),
    )
    config = json.loads(flags(made)["kv-transfer-config"] or "")
    assert config["kv_connector_extra_config"]["backends"] == ["UCX"]
    assert "FI_PROVIDER" not in made.env


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for name, argv in json.load(sys.stdin):
    print(name, file=sys.stderr)
    parsed = parser.parse_args(argv)
    assert parsed.kv_transfer_config.kv_connector == "NixlConnector"
"""


@pytest.mark.real
def test_vllm_accepts_every_flag() -> None:
    """vLLM's own parser takes each profile's arguments, kv-transfer-config included."""
    asked = [
        (f"{name} {role}", command(profile, role).argv[3:])
        for name, profile in PROFILES.items()
        for role in Role
    ]
    outcome = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
