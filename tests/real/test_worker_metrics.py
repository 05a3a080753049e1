"""What dashboards and alerts ask of workers is what real ones tell."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import observed
from tests.real.conftest import Workers


async def test_recorded_pages_are_those_of_the_real_workers(workers: Workers) -> None:
    """Each series that a panel or rule reads is there, with the labels of the recording."""
    used = {
        name
        for query in observed.panel_queries() + observed.rule_queries()
        for name in observed.names(query.expr)
        if name.startswith("vllm:")
    }
    recorded = observed.worker_series()
    for url in (workers.pair.prefill, workers.pair.decode):
        async with workers.session.get(url + "/metrics") as response:
            page = await response.text()
        real: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                real.setdefault(sample.name, set()).update(sample.labels)
        assert used <= set(real)
        for name in used:
            assert real[name] == recorded[name], name
