"""[io] Where and with which code a measurement was made."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path


def machine() -> str:
    """Cores, processor and memory in words."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {name}, {memory:.0f} GiB"


def commit() -> str:
    """Of this checkout, with ``-dirty`` if it was changed; "unknown" outside of one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
