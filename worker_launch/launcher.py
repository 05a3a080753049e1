"""[io] Run one worker: start it, pass signals on, return its exit code.

The worker gets a session of its own. A Ctrl-C in the terminal then reaches it once, through us, and
whatever it leaves behind (vLLM's engine is a separate process, which outlives a killed API server)
can be ended as one group, which holds nothing but what we started. A session of its own would also
let it outlive us, so on Linux it asks the kernel for SIGTERM on our death, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType

from worker_launch import vllm_compat
from worker_launch.profiles import LaunchCommand

STOP_GRACE_S = 30.0
"""From the first signal to SIGKILL. vLLM ends in a few seconds; a worker in the middle of a long
prefill on a slow CPU takes longer. Less would cut off answers, more looks like a hang."""


class EnvironmentUnfit(RuntimeError):
    """This Python environment cannot run the worker; the message says what is missing."""


def check_environment() -> None:
    """Look at the environment that this very interpreter runs in.

    Raises EnvironmentUnfit if vLLM is missing or unknown, or if it would not find our plugin:
    streamed turns would then be served, but never reused, and nothing would say why.
    """
    try:
        vllm_compat.check_version(vllm_compat.installed_version())
    except vllm_compat.UnsupportedVllm as error:
        raise EnvironmentUnfit(str(error)) from error
    if not vllm_compat.plugin_is_installed():
        raise EnvironmentUnfit(
            f"vLLM would not find the entry point {vllm_compat.PLUGIN_NAME!r} in the group "
            f"{vllm_compat.PLUGIN_GROUP!r}: install kvloop into this environment (pip install -e .)"
        )


def run(command: LaunchCommand, *, stop_grace_s: float = STOP_GRACE_S) -> int:
    """Run the worker until it ends. SIGTERM and SIGINT are passed on.

    Returns its exit code; 128 + n if signal n ended it, as shells do. Raises EnvironmentUnfit if it
    cannot be started.
    """
    try:
        child = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            start_new_session=True,
            preexec_fn=_end_with_parent() if sys.platform == "linux" else None,
        )
    except OSError as error:
        raise EnvironmentUnfit(f"cannot start {command.argv[0]}: {error}") from error

    kill_later: list[threading.Timer] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)
        if not kill_later:
            timer = threading.Timer(stop_grace_s, _kill_group, [child.pid])
            timer.daemon = True
            timer.start()
            kill_later.append(timer)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = child.wait()
    finally:
        for timer in kill_later:
            timer.cancel()
        _kill_group(child.pid)
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _end_with_parent() -> Callable[[], object]:
    """What the child calls between fork and exec; loaded before, since it may not import there."""
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    return lambda: prctl(set_parent_death_signal, signal.SIGTERM)


def _kill_group(group: int) -> None:
    # The group's number cannot have been given to another group while a member is alive, and
    # without a member there is no such group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def own_interpreter() -> str:
    """The Python that runs us; workers run in the same environment."""
    return sys.executable
