"""System tests start programs that are no part of this project: Prometheus, a browser.

``make tools`` (part of ``make test``) fetches them as Debian packages. Where that is not possible
they are skipped, and say what is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.prefix) / "tools"
"""Where requirements/tools.sh unpacks what the machine itself does not have."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


def program(name: str, folder: str = "usr/bin") -> str:
    """Path of an outside program, the machine's own or the unpacked one. Skips without it."""
    found = shutil.which(name) or shutil.which(name, path=TOOLS / folder)
    if found is None:
        pytest.skip(f"{name} is not installed and could not be fetched (make tools says why)")
    return found


def browser_environment() -> dict[str, str]:
    """An unpacked browser finds its unpacked libraries."""
    libraries = sorted({str(path.parent) for path in (TOOLS / "usr" / "lib").rglob("*.so*")})
    given = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, *given]))}
