"""docker-compose.yml and the Dockerfiles, without an engine: the real programs read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
HOSTS = {"KVLOOP_PREFILL_HOST": "10.0.0.1", "KVLOOP_DECODE_HOST": "10.0.0.2"}
SERVICES = {
    "cpu": {"model-cpu", "prefill-cpu", "decode-cpu"},
    "single-node": {"prefill-local", "decode-local"},
    "prefill": {"prefill"},
    "decode": {"decode"},
}
BESIDE = {"proxy", "valkey", "prometheus", "grafana"}


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed (requirements/test.txt has it as a wheel)")
    return found


def composed(profile: str, **variables: str) -> dict[str, Any]:
    """What Compose makes of the file: schema, anchors and interpolation done."""
    outcome = subprocess.run(
        [tool("docker-compose"), "--profile", profile, "config", "--format", "json"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "variable is not set" not in outcome.stderr, outcome.stderr
    config: dict[str, Any] = json.loads(outcome.stdout)
    return config


@pytest.mark.parametrize("profile", SERVICES)
def test_compose_accepts_each_profile(profile: str) -> None:
    """Each profile starts its workers, and all but the lone decode machine the rest too."""
    services = set(composed(profile, **HOSTS)["services"])
    assert services == SERVICES[profile] | (set() if profile == "decode" else BESIDE)


@pytest.mark.parametrize("profile", SERVICES)
def test_each_service_restarts_stops_and_is_watched(profile: str) -> None:
    """All but the one-off have a health check, a restart policy and time to stop."""
    for name, service in composed(profile, **HOSTS)["services"].items():
        if name == "model-cpu":
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name


@pytest.mark.parametrize("profile", ["prefill", "decode"])
def test_efa_machines_get_what_rdma_needs(profile: str) -> None:
    """Devices, unlimited locked memory, shared memory, GPUs, and longer to stop than vLLM needs."""
    service = composed(profile, **HOSTS)["services"][profile]
    assert service["devices"][0]["source"] == "/dev/infiniband"
    assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert (service["ipc"], service["network_mode"]) == ("host", "host")
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
    assert service["stop_grace_period"] == "45s"


def test_the_two_machines_find_each_other() -> None:
    """From one .env, each worker announces its own address and the proxy asks both."""
    prefill = composed("prefill", **HOSTS)["services"]
    decode = composed("decode", **HOSTS)["services"]["decode"]
    assert "--side-channel-host=10.0.0.1" in prefill["prefill"]["command"]
    assert "--side-channel-host=10.0.0.2" in decode["command"]
    environment = prefill["proxy"]["environment"]
    assert environment["KVLOOP_PREFILL_URLS"] == "http://10.0.0.1:8100"
    assert environment["KVLOOP_DECODE_URLS"] == "http://10.0.0.2:8200"


@pytest.mark.parametrize("profile", SERVICES)
def test_each_worker_command_is_one(profile: str) -> None:
    """`kvloop` with a worker service's command and --dry-run prints a vLLM command."""
    for name, service in composed(profile, **HOSTS)["services"].items():
        if name in BESIDE or name == "model-cpu":
            continue
        outcome = subprocess.run(
            [sys.executable, "-m", "kvloop", "worker", *service["command"], "--dry-run"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert outcome.returncode == 0, outcome.stderr
        assert "--kv-transfer-config" in outcome.stdout


def test_a_forgotten_address_stops_the_worker_with_a_reason() -> None:
    """Without its address a GPU worker refuses to start, and says what is missing."""
    command = composed("prefill")["services"]["prefill"]["command"]
    outcome = subprocess.run(
        [sys.executable, "-m", "kvloop", "worker", *command, "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 2
    assert "side channel host" in outcome.stderr


def test_the_proxy_service_runs_and_its_health_check_passes(valkey_url: str) -> None:
    """The proxy's environment and health check, as processes; then it stops on SIGTERM."""
    service = composed("cpu")["services"]["proxy"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    changed = {
        "KVLOOP_HOST": "127.0.0.1",
        "KVLOOP_PORT": port,
        "KVLOOP_REDIS_URL": valkey_url,
        "KVLOOP_PREFILL_URLS": "http://127.0.0.1:9",
        "KVLOOP_DECODE_URLS": "http://127.0.0.1:10",
    }
    environment = {**os.environ, **service["environment"], **changed}
    check = [word.replace(":8000", f":{port}") for word in service["healthcheck"]["test"][1:]]
    check[0] = sys.executable
    process = subprocess.Popen([sys.executable, "-m", "kvloop", "proxy"], cwd=ROOT, env=environment)
    try:
        until = time.monotonic() + 20
        while subprocess.run(check, cwd=ROOT, capture_output=True, check=False).returncode:
            assert time.monotonic() < until, "the health check never passed"
            time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            assert b"kvloop_turns" in response.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert subprocess.run(check, cwd=ROOT, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("name", ["proxy", "worker", "worker-cpu"])
def test_the_dockerfiles_are_clean(name: str) -> None:
    """hadolint finds nothing, and the base image's tag is a version."""
    path = ROOT / "deploy" / f"Dockerfile.{name}"
    outcome = subprocess.run(
        [tool("hadolint"), str(path)], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout
    for image in re.findall(r"^FROM (\S+)", path.read_text(), re.M):
        assert re.search(r":v?\d", image), image


def test_the_worker_image_has_the_proxys_versions() -> None:
    """The few pins of the worker image are those of requirements/proxy.txt."""
    pins = (ROOT / "requirements" / "proxy.txt").read_text().splitlines()
    for line in (ROOT / "deploy" / "requirements-worker.txt").read_text().splitlines():
        assert line.startswith("#") or line in pins, line
