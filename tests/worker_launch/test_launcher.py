"""Running a worker: exit codes, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worker_launch import launcher, vllm_compat
from worker_launch.profiles import LaunchCommand

RUN_CHILD = """
import sys
from worker_launch.launcher import run
from worker_launch.profiles import LaunchCommand
argv = (sys.executable, "-c", sys.argv[1], *sys.argv[3:])
sys.exit(run(LaunchCommand(argv, {"COLOUR": "green"}, ()), stop_grace_s=float(sys.argv[2])))
"""


def start(program: str, *arguments: str, grace: float = 20) -> subprocess.Popen[str]:
    """Start a launcher in a process of its own, as signal handlers belong to a main thread."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN_CHILD, program, str(grace), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def wait_for(path: Path) -> str:
    for _ in range(300):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} was never written")


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_exit_code_and_environment_are_passed_through() -> None:
    """The child sees the variables and its exit code becomes ours."""
    process = start("import os, sys; print(os.environ['COLOUR']); sys.exit(7)")
    assert end(process) == (7, "green\n")


def test_death_by_signal_is_reported_as_shells_do() -> None:
    """A child killed by signal 9 makes the exit code 137."""
    assert end(start("import os; os.kill(os.getpid(), 9)"))[0] == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_worker(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM and SIGINT are passed on once, and the worker may end in its own way."""
    ready = tmp_path / "ready"
    process = start(
        "import pathlib, signal, sys, time\n"
        "for n in (2, 15): signal.signal(n, lambda n, f: sys.exit(40 + n))\n"
        "pathlib.Path(sys.argv[1]).write_text('x')\n"
        "time.sleep(60)",
        str(ready),
    )
    wait_for(ready)
    process.send_signal(number)
    assert end(process)[0] == 40 + number


def test_a_worker_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    """After the grace the whole worker goes."""
    ready = tmp_path / "ready"
    process = start(
        "import pathlib, signal, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text('x')\n"
        "time.sleep(60)",
        str(ready),
        grace=0.2,
    )
    wait_for(ready)
    process.terminate()
    assert end(process)[0] == 137


def test_nothing_of_a_dead_worker_stays(tmp_path: Path) -> None:
    """A process that the worker left behind (vLLM's engine) is ended with it."""
    orphan = tmp_path / "orphan"
    process = start(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                         stdout=subprocess.DEVNULL)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n",
        str(orphan),
    )
    assert end(process)[0] == 0
    assert is_gone(int(orphan.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel for it")
def test_a_worker_does_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """SIGKILL of the launcher, which it cannot pass on, still ends the worker."""
    ready = tmp_path / "ready"
    process = start(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "time.sleep(60)",
        str(ready),
    )
    worker = int(wait_for(ready))
    process.kill()
    assert is_gone(worker)
    process.communicate(timeout=30)


def test_a_missing_program_is_named() -> None:
    """A command that cannot be started raises with its name."""
    with pytest.raises(launcher.EnvironmentUnfit, match="/no/python"):
        launcher.run(LaunchCommand(("/no/python",), dict(os.environ), ()))


def test_an_environment_without_our_plugin_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM without our entry point would never reuse a streamed turn, so it is not started."""
    monkeypatch.setattr(vllm_compat, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(vllm_compat, "plugin_is_installed", lambda: False)
    with pytest.raises(launcher.EnvironmentUnfit, match="pip install"):
        launcher.check_environment()
    monkeypatch.setattr(vllm_compat, "plugin_is_installed", lambda: True)
    launcher.check_environment()


def test_an_environment_with_another_vllm_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The found and the supported version are both named."""
    monkeypatch.setattr(vllm_compat, "installed_version", lambda: "0.29.1")
    with pytest.raises(launcher.EnvironmentUnfit, match=r"0\.32\.x.*0\.29\.1"):
        launcher.check_environment()
