"""The house rule of this package's files: a mark in the first line, and imports that keep to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import worker_launch

ROOT = Path(worker_launch.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
FORBIDDEN_IN_PURE = {
    "asyncio",
    "os",
    "socket",
    "subprocess",
    "time",
    "torch",
    "transformers",
    "typer",
    "vllm",
}
"""What does I/O, reads a clock or is not there without a worker's environment."""


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(module, column) of each import."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.col_offset
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.col_offset


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_file_says_what_it_is(path: Path) -> None:
    """The first docstring line begins with [pure] or [io]."""
    assert first_line(path).startswith(("[pure] ", "[io] "))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_keep_to_the_mark(path: Path) -> None:
    """Pure files import only pure ones and nothing that does I/O."""
    if not first_line(path).startswith("[pure]"):
        return
    for module, _ in imported(path):
        assert module.partition(".")[0] not in FORBIDDEN_IN_PURE, module
        if module.startswith("worker_launch."):
            partner = ROOT.parent / (module.replace(".", "/") + ".py")
            assert first_line(partner).startswith("[pure]"), module


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_proxy_is_never_imported(path: Path) -> None:
    """The two packages meet in the wire format only."""
    assert not [m for m, _ in imported(path) if m.partition(".")[0] in ("proxy", "kvloop")]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_vllm_internals_are_imported_in_one_file(path: Path) -> None:
    """Only ``vllm_compat`` (and the CPU tuning, whose subject they are) know vLLM's insides, and
    neither imports them before it is asked to."""
    for module, column in imported(path):
        if module.partition(".")[0] in ("vllm", "nixl"):
            assert path.name in ("vllm_compat.py", "cpu_tuning.py"), module
            assert column > 0, module
