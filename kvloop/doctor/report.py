"""[pure] Findings as text for a person and as JSON for a script."""

from __future__ import annotations

import json

from kvloop.doctor.checks import Finding, Verdict, failed

_SHOWN = {Verdict.OK: "ok  ", Verdict.WARN: "WARN", Verdict.FAIL: "FAIL", Verdict.SKIP: "?   "}


def as_text(findings: list[Finding]) -> str:
    """One line a finding, what mends it below, a summary last."""
    lines = []
    for finding in findings:
        lines.append(f"{_SHOWN[finding.verdict]}  {finding.check}: {finding.said}")
        if finding.mend:
            lines.append(f"      -> {finding.mend}")
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    lines.append(
        f"{counts[Verdict.OK]} fine, {counts[Verdict.WARN]} to look at, "
        f"{counts[Verdict.FAIL]} to mend, {counts[Verdict.SKIP]} not known"
    )
    return "\n".join(lines) + "\n"


def as_json(findings: list[Finding]) -> str:
    """``{"ok": bool, "findings": [{check, verdict, said, mend}]}``."""
    rows = [
        {"check": f.check, "verdict": str(f.verdict), "said": f.said, "mend": f.mend}
        for f in findings
    ]
    return json.dumps({"ok": not failed(findings), "findings": rows}, indent=2) + "\n"
