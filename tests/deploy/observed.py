"""What can be observed: metrics in the code, on recorded pages, in rules, on dashboards."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
RULES = ROOT / "deploy" / "prometheus" / "rules"
RECORDED = ROOT / "tests" / "system" / "recorded"


@dataclass(frozen=True)
class Query:
    """A PromQL expression and where it stands."""

    place: str
    expr: str


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield path.stem, panel


@functools.cache
def panel_queries() -> list[Query]:
    return [
        Query(f"{name}: {panel['title']} ({target['refId']})", target["expr"])
        for name, panel in panels()
        for target in panel["targets"]
    ]


@functools.cache
def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def rule_queries() -> list[Query]:
    return [Query(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


_NAME = re.compile(r"\b(?:vllm:|kvloop[_:])[a-z0-9_:]+")
_QUOTED = re.compile(r'"[^"]*"')


def names(expr: str) -> set[str]:
    """The series that an expression reads, ours and vLLM's."""
    return set(_NAME.findall(_QUOTED.sub("", expr)))


@functools.cache
def worker_series() -> dict[str, set[str]]:
    """Series on the recorded pages of a prefill and a decode worker -> their label names."""
    found: dict[str, set[str]] = {}
    for path in RECORDED.glob("*_metrics.txt"):
        for family in text_string_to_metric_families(path.read_text()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def family(series: str) -> str:
    """``x_total`` and ``x_bucket`` belong to ``x``."""
    return re.sub(r"_(total|bucket|sum|count)$", "", series)
