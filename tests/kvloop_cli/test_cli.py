"""The command itself: what it imports, and what it passes on."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvloop
from tests.kvloop_cli.conftest import Lab

ROOT = Path(kvloop.__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"


def test_version(lab: Lab) -> None:
    """`kvloop --version` prints the version that pyproject.toml has."""
    command = lab.command("-m", "kvloop", "--version")
    assert command.ended() == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command.output == f"kvloop {project['version']}\n"


def test_importing_the_command_line_loads_nothing_heavy(lab: Lab) -> None:
    """Help is quick, and the proxy runs without vLLM: each command imports what it needs."""
    heavy = "{'vllm', 'torch', 'worker_launch', 'proxy', 'fastapi', 'aiohttp', 'redis', 'pydantic'}"
    script = f"import sys, kvloop.cli; print(sorted({heavy} & set(sys.modules)))"
    command = lab.command("-c", script)
    assert command.ended() == 0
    assert command.output == "[]\n"


def test_worker_options_pass_through(lab: Lab) -> None:
    """What follows `kvloop worker` reaches worker_launch unchanged, `--` and --help included."""
    run = ("-m", "kvloop", "worker", "decode", "--model", "m", "--served-model-name", "m")
    command = lab.command(*run, "--dry-run", "--", "--max-num-seqs", "3")
    assert command.ended() == 0, command.output
    assert "--max-num-seqs 3" in command.output
    shown = lab.command(*run, "--help")
    assert shown.ended() == 0
    assert "side-channel-port" in shown.output


def test_proxy_options_pass_through(lab: Lab) -> None:
    """What follows `kvloop proxy` reaches the proxy's own settings."""
    shown = lab.command("-m", "kvloop", "proxy", "--help")
    assert shown.ended() == 0, shown.output
    assert "--decode-urls" in shown.output


def _pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in wanted}


def test_pins_satisfy_what_the_project_asks_for() -> None:
    """Every dependency and test tool of pyproject.toml is pinned to a version that it accepts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = _pins("proxy.txt") | _pins("test.txt")
    groups = project["dependency-groups"]
    for text in [*project["project"]["dependencies"], *groups["test"], *groups["lint"]]:
        wanted = Requirement(text)
        version = pins.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is in no requirements file"
        assert version in wanted.specifier, f"{text}, but {version} is pinned"


def test_one_environment_can_hold_all_pins() -> None:
    """The lists are installed together, so a package that is in two of them has one version."""
    chosen: dict[str, str] = {}
    for name in ("proxy.txt", "test.txt", "torch.txt", "workers-cpu.txt"):
        for package, version in _pins(name).items():
            assert chosen.setdefault(package, version) == version, f"{package} in {name}"


def test_requirement_files_name_no_package_index() -> None:
    """Which index is used is the user's setting; the lists work with any."""
    for file in REQUIREMENTS.iterdir():
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", file.read_text()), file


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_make_alone_lists_the_commands() -> None:
    """Each command of the Makefile is listed with one line that says what it does."""
    listed = _run("make")
    assert listed.returncode == 0
    for target in ("up", "test", "test-fast", "lint", "bench", "clean"):
        assert re.search(rf"^  make {target} +\w", listed.stdout, re.MULTILINE), target


def test_an_old_python_is_refused_with_the_mend(tmp_path: Path) -> None:
    """Python below 3.11 is named with its version, and so is the variable that chooses another."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    for python, words in ((str(old), "is Python 3.9.2"), ("no-such-python", "there is no")):
        refused = _run("bash", "requirements/install.sh", "fast", python, str(tmp_path / "venv"))
        assert refused.returncode == 1
        assert "Python 3.11 or newer" in refused.stderr
        assert words in refused.stderr
        assert "PYTHON=python3.12" in refused.stderr
    assert not (tmp_path / "venv").exists()
