"""docs/metrics.md and docs/runbook.md against the code, the rules and the dashboards."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from proxy import metrics
from proxy.metrics import Metrics
from tests.deploy import observed

DOCUMENT = (observed.ROOT / "docs" / "metrics.md").read_text()
RUNBOOK = (observed.ROOT / "docs" / "runbook.md").read_text()
ROW = re.compile(r"^\| `(?P<name>[a-z0-9_:]+)` \|(?P<rest>.*)\|$", re.MULTILINE)

CLOSED = {
    ("kvloop_returning_turns", "result"): metrics.RETURN_RESULTS,
    ("kvloop_prompt_tokens", "source"): metrics.TOKEN_SOURCES,
    ("kvloop_refused_turns", "cause"): metrics.REFUSED_CAUSES,
    ("kvloop_cold_retries", "leg"): metrics.RETRY_LEGS,
    ("kvloop_cold_retries", "cause"): metrics.RETRY_CAUSES,
    ("kvloop_stranded_prefills", "cause"): metrics.STRANDED_CAUSES,
    ("kvloop_push_unpaired", "cause"): metrics.UNPAIRED_CAUSES,
    ("kvloop_canary_checks", "result"): metrics.CANARY_RESULTS,
    ("kvloop_releases", "result"): metrics.RELEASE_RESULTS,
    ("kvloop_table_seconds", "operation"): metrics.TABLE_OPERATIONS,
    ("kvloop_table_failures", "operation"): metrics.TABLE_FAILURES,
    ("kvloop_evictions", "reason"): metrics.EVICTION_REASONS,
    ("kvloop_worker_paused", "what"): metrics.PAUSES,
}


def documented() -> dict[str, list[str]]:
    """Name -> the other cells of its row."""
    return {
        row["name"]: [cell.strip() for cell in row["rest"].split("|")]
        for row in ROW.finditer(DOCUMENT)
    }


def described(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> type and label names, of every metric in the code."""
    return {
        collector._name: (collector._type, collector._labelnames)  # type: ignore[attr-defined]
        for collector in registry._collector_to_names
    }


def test_the_page_lists_exactly_the_metrics_that_there_are() -> None:
    """Type and labels too; every row names a unit and asks a question."""
    page = documented()
    code = described(Metrics().registry)
    assert {name for name in page if name.startswith("kvloop_")} == set(code)
    for name, (kind, labels) in code.items():
        written_kind, unit, written_labels, question = page[name]
        assert written_kind == kind, name
        written = [part.split(":")[0].strip() for part in re.split(r"[;,] ", written_labels)]
        assert [each for each in labels if each not in written] == [], name
        assert unit
        assert "?" in question or question.endswith("."), name
        if name.endswith("_seconds") or name.endswith("_bytes"):
            assert unit == name.rsplit("_", 1)[1]


def test_closed_label_values_are_listed_in_full() -> None:
    """A value that the code can give and the page does not name is found here."""
    page = documented()
    for (name, label), values in CLOSED.items():
        cell = page[name][2]
        match = re.search(rf"{label}: ([a-zA-Z_, ]+)", cell)
        assert match, name
        assert tuple(match[1].split(", ")) == values, name


def test_worker_metrics_on_the_page_exist_on_real_workers() -> None:
    """And each that a dashboard or a rule uses is on the page."""
    real = {observed.family(series) for series in observed.worker_series()}
    page = {name for name in documented() if name.startswith("vllm:")}
    assert page <= real
    used = {
        observed.family(name)
        for query in observed.panel_queries() + observed.rule_queries()
        for name in observed.names(query.expr)
        if name.startswith("vllm:")
    }
    assert used <= page


def test_recording_rules_on_the_page_are_those_in_the_file() -> None:
    recorded = {rule["record"] for rule in observed.rules() if "record" in rule}
    assert {name for name in documented() if name.startswith("kvloop:")} == recorded


def test_every_alert_has_a_section_in_the_runbook_and_links_to_it() -> None:
    """The section says the same severity; no section is left without an alert."""
    sections = {
        title: text.strip()
        for title, text in re.findall(r"^## (Kvloop\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.S | re.M)
    }
    alerts = {rule["alert"]: rule for rule in observed.rules() if "alert" in rule}
    assert set(sections) == set(alerts)
    for name, alert in alerts.items():
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert alert["annotations"]["summary"]
        assert sections[name].startswith(f"**{alert['labels']['severity']}.**"), name


def test_reads_of_freed_blocks_wake_somebody() -> None:
    """At the first one, without waiting."""
    alert = next(r for r in observed.rules() if r.get("alert") == "KvloopReadOfFreedBlocks")
    assert alert["labels"]["severity"] == "page"
    assert "for" not in alert
