"""The command line of the workers, without starting any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from worker_launch import launcher
from worker_launch.cli import app
from worker_launch.profiles import LaunchCommand

MODEL = ("--model", "/models/none", "--served-model-name", "m")
runner = CliRunner()


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "producer"), ("decode", "consumer")])
def test_dry_run_prints_and_starts_nothing(role: str, kv_role: str) -> None:
    """A dry run needs neither vLLM nor the model and ends with 0."""
    result = runner.invoke(app, [role, *MODEL, "--port", "8123", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert f'"kv_role":"kv_{kv_role}"' in result.stdout
    assert "--port 8123" in result.stdout
    assert "#" not in result.stdout


def test_dry_run_explains_on_request() -> None:
    """With ``--explain`` each setting's reason stands before the command."""
    result = runner.invoke(app, ["prefill", *MODEL, "--dry-run", "--explain"])
    assert result.stdout.startswith("# dtype = float32: ")


def test_arguments_after_the_dashes_go_to_vllm() -> None:
    """What follows ``--`` comes last, unchanged."""
    result = runner.invoke(app, ["decode", *MODEL, "--dry-run", "--", "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("--seed 7")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prefill", *MODEL, "--profile", "huge"], "unknown profile 'huge'"),
        (["prefill", *MODEL, "--port", "99999"], "port 99999 is not between 1 and 65535"),
        (["prefill", *MODEL, "--port", "eighty"], "'--port'"),
        (["prefill", *MODEL, "--set", "nonsense"], "key=value"),
        (["both", *MODEL], "both"),
        (["prefill", *MODEL], "no model folder at /models/none"),
        (["model", "huge", "--out", "x"], "unknown model 'huge'"),
    ],
)
def test_wrong_requests_end_with_two_and_say_why(arguments: list[str], words: str) -> None:
    """An unknown profile or role, a bad port, a missing model: exit 2 and the name of the thing."""
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_missing_vllm_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that cannot carry a worker ends with 1 and the reason."""

    def unfit() -> None:
        raise launcher.EnvironmentUnfit("vLLM is not installed")

    monkeypatch.setattr(launcher, "check_environment", unfit)
    result = runner.invoke(app, ["prefill", "--model", str(tmp_path), "--served-model-name", "m"])
    assert result.exit_code == 1
    assert "vLLM is not installed" in result.stderr


def test_the_workers_exit_code_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends as the worker did."""

    def run(command: LaunchCommand) -> int:
        return 42

    monkeypatch.setattr(launcher, "check_environment", lambda: None)
    monkeypatch.setattr(launcher, "run", run)
    result = runner.invoke(app, ["prefill", "--model", str(tmp_path), "--served-model-name", "m"])
    assert result.exit_code == 42


def test_the_package_can_be_run_as_a_module() -> None:
    """``python -m worker_launch`` is the same command line."""
    done = subprocess.run(
        [sys.executable, "-m", "worker_launch", "decode", *MODEL, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "kv_consumer" in done.stdout
