"""Writes what is generated under deploy/: Grafana's dashboards, the rules as a Kubernetes object.

    python deploy/generate.py

The results are committed, so that nobody needs this file to use them; a test compares them.
Dashboards are plain dicts: the few fields that Grafana needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
RULES = DEPLOY / "prometheus" / "rules"
KUBERNETES_RULES = DEPLOY / "kubernetes" / "base" / "prometheus-rules.yaml"

SOURCE = {"type": "prometheus", "uid": "${source}"}
GREEN, AMBER, RED, BLUE, GREY = "green", "orange", "red", "blue", "#8e8e8e"

# One colour for each route and source on all dashboards.
COLOURS = {
    "prefill-with-pull": GREEN, "cold-prefill": BLUE, "decode-only": AMBER, "none": GREY,
    "pulled": GREEN, "prefill_cache": "#96d98d", "reused": "#c8f2c2", "computed": BLUE,
    "decode_local": "#2aa7a0", "appended": "#2aa7a0", "decode-local-append": "#2aa7a0",
    "push": "#8ab8ff",
    "missed": BLUE, "stored": GREEN,
}  # fmt: skip
COLOURED = {"{{route}}", "{{source}}", "{{result}}"}

Query = tuple[str, str]
"""PromQL and legend."""


def panel(
    title: str,
    question: str,
    *queries: Query,
    unit: str = "short",
    kind: str = "timeseries",
    width: int = 8,
    height: int = 8,
    stack: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    steps: tuple[tuple[float | None, str], ...] = ((None, BLUE),),
    decimals: int | None = None,
) -> dict[str, Any]:
    """``limits``: ends of the axis. ``steps``: colours from these values on (single numbers)."""
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if kind == "timeseries":
        custom = {
            "lineWidth": 1,
            "fillOpacity": 25 if stack else 8,
            "showPoints": "never",
            "spanNulls": True,
            "stacking": {"mode": "normal" if stack else "none"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
        }
    elif kind == "bargauge":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "horizontal",
            "displayMode": "basic",
        }
    elif kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": unit}, "cellGap": 1}
    low, high = limits
    defaults: dict[str, Any] = {
        "unit": unit,
        "custom": custom,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in steps],
        },
    }
    defaults |= {"min": low} if low is not None else {}
    defaults |= {"max": high} if high is not None else {}
    defaults |= {"decimals": decimals} if decimals is not None else {}
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for name, colour in COLOURS.items()
        if kind == "timeseries" and any(legend in COLOURED for _, legend in queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": question,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "format": "heatmap" if kind == "heatmap" else "time_series",
            }
            for number, (query, legend) in enumerate(queries)
        ],
    }


def stat(title: str, question: str, query: str, **more: Any) -> dict[str, Any]:
    return panel(title, question, (query, ""), kind="stat", **{"width": 4, "height": 5, **more})


def row(title: str) -> dict[str, Any]:
    return {"type": "row", "title": title, "gridPos": {"w": 24, "h": 1}, "panels": []}


def dashboard(uid: str, title: str, text: str, panels: list[dict[str, Any]]) -> dict[str, Any]:
    x = y = tallest = 0
    for number, each in enumerate(panels, start=1):
        place = each["gridPos"]
        if x + place["w"] > 24:
            x, y, tallest = 0, y + tallest, 0
        place |= {"x": x, "y": y}
        x, tallest = x + place["w"], max(tallest, place["h"])
        each["id"] = number
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["kvloop"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [{"type": "dashboards", "tags": ["kvloop"], "title": "kvloop", "keepTime": True}],
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {"text": "Prometheus", "value": "prometheus"},
                }
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": SOURCE,
                    "enable": True,
                    "iconColor": RED,
                    "expr": 'ALERTS{alertname=~"Kvloop.*", alertstate="firing"}',
                    "titleFormat": "{{alertname}}",
                }
            ]
        },
        "panels": panels,
    }


def quantile(q: float, metric: str, by: str = "route") -> Query:
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket[$__rate_interval]))"
    legend = f"p{q * 100:g}" + (f" {{{{{by}}}}}" if by else "")
    return f"histogram_quantile({q}, {rate})", legend


def rate(metric: str, by: str, where: str = "") -> Query:
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))", f"{{{{{by}}}}}"


SHARE = {"unit": "percentunit", "limits": (0, 1)}
BAD_ABOVE_ZERO = ((None, GREEN), (1e-9, RED))
GOOD_SHARE = ((None, RED), (0.3, AMBER), (0.7, GREEN))
FULL = ((None, GREEN), (0.7, AMBER), (0.9, RED))
ONE_IS_GOOD = ((None, RED), (1, GREEN))

DECODE_PINS = 'vllm:kvloop_pinned_blocks{role="decode"}'
DECODE_LIMIT = 'vllm:kvloop_pin_limit_blocks{role="decode"}'


def overview() -> dict[str, Any]:
    return dashboard(
        "kvloop-overview",
        "kvloop: overview",
        "Is it helping? Is it safe? Is it full?",
        [
            row("Is it helping?"),
            stat("Returning turns reused", "Of the turns that had a history, how many got most of "
                 "their prompt's KV back?", "kvloop:returning_turns:hit_ratio5m",
                 steps=GOOD_SHARE, **SHARE),
            stat("Prompt tokens not computed", "How much prefill work is saved?",
                 "kvloop:prompt_tokens:reused_ratio5m", steps=GOOD_SHARE, **SHARE),
            stat("Prefill time saved", "How many prefill seconds are saved each second (estimated, "
                 "see docs/metrics.md)? Below 0 reuse costs time.",
                 "kvloop:reuse_saved_seconds:rate5m", unit="none", decimals=2,
                 steps=((None, RED), (0, GREEN))),
            stat("TTFT with reuse, p50", "What do clients of reused turns wait for?",
                 'kvloop:ttft_seconds:p50_5m{route="prefill-with-pull"}', unit="s"),
            stat("TTFT cold, p50", "And clients of turns that were prefilled cold?",
                 'kvloop:ttft_seconds:p50_5m{route="cold-prefill"}', unit="s"),
            stat("Turns/s", "How much is going on?", "sum(kvloop:turns:rate5m)", unit="reqps"),
            panel("Time to first token by route", "Are turns with a pull faster than cold ones? "
                  "Mind that they have longer prompts.",
                  quantile(0.5, "kvloop_ttft_seconds"), quantile(0.95, "kvloop_ttft_seconds"),
                  unit="s"),
            panel("Prompt tokens by source", "Where does the KV of prompts come from?",
                  rate("kvloop_prompt_tokens_total", "source"), unit="short", stack=True),
            panel("Turns by route", "Which way do turns take?",
                  rate("kvloop_turns_total", "route"), unit="reqps", stack=True),
            row("Is it safe?"),
            stat("Reads of freed blocks", "Did anybody read blocks that decode had given to "
                 "others? (last hour; must be 0)",
                 'sum(increase(vllm:nixl_num_notifications_after_expiry_total{role="decode"}[1h]))',
                 steps=BAD_ABOVE_ZERO),
            stat("Canary differences", "Did a sampled warm turn give another first token than a "
                 "cold run? (last hour; must be 0)",
                 'sum(increase(kvloop_canary_checks_total{result="different"}[1h]))',
                 steps=BAD_ABOVE_ZERO),
            stat("Canary checks", "How many turns were compared in the last hour?",
                 'sum(increase(kvloop_canary_checks_total{result="equal"}[1h]))'),
            stat("Streams broken", "How many answers ended with an error in the last hour?",
                 "sum(increase(kvloop_stream_errors_total[1h]))", steps=BAD_ABOVE_ZERO),
            stat("Reuse switched on", "1: on. 0: somebody switched it off.",
                 "min(kvloop_reuse_enabled)", steps=ONE_IS_GOOD),
            stat("Redis answers", "Without it no turn is reused.", "min(kvloop_table_up)",
                 steps=ONE_IS_GOOD),
            panel("Repeated legs", "What fails and is repeated unseen by clients?",
                  ("sum by (leg, cause) (rate(kvloop_cold_retries_total[$__rate_interval]))",
                   "{{leg}} {{cause}}"), unit="reqps"),
            panel("Error answers", "What do clients see of failures?",
                  ("sum by (status) (rate(kvloop_http_errors_total[$__rate_interval])) "
                   "or on() vector(0)", "HTTP {{status}}"),
                  ("sum(rate(kvloop_stream_errors_total[$__rate_interval]))", "in a stream"),
                  rate("kvloop_refused_turns_total", "cause"), unit="reqps"),
            panel("Clients that left", "Do clients give up before their answer is complete, and "
                  "how many prefills were for nothing?",
                  ("sum by (stage) (rate(kvloop_client_disconnects_total[$__rate_interval])) "
                   "or on() vector(0)", "left: {{stage}}"),
                  ("sum by (cause) (rate(kvloop_stranded_prefills_total[$__rate_interval]))",
                   "stranded: {{cause}}"),
                  ("sum by (cause) (rate(kvloop_push_unpaired_total[$__rate_interval]))",
                   "decode waits in vain: {{cause}}"), unit="reqps"),
            row("Is it full?"),
            panel("Retained share of what decode may keep", "How near is the limit?",
                  ("kvloop:pinned_of_limit:ratio", "{{instance}}"), width=8,
                  unit="percentunit", limits=(0, 1)),
            panel("KV cache in use", "How full are the workers with retained and running KV?",
                  ("max by (role, instance) (vllm:kv_cache_usage_perc)", "{{role}} {{instance}}"),
                  width=8, unit="percentunit", limits=(0, 1)),
            panel("Turns under way and waiting", "Is there a queue in front of the workers?",
                  ("sum(kvloop_turns_in_flight)", "under way"),
                  ("sum(kvloop_turns_queued)", "waiting in the proxy"),
                  ("sum by (role) (vllm:num_requests_waiting)", "waiting on {{role}}"), width=8),
        ],
    )  # fmt: skip


def sessions() -> dict[str, Any]:
    return dashboard(
        "kvloop-sessions",
        "kvloop: sessions and hit rates",
        "Which turns are reused, which are not, and why?",
        [
            row("Hit rates"),
            panel("Returning turns", "Of the turns that had a history: where did most of their "
                  "KV come from?", rate("kvloop_returning_turns_total", "result"),
                  unit="reqps", stack=True),
            panel("Hit rates", "Of turns, and of tokens.",
                  ("kvloop:returning_turns:hit_ratio5m", "returning turns reused"),
                  ("kvloop:prompt_tokens:reused_ratio5m", "prompt tokens not computed"),
                  ("kvloop:prompt_tokens:pulled_ratio5m", "prompt tokens pulled"), **SHARE),
            panel("Prompt tokens by source, on decode", "What did decode read from prefill, find "
                  "in its own cache, compute itself? (vLLM's count)",
                  ("sum by (source) (rate(vllm:prompt_tokens_by_source_total{role=\"decode\"}"
                   "[$__rate_interval]))", "{{source}}"), stack=True),
            row("Reasons"),
            panel("Turns by reason", "Why did turns go the way they went? The list is in "
                  "proxy/turn/reasons.py.", rate("kvloop_turns_total", "reason"),
                  unit="reqps", stack=True, width=12),
            panel("Misses by reason", "What keeps turns that could be reused from it? (without "
                  "first turns)",
                  ("sum by (reason) (rate(kvloop_turns_total{route!=\"prefill-with-pull\", "
                   "reason!=\"new_session\"}[$__rate_interval])) or on() vector(0)", "{{reason}}"),
                  unit="reqps", width=12),
            panel("Histories that changed", "Do clients edit or shorten what they send? Each kind "
                  "of mismatch is a reason.",
                  ("sum by (reason) (rate(kvloop_turns_total{reason=~"
                   "\"history_cut|history_diverged|below_threshold|tokens_unknown|uncuttable\"}"
                   "[$__rate_interval])) or on() vector(0)", "{{reason}}"), unit="reqps"),
            panel("Kept in vain", "How many kept tokens did the next turn not repeat?",
                  ("sum(rate(kvloop_mismatched_tokens_total[$__rate_interval]))",
                   "tokens/s not repeated"),
                  ("sum(rate(kvloop_prompt_tokens_total{source=\"pulled\"}[$__rate_interval]))",
                   "tokens/s pulled")),
            panel("Claims lost, pulls declined", "Do turns race for a session? Does prefill not "
                  "do what it is asked?",
                  ("sum(rate(kvloop_claims_lost_total[$__rate_interval]))", "claims lost"),
                  ("sum(rate(kvloop_pulls_declined_total[$__rate_interval]))", "pulls declined"),
                  unit="reqps"),
            row("What it is worth"),
            panel("Prefill time of reused turns", "What did they take, and what would they have "
                  "taken cold (estimated)? Prefill seconds per second.",
                  ("sum(rate(kvloop_reuse_cold_estimate_seconds_total[$__rate_interval]))",
                   "cold, estimated"),
                  ("sum(rate(kvloop_reuse_spent_seconds_total[$__rate_interval]))", "taken")),
            panel("Prefill leg by route, p50", "How long does prefill take?",
                  ("histogram_quantile(0.5, sum by (le, route) (rate("
                   "kvloop_leg_seconds_bucket{leg=\"prefill\"}[$__rate_interval])))",
                   "{{route}}"), unit="s"),
            panel("Whole turns by route, p50 and p95", "How long do answers take to their end?",
                  quantile(0.5, "kvloop_turn_seconds"), quantile(0.95, "kvloop_turn_seconds"),
                  unit="s"),
            panel("Time to first token, all turns", "How is it spread?",
                  ("sum by (le) (increase(kvloop_ttft_seconds_bucket[$__rate_interval]))",
                   "{{le}}"), kind="heatmap", unit="s"),
            panel("Inter-token latency by route, p50", "Does serving reuse slow down streams? "
                  "(mean of a turn)", quantile(0.5, "kvloop_itl_seconds"), unit="s"),
            panel("Longest pause in an answer, p95", "Do streams stall?",
                  quantile(0.95, "kvloop_longest_gap_seconds"), unit="s"),
            row("Session table"),
            panel("Table operations, p50 and p99", "Is Redis quick?",
                  quantile(0.5, "kvloop_table_seconds", "operation"),
                  quantile(0.99, "kvloop_table_seconds", "operation"), unit="s"),
            panel("Failures", "Does it answer?", rate("kvloop_table_failures_total", "operation"),
                  unit="reqps"),
            panel("Size", "How many keys, how much memory?",
                  ("max(kvloop_table_keys)", "keys"),
                  ("max(kvloop_table_memory_bytes) / 1048576", "MiB")),
        ],
    )  # fmt: skip


def workers() -> dict[str, Any]:
    by_worker = "{{role}} {{instance}}"
    return dashboard(
        "kvloop-workers",
        "kvloop: workers and transfers",
        "Are the workers well, and what do transfers cost?",
        [
            row("Workers, as the proxies see them"),
            panel("In service", "Which workers are given turns? (1: yes)",
                  ("min by (role, worker) (kvloop_worker_healthy)", "{{role}} {{worker}}"),
                  limits=(0, 1)),
            panel("Paused after failures", "Is a breaker open, are pulls or transfers paused? "
                  "(1: yes)",
                  ("max by (role, worker, what) (kvloop_worker_paused)",
                   "{{what}} {{worker}}"), limits=(0, 1)),
            panel("Outstanding turns", "How is the load spread?",
                  ("sum by (role, worker) (kvloop_worker_outstanding_turns)",
                   "{{role}} {{worker}}")),
            row("Workers, as they see themselves"),
            panel("Running and waiting", "Do requests queue on a worker?",
                  ("sum by (role, instance) (vllm:num_requests_running)", "running " + by_worker),
                  ("sum by (role, instance) (vllm:num_requests_waiting)", "waiting " + by_worker)),
            panel("KV cache in use", "Is there room?",
                  ("max by (role, instance) (vllm:kv_cache_usage_perc)", by_worker), **SHARE),
            panel("Preemptions", "Does a worker throw requests out for want of blocks?",
                  ("sum by (role, instance) (rate(vllm:num_preemptions_total"
                   "[$__rate_interval]))", by_worker), unit="reqps"),
            row("Transfers (NIXL)"),
            panel("Bytes read", "How much flows? prefill: from decode (the loop); decode: from "
                  "prefill.",
                  ("sum by (role, instance) (rate(vllm:nixl_bytes_transferred_sum"
                   "[$__rate_interval]))", by_worker), unit="Bps"),
            panel("Time of a read, p50 and p95", "How long does a transfer take?",
                  *[(f"histogram_quantile({q}, sum by (le, role) (rate("
                     "vllm:nixl_xfer_time_seconds_bucket[$__rate_interval])))",
                     f"p{q * 100:g} {{{{role}}}}") for q in (0.5, 0.95)], unit="s"),
            panel("Bandwidth while reading", "Is the network as fast as it should be?",
                  ("sum by (role) (rate(vllm:nixl_bytes_transferred_sum[$__rate_interval])) / "
                   "sum by (role) (rate(vllm:nixl_xfer_time_seconds_sum[$__rate_interval]))",
                   "{{role}}"), unit="Bps"),
            panel("Size of a read, mean", "Few large reads or many small ones?",
                  ("sum by (role) (rate(vllm:nixl_bytes_transferred_sum[$__rate_interval])) / "
                   "sum by (role) (rate(vllm:nixl_bytes_transferred_count[$__rate_interval]))",
                   "{{role}}"), unit="bytes"),
            panel("Posting a read, mean", "How long does it take to hand a read to NIXL?",
                  ("sum by (role) (rate(vllm:nixl_post_time_seconds_sum[$__rate_interval])) / "
                   "sum by (role) (rate(vllm:nixl_post_time_seconds_count[$__rate_interval]))",
                   "{{role}}"), unit="s"),
            panel("Failures", "Do reads or notifications fail, or come too late?",
                  ("sum by (role) (increase(vllm:nixl_num_failed_transfers_total[5m]))",
                   "failed reads {{role}}"),
                  ("sum by (role) (increase(vllm:nixl_num_failed_notifications_total[5m]))",
                   "failed notifications {{role}}"),
                  ("sum by (role) (increase(vllm:nixl_num_notifications_after_expiry_total[5m]))",
                   "after expiry {{role}}")),
            row("Legs of a turn"),
            panel("Tokenise, p95", "Is tokenising slow?",
                  ("histogram_quantile(0.95, sum by (le) (rate(kvloop_leg_seconds_bucket"
                   "{leg=\"tokenise\"}[$__rate_interval])))", "p95"), unit="s"),
            panel("Prefill, p50 and p95", "From the call to its answer.",
                  *[(f"histogram_quantile({q}, sum by (le, route) (rate(kvloop_leg_seconds_bucket"
                     "{leg=\"prefill\"}[$__rate_interval])))", f"p{q * 100:g} {{{{route}}}}")
                    for q in (0.5, 0.95)], unit="s"),
            panel("Decode to first content, p50 and p95", "Transfer to decode and its first step.",
                  *[(f"histogram_quantile({q}, sum by (le, route) (rate(kvloop_leg_seconds_bucket"
                     "{leg=\"decode\"}[$__rate_interval])))", f"p{q * 100:g} {{{{route}}}}")
                    for q in (0.5, 0.95)], unit="s"),
        ],
    )  # fmt: skip


def retention() -> dict[str, Any]:
    return dashboard(
        "kvloop-retention",
        "kvloop: retention",
        "What does decode keep, for how long, and is it worth its room?",
        [
            row("What is kept"),
            panel("Blocks kept", "How many KV blocks do finished turns hold, and how many may "
                  "they?",
                  (f"sum by (instance) ({DECODE_PINS})", "kept {{instance}}"),
                  (f"sum by (instance) ({DECODE_LIMIT})", "limit {{instance}}")),
            panel("Share of the limit", "How near is it?",
                  ("kvloop:pinned_of_limit:ratio", "{{instance}}"), **SHARE),
            panel("Share of decode's whole cache", "How much room do running requests lose?",
                  (f"sum by (instance) ({DECODE_PINS}) / sum by (instance) "
                   "(vllm:kvloop_usable_blocks{role=\"decode\"})", "{{instance}}"), **SHARE),
            panel("Kept turns", "How many turns' KV is kept?",
                  ("sum by (instance) (vllm:kvloop_pinned_requests{role=\"decode\"})",
                   "{{instance}}")),
            panel("Block-seconds per second and pull", "What does a pull cost in kept room?",
                  (f"sum(avg_over_time({DECODE_PINS}[5m])) / "
                   "(sum(rate(kvloop_turns_total{route=\"prefill-with-pull\"}[5m])) > 0)",
                   "block-seconds for each pull")),
            panel("Blocks for each kept turn", "How large are the conversations that are kept?",
                  (f"sum({DECODE_PINS}) / (sum(vllm:kvloop_pinned_requests{{role=\"decode\"}}) "
                   "> 0)", "blocks")),
            row("The proxies' ledger"),
            panel("Ledger and budget", "How much do the proxies know to be kept, and how much may "
                  "it be? Under pressure the two are equal.",
                  ("max by (worker) (kvloop_retained_blocks)", "retained {{worker}}"),
                  ("max by (worker) (kvloop_retention_budget_blocks)", "budget {{worker}}")),
            panel("Time between turns", "When do conversations come back? Leases follow it.",
                  *[(f"histogram_quantile({q}, sum by (le) (rate(kvloop_turn_gap_seconds_bucket"
                     "[$__rate_interval])))", f"p{q * 100:g}") for q in (0.5, 0.95)], unit="s"),
            panel("Given up early", "Does the budget throw out what would be used?",
                  ("sum by (reason) (rate(kvloop_evictions_total[$__rate_interval]))",
                   "evicted: {{reason}}"),
                  ("sum(rate(kvloop_leases_expired_total[$__rate_interval])) or on() vector(0)",
                   "lease ran out"), unit="reqps"),
            panel("Kept room, by what became of it", "Blocks times seconds that ended each second: "
                  "what does keeping cost?",
                  ("sum by (worker) (rate(kvloop_retained_block_seconds_total"
                   "[$__rate_interval]))", "{{worker}}"), width=12),
            panel("Tokens pulled for a block-second", "What does keeping bring?",
                  ("sum(rate(kvloop_prompt_tokens_total{source=\"pulled\"}[5m])) / "
                   "(sum(rate(kvloop_retained_block_seconds_total[5m])) > 0)", "tokens"),
                  width=12),
            row("Coming and going"),
            panel("Pins", "How many turns' KV is kept, given back, or runs out unused?",
                  ("sum(rate(vllm:kvloop_pins_total{role=\"decode\"}[$__rate_interval]))", "kept"),
                  ("sum(rate(vllm:kvloop_pins_released_total{role=\"decode\"}[$__rate_interval]))",
                   "read or released"),
                  ("sum(rate(vllm:kvloop_pins_expired_total{role=\"decode\"}[$__rate_interval]))",
                   "lease ran out")),
            panel("Refused", "Why did decode keep nothing?",
                  ("sum by (reason) (rate(vllm:kvloop_pins_refused_total{role=\"decode\"}"
                   "[$__rate_interval]))", "{{reason}}")),
            panel("After a turn", "Was what decode kept stored in the table? (another word than "
                  "stored says why not)", rate("kvloop_commits_total", "result"), stack=True),
            panel("Given back unused", "What became of handles that nobody pulled?",
                  rate("kvloop_releases_total", "result")),
            panel("Leases that ran out, share of 30 minutes", "Is KV kept that nobody comes back "
                  "for?", ("kvloop:pins_expired:ratio30m", "{{instance}}"), **SHARE),
            panel("Prefill's leases that ran out", "Prefill keeps its blocks for 30 s: how many "
                  "did decode never read?",
                  ("sum by (role) (rate(vllm:nixl_num_kv_expired_reqs_total"
                   "[$__rate_interval]))", "{{role}}")),
        ],
    )  # fmt: skip


def kubernetes_rules() -> str:
    """The same rules as an object of the Prometheus operator."""
    groups = [
        group
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    thing = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvloop"},
        "spec": {"groups": groups},
    }
    head = "# Generated from deploy/prometheus/rules by deploy/generate.py.\n"
    return head + yaml.safe_dump(thing, sort_keys=False, width=100)


def generated() -> dict[Path, str]:
    """File -> text."""
    made = {
        DASHBOARDS / f"{name}.json": json.dumps(make(), indent=1) + "\n"
        for name, make in (
            ("overview", overview),
            ("sessions", sessions),
            ("workers", workers),
            ("retention", retention),
        )
    }
    return made | {KUBERNETES_RULES: kubernetes_rules()}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
        print(path.relative_to(DEPLOY.parent))
