"""Dashboards and rules: generated as committed, and they ask for series that exist."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from proxy.metrics import Metrics
from tests.deploy import observed


def generated() -> dict[Path, str]:
    made: dict[Path, str] = runpy.run_path(str(observed.ROOT / "deploy" / "generate.py"))[
        "generated"
    ]()
    return made


def test_committed_files_are_what_the_generator_writes() -> None:
    """After a change of deploy/generate.py or of a rule: python deploy/generate.py."""
    made = generated()
    assert {p for p in made if p.suffix == ".json"} == set(observed.DASHBOARDS.glob("*.json"))
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run python deploy/generate.py"


def proxy_series() -> set[str]:
    """Every series name the proxy can have, also those without a sample yet."""
    found = set()
    for metric in Metrics().registry._collector_to_names:
        name, kind = metric._name, metric._type  # type: ignore[attr-defined]
        if kind == "histogram":
            found |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        else:
            found.add(f"{name}_total" if kind == "counter" else name)
    return found


@pytest.mark.parametrize(
    "query", observed.panel_queries() + observed.rule_queries(), ids=lambda query: query.place
)
def test_queries_name_series_that_exist(query: observed.Query) -> None:
    """In the proxy's code, on a real worker's page, or recorded by a rule."""
    recorded = {rule["record"] for rule in observed.rules() if "record" in rule}
    known = proxy_series() | set(observed.worker_series()) | recorded
    assert observed.names(query.expr) <= known
    assert observed.names(query.expr) or query.expr.startswith("up{")


def test_every_panel_asks_a_question_and_fits_the_grid() -> None:
    """A title, a description, at least one query; no two panels overlap."""
    taken: dict[str, set[tuple[int, int]]] = {}
    for name, panel in observed.panels():
        assert panel["title"]
        assert panel["description"].strip()
        assert panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken.setdefault(name, set()), panel["title"]
        taken[name] |= cells


def test_prometheus_and_grafana_find_the_files() -> None:
    """Provisioning, the compose mounts and the datasource uid agree with the dashboards."""

    def read(*parts: str) -> Any:
        return yaml.safe_load((observed.ROOT / "deploy").joinpath(*parts).read_text())

    assert read("prometheus", "prometheus.yml")["rule_files"] == ["rules/*.yml"]
    source = read("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"][0]
    provider = read("grafana", "provisioning", "dashboards", "kvloop.yml")["providers"][0]
    compose = yaml.safe_load((observed.ROOT / "docker-compose.yml").read_text())["services"]
    mounts = [each.split(":") for each in compose["grafana"]["volumes"]]
    assert ["./deploy/grafana/dashboards", provider["options"]["path"], "ro"] in mounts
    assert ["./deploy/prometheus", "/etc/prometheus", "ro"] in [
        each.split(":") for each in compose["prometheus"]["volumes"]
    ]
    assert source["uid"] == "prometheus"


def test_the_recorded_pages_are_whole() -> None:
    """They parse, and a transfer had happened on each worker when they were recorded."""
    for path in observed.RECORDED.glob("*_metrics.txt"):
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(path.read_text())
            for sample in family.samples
        }
        assert samples["vllm:nixl_xfer_time_seconds_count"] > 0, path.name
