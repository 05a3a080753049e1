"""The CPU tuning and the vLLM and NIXL that are installed."""

from __future__ import annotations

import os
import subprocess
import sys

from worker_launch.cpu_tuning import SWITCH

PROGRAM = """
from worker_launch import cpu_tuning
cpu_tuning.apply()
from nixl import _api
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core import EngineCoreProc
config = _api.nixlBind.nixlAgentConfig()
config.pthrDelay = 0
assert config.pthrDelay == cpu_tuning.PROGRESS_DELAY_US, config.pthrDelay
assert CpuPlatform.discover_numa_topology() == []
assert EngineCoreProc._process_engine_step.kvloop_rests
"""


def test_the_installed_versions_take_every_mend() -> None:
    """None is refused, and each is in place; in a process of its own, for it changes vLLM."""
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, SWITCH: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
