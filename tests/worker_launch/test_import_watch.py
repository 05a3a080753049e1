"""Patching at import, and not importing to patch."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from worker_launch.stream_patch.import_watch import when_imported

NAME = "watched_module_of_a_test"


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    path = tmp_path / f"{NAME}.py"
    path.write_text("def answer():\n    return 41\n")
    yield path
    sys.modules.pop(NAME, None)


def add_one(module: ModuleType) -> None:
    original = module.answer
    module.answer = lambda: original() + 1  # type: ignore[attr-defined]


def test_nothing_is_imported_by_watching(module_file: Path) -> None:
    """A process that never imports the module pays nothing."""
    when_imported(NAME, add_one)
    assert NAME not in sys.modules


def test_the_importer_gets_the_patched_module(module_file: Path) -> None:
    """The first import runs the callback, and the module still knows its source."""
    when_imported(NAME, add_one)
    module = importlib.import_module(NAME)
    assert module.answer() == 42
    assert "return 41" in inspect.getsource(module)


def test_a_module_that_is_loaded_is_patched_at_once(module_file: Path) -> None:
    """Registering late works as well."""
    module = importlib.import_module(NAME)
    when_imported(NAME, add_one)
    assert module.answer() == 42


def test_registering_twice_patches_once(module_file: Path) -> None:
    """vLLM may load plugins more than once in a process."""
    when_imported(NAME, add_one)
    when_imported(NAME, add_one)
    assert importlib.import_module(NAME).answer() == 42


def test_a_refusal_stops_the_import(module_file: Path) -> None:
    """A module that we refuse to patch cannot be imported unpatched by accident."""

    def refuse(module: ModuleType) -> None:
        raise RuntimeError("unknown version")

    when_imported(NAME, refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="unknown version"):
            importlib.import_module(NAME)


def test_a_missing_module_is_reported_as_ever(module_file: Path) -> None:
    """A name that does not exist raises the usual error."""
    when_imported("no_such_module_anywhere", add_one)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
