"""What is started for which arms."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvloop.bench import deployment, legs, single_worker
from kvloop.bench.deployment import CannotBench, LocalPair, Workers
from kvloop.stack.state import StateFolder
from proxy.settings import Settings

WORKERS = Workers(("http://plain:1",), ("http://caching:1",), ("http://decode:1",), "http://single")


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path)


def test_legs_of_one_kind_differ_in_one_setting(folder: StateFolder) -> None:
    arms = legs.arms_of(["published"])
    plan, ready = deployment.plan(arms, WORKERS, None, lease=60, folder=folder)
    assert [item.arm.name for item in ready] == ["cold", "published"]
    off, on = (dict(part.environment) for part in plan.parts)
    differ = {key for key in off if off[key] != on[key]}
    assert differ == {"KVLOOP_PORT", "KVLOOP_ADMIN_PORT", "KVLOOP_REUSE_ENABLED"}
    assert (off["KVLOOP_REUSE_ENABLED"], on["KVLOOP_REUSE_ENABLED"]) == ("false", "true")
    assert off["KVLOOP_PREFILL_URLS"] == "http://plain:1"


def test_the_production_legs_use_prefill_with_its_cache(folder: StateFolder) -> None:
    plan, _ = deployment.plan(
        legs.arms_of(["production", "single"]), WORKERS, None, lease=None, folder=folder
    )
    assert {part.environment["KVLOOP_PREFILL_URLS"] for part in plan.parts} == {"http://caching:1"}
    assert len(plan.parts) == 2, "a running single worker needs no proxy"


def test_a_leg_without_its_workers_says_which_are_missing(folder: StateFolder) -> None:
    arms = legs.arms_of(["production"])
    with pytest.raises(CannotBench, match="prefill worker with prefix cache"):
        deployment.plan(arms, Workers(decode=("http://d",)), None, lease=None, folder=folder)
    with pytest.raises(CannotBench, match="--single URL"):
        deployment.plan(legs.arms_of(["single"]), Workers(), None, lease=None, folder=folder)


def test_a_local_run_starts_each_worker_once(folder: StateFolder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    pair = LocalPair(model=str(tmp_path), lease_seconds=30, prefill_sets=("block-size=64",))
    arms = legs.arms_of(["published", "production", "single"])
    plan, ready = deployment.plan(arms, Workers(), pair, lease=30, folder=folder)
    names = [part.name for part in plan.parts if not part.name.startswith("proxy-")]
    assert names == ["prefill", "prefill-caching", "decode", "single"]
    by_name = {part.name: part.argv for part in plan.parts}
    assert "enable-prefix-caching=false" in by_name["prefill"]
    assert "enable-prefix-caching=true" in by_name["prefill-caching"]
    assert "kv.decoder_kv_blocks_ttl=30" in by_name["decode"]
    assert "block-size=64" in by_name["prefill"]
    assert "block-size=64" not in by_name["decode"]
    decodes = {item.decodes for item in ready if item.arm.needs_proxy}
    assert len(decodes) == 1


def test_a_leg_that_the_proxy_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = legs.arms_of(["decode-local"])
    monkeypatch.setattr(deployment, "proxy_appends", lambda: False)
    with pytest.raises(CannotBench, match="decode-local needs a proxy"):
        deployment.check_arms(arms)
    monkeypatch.setattr(deployment, "proxy_appends", lambda: True)
    deployment.check_arms(arms)
    on, off = (
        deployment.proxy_environment(arm, ["http://p"], ["http://d"], ports=[1, 2], lease=None)
        for arm in (legs.DECODE_LOCAL, legs.PRODUCTION)
    )
    name = "KVLOOP_DECODE_LOCAL_APPEND"
    assert (on[name], off[name]) == ("true", "false")


@pytest.mark.parametrize("arm", [arm for arm in legs.KNOWN_ARMS.values() if arm.needs_proxy])
def test_the_proxy_takes_the_settings_of_every_arm(
    arm: legs.Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a change of the proxy's settings would show only when a benchmark starts."""
    made = deployment.proxy_environment(
        arm, ["http://p:1"], ["http://d:1"], ports=[8000, 8001], lease=60
    )
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.reuse_enabled is arm.reuse
    assert settings.decode_local_append is arm.decode_local
    assert settings.session_ttl_seconds == 55


def test_an_unknown_leg_lists_the_known_ones() -> None:
    with pytest.raises(legs.UnknownLeg, match="cold, noise, published"):
        legs.arms_of(["fast"])


def test_a_report_shows_settings_but_no_addresses_and_no_secrets() -> None:
    shown = deployment.shown_settings(
        {
            "KVLOOP_PULL_THRESHOLD": "64",
            "KVLOOP_REDIS_URL": "redis://:password@host",
            "KVLOOP_API_KEY": "secret",
            "KVLOOP_PREFILL_URLS": "http://10.0.0.1",
            "PATH": "/bin",
        }
    )
    assert shown == {"pull_threshold": "64"}


def test_the_single_worker_is_ours_without_the_connector() -> None:
    arguments = argparse.Namespace(
        profile="cpu-small", model="folder", served_model_name="m", port=9000, set=["block-size=64"]
    )
    made = single_worker.command(arguments)
    assert "--kv-transfer-config" not in made.argv
    assert "--enable-prefix-caching" in made.argv
    assert made.argv[made.argv.index("--block-size") + 1] == "64"
    assert not any("SIDE_CHANNEL" in name for name in made.env)
    assert made.env["KVLOOP_CPU_TUNING"] == "1"
