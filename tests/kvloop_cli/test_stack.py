"""The local stack with real processes and stub parts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from kvloop.stack import processes
from kvloop.stack.plan import Part, ReadyWhen
from kvloop.stack.state import Phase, ProcessId
from tests.kvloop_cli.conftest import Lab

pytestmark = pytest.mark.slow


def _pid_in(path: Path) -> ProcessId:
    identity = processes.identify(int(path.read_text()))
    assert identity is not None
    return identity


def test_ctrl_c_stops_everything_that_was_started_and_nothing_else(
    lab: Lab, bystander: ProcessId
) -> None:
    """Ctrl-C ends the parts and a grandchild in another session, exits 0, touches no stranger."""
    child = lab.path / "child"
    lab.plan(
        lab.part("valkey"), lab.part("worker", "child", f"child-pid={child}"), lab.part("proxy")
    )
    up = lab.up()
    up.until("Stop it:")
    started = [*lab.running(), _pid_in(child)]
    assert len(started) == 4
    assert all(processes.alive(process) for process in started)

    up.popen.send_signal(signal.SIGINT)

    assert up.ended() == 0, up.output
    assert [process for process in started if processes.alive(process)] == []
    assert processes.alive(bystander)
    assert lab.folder.read_state() is None


def test_examples_show_the_real_address_and_model(lab: Lab) -> None:
    """When all is ready, the printed curl and SDK examples can be pasted as they are."""
    lab.plan(lab.part("proxy"))
    up = lab.up()
    up.until("Stop it:")
    assert "curl -N http://127.0.0.1:8123/v1/chat/completions" in up.output
    assert '"model": "stub-model"' in up.output
    assert 'base_url="http://127.0.0.1:8123/v1"' in up.output
    assert "Watch it:   http://127.0.0.1:8124/" in up.output


def test_a_part_that_ignores_sigterm_is_killed_after_the_grace(lab: Lab) -> None:
    """SIGTERM is followed by SIGKILL, so nothing is left over."""
    lab.plan(lab.part("worker", "stubborn"))
    up = lab.up()
    up.until("Stop it:")
    [worker] = lab.running()
    up.popen.send_signal(signal.SIGTERM)
    assert up.ended() == 0, up.output
    assert not processes.alive(worker)


def test_a_part_that_dies_at_start_shows_its_last_words(lab: Lab) -> None:
    """The failing part is named with its exit code and log, the rest is stopped, exit code 1."""
    lab.plan(lab.part("valkey"), lab.part("decode", "die=3", after=("valkey",)))
    up = lab.up()
    up.until("valkey   ready")
    [valkey, *_] = lab.running()
    assert up.ended() == 1
    assert "decode ended with exit code 3 before it was ready" in up.output
    assert "\n  last words of the stub\n" in up.output
    assert "decode.log" in up.output
    assert not processes.alive(valkey)
    assert lab.state().phase is Phase.FAILED


def test_a_part_that_dies_later_ends_the_stack(lab: Lab) -> None:
    """A worker that dies while the stack serves is named, the rest is stopped, exit code 1."""
    prefill = lab.part("prefill", "die-on-request=9")
    lab.plan(prefill, lab.part("decode"))
    up = lab.up()
    up.until("Stop it:")
    decode = lab.running()[1]
    with pytest.raises(OSError, match="closed connection"):
        urllib.request.urlopen(prefill.target.replace("/health", "/die"))
    assert up.ended() == 1
    assert "prefill ended with exit code 9" in up.output
    assert "last words of the stub" in up.output
    assert not processes.alive(decode)


def test_a_program_that_does_not_exist_is_a_failed_part(lab: Lab) -> None:
    """A part that cannot even be started is reported like one that died."""
    lab.plan(replace(lab.part("worker"), argv=("/does/not/exist",)))
    up = lab.up()
    assert up.ended() == 1
    assert "worker cannot be started" in up.output
    assert "/does/not/exist" in up.output


def test_a_killed_launcher_leaves_no_worker_behind(lab: Lab) -> None:
    """When a launcher is killed outright, its child in another session is found and stopped."""
    child_file = lab.path / "child"
    lab.plan(lab.part("worker", "child", f"child-pid={child_file}"))
    up = lab.up()
    up.until("Stop it:")
    [launcher] = lab.running()
    child = _pid_in(child_file)
    os.kill(launcher.pid, signal.SIGKILL)
    assert up.ended() == 1
    assert "worker was ended by SIGKILL" in up.output
    assert not processes.alive(child)


def test_detach_status_down(lab: Lab) -> None:
    """A detached stack outlives its command, shows its state, runs once and ends with down."""
    lab.plan(lab.part("valkey"), lab.part("proxy", after=("valkey",)))
    up = lab.up("detach")
    assert up.ended() == 0, up.output
    assert "curl -N http://127.0.0.1:8123" in up.output
    started = [lab.state().supervisor, *lab.running()]
    assert all(processes.alive(process) for process in started)

    status = lab.kvloop("status", "--json")
    assert status.ended() == 0
    shown = json.loads(status.output)
    assert shown["phase"] == "ready"
    assert [(part["name"], part["phase"]) for part in shown["parts"]] == [
        ("valkey", "ready"),
        ("proxy", "ready"),
    ]

    again = lab.up()
    assert again.ended() == 1
    assert "already running" in again.output
    assert "http://127.0.0.1:8123 (ready)" in again.output

    down = lab.kvloop("down")
    assert down.ended() == 0, down.output
    assert [process for process in started if processes.alive(process)] == []
    assert lab.kvloop("status").ended() == 1
    assert lab.kvloop("down").ended() == 0


def test_detach_reports_a_part_that_fails(lab: Lab) -> None:
    """A detached start that fails prints the part's last log lines and leaves nothing running."""
    lab.plan(lab.part("valkey"), lab.part("decode", "die=3", after=("valkey",)))
    up = lab.up("detach")
    assert up.ended() == 1
    assert "decode ended with exit code 3 before it was ready" in up.output
    assert "last words of the stub" in up.output
    assert not any(processes.alive(p) for p in [lab.state().supervisor, *lab.running()])

    status = lab.kvloop("status")
    assert status.ended() == 1
    assert "decode ended with exit code 3" in status.output


def test_status_sees_that_a_part_no_longer_answers(lab: Lab) -> None:
    """A part that runs but does not answer makes status exit 1 and say so."""
    lab.plan(lab.part("prefill"), lab.part("decode"))
    assert lab.up("detach").ended() == 0
    prefill = lab.running()[0]
    os.kill(prefill.pid, signal.SIGSTOP)
    status = lab.kvloop("status", "--timeout", "0.5")
    assert status.ended() == 1
    assert "not answering" in status.output
    os.kill(prefill.pid, signal.SIGCONT)
    assert lab.kvloop("down").ended() == 0


def test_what_a_killed_supervisor_leaves_is_stopped_by_down(lab: Lab) -> None:
    """After kill -9 of the supervisor, status tells, and down stops even a stubborn part."""
    lab.plan(lab.part("worker", "stubborn"))
    assert lab.up("detach").ended() == 0
    [worker] = lab.running()
    os.kill(lab.state().supervisor.pid, signal.SIGKILL)
    assert processes.alive(worker)
    status = lab.kvloop("status")
    assert status.ended() == 1
    assert "supervisor has been killed" in status.output
    down = lab.kvloop("down", "--grace", "0.2")
    assert down.ended() == 0
    assert "left behind: worker" in down.output
    assert not processes.alive(worker)


def test_a_reused_pid_is_not_killed(lab: Lab, bystander: ProcessId) -> None:
    """A state file whose pids now belong to another process leads to no signal."""
    lab.plan(lab.part("worker"))
    assert lab.up("detach").ended() == 0
    state = lab.state()
    assert lab.kvloop("down").ended() == 0
    reused = replace(bystander, start_ticks=bystander.start_ticks - 1)
    parts = tuple(replace(part, process=reused) for part in state.parts)
    lab.folder.write_state(replace(state, supervisor=reused, parts=parts))

    down = lab.kvloop("down")

    assert down.ended() == 0
    assert "No stack is running" in down.output
    assert processes.alive(bystander)


def test_a_session_that_reuses_a_dead_pid_is_not_stopped() -> None:
    """If a dead part's pid now names a stranger's session, itself without leader, it lives on."""
    script = "import os, signal; pid = os.fork(); print(pid, flush=True) if pid else signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        stranger = processes.identify(int(leader.stdout.readline()))
        assert stranger is not None
        leader.wait()
        asyncio.run(processes.stop(replace(stranger, pid=leader.pid), grace_seconds=0))
        assert processes.alive(stranger)
        os.kill(stranger.pid, signal.SIGKILL)


async def test_a_step_that_finishes_lets_the_next_one_start(lab: Lab) -> None:
    """A part that prepares something counts as ready once it has ended well."""
    done = lab.path / "done"
    make = Part("model", (sys.executable, "-c", f"open({str(done)!r}, 'w')"), ReadyWhen.FINISHED)
    lab.plan(make, lab.part("worker", after=("model",)))
    up = lab.up()
    up.until("worker   starting")
    assert done.exists()
    up.until("Stop it:")
    up.popen.send_signal(signal.SIGINT)
    assert up.ended() == 0


def test_pids_of_an_earlier_boot_are_not_killed(bystander: ProcessId) -> None:
    """Ticks begin again at each boot, so an equal pid and tick of another boot is a stranger."""
    assert processes.family(bystander) == [bystander]
    assert processes.family(replace(bystander, boot_id="another")) == []
