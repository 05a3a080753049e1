"""promtool on the rules: accepted, and each alert fires when it should and not before.

Series are written in promtool's notation, one value a minute: ``0+6x10`` is 0, 6, 12 ... 60.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import observed
from tests.system.conftest import program

Series = dict[str, str]

TURNS = 'kvloop_turns_total{route="cold-prefill",reason="new_session",outcome="ok"}'
PULL_TURNS = 'kvloop_turns_total{route="prefill-with-pull",reason="history_grew",outcome="ok"}'
HITS = 'kvloop_returning_turns_total{result="pulled"}'
MISSES = 'kvloop_returning_turns_total{result="missed"}'
D = 'role="decode",instance="d:1"'
P = 'role="prefill",instance="p:1"'

# Alert -> series in which it fires, the minute at which it does, one at which it does not yet.
CASES: dict[str, tuple[Series, int, int]] = {
    "KvloopReadOfFreedBlocks": (
        {f"vllm:nixl_num_notifications_after_expiry_total{{{D}}}": "0x5 1x20"}, 7, 5,
    ),
    "KvloopPrefillHandleReadTwice": (
        {f"vllm:nixl_num_notifications_after_expiry_total{{{P}}}": "0x5 1x20"}, 7, 5,
    ),
    "KvloopCanaryDifferent": (
        {'kvloop_canary_checks_total{result="different"}': "0x5 1x20"}, 7, 5,
    ),
    "KvloopCanaryBlind": (
        {
            'kvloop_canary_checks_total{result="failed"}': "0x5 1+1x60",
            'kvloop_canary_checks_total{result="equal"}': "3x70",
        }, 20, 10,
    ),
    "KvloopProxyDown": ({'up{job="kvloop-proxy",instance="x"}': "1x5 0x20"}, 9, 7),
    "KvloopNoDecodeWorker": (
        {
            'kvloop_worker_healthy{worker="a",role="decode",instance="x"}': "0x20",
            'kvloop_worker_healthy{worker="b",role="decode",instance="x"}': "1x5 0x20",
        }, 8, 6,
    ),
    "KvloopNoPrefillWorker": (
        {'kvloop_worker_healthy{worker="a",role="prefill",instance="x"}': "1x5 0x20"}, 9, 7,
    ),
    "KvloopWorkerDown": (
        {
            'kvloop_worker_healthy{worker="a",role="decode",instance="x"}': "1x20",
            'kvloop_worker_healthy{worker="b",role="decode",instance="x"}': "1x5 0x20",
        }, 9, 7,
    ),
    "KvloopTurnsRefused": (
        {'kvloop_refused_turns_total{cause="queue_full"}': "0x5 1+1x20"}, 14, 8,
    ),
    "KvloopStreamsBreak": (
        {"kvloop_stream_errors_total": "0x5 0+2x30", TURNS: "0+60x40"}, 20, 8,
    ),
    "KvloopTableDown": ({'kvloop_table_up{instance="x"}': "1x5 0x20"}, 8, 6),
    "KvloopTableSlow": (
        {
            'kvloop_table_seconds_bucket{operation="find",le="0.05"}': "0+60x40",
            'kvloop_table_seconds_bucket{operation="find",le="0.1"}': "0+80x40",
            'kvloop_table_seconds_bucket{operation="find",le="+Inf"}': "0+80x40",
        }, 20, 8,
    ),
    "KvloopBreakerOpen": (
        {'kvloop_worker_paused{worker="a",role="prefill",what="pulls"}': "0x5 1x20"}, 10, 7,
    ),
    "KvloopTransfersFail": (
        {f"vllm:nixl_num_failed_transfers_total{{{P}}}": "0x5 1x20"}, 7, 5,
    ),
    "KvloopColdRetries": (
        {'kvloop_cold_retries_total{leg="decode",cause="WorkerFailed"}': "0+10x40",
         TURNS: "0+60x40"}, 12, 4,
    ),
    "KvloopPrefillsStranded": (
        {'kvloop_stranded_prefills_total{cause="client_left"}': "0+10x40", TURNS: "0+60x40"},
        15, 8,
    ),
    "KvloopHitRateFallen": (
        {HITS: "0+60x600 36000x120", MISSES: "0+6x600 3600+60x120"}, 650, 605,
    ),
    "KvloopReuseCostsTime": (
        {
            "kvloop_reuse_cold_estimate_seconds_total": "0+5x90",
            "kvloop_reuse_spent_seconds_total": "0+6x90",
        }, 40, 20,
    ),
    "KvloopReuseSwitchedOff": ({"kvloop_reuse_enabled": "1x5 0x40"}, 22, 15),
    "KvloopPluginMissing": (
        {TURNS.replace("new_session", "stream_without_handle"): "0+12x40", TURNS: "0+60x40"},
        15, 8,
    ),
    "KvloopPullsDeclined": (
        {"kvloop_pulls_declined_total": "0+6x40", PULL_TURNS: "0+60x40"}, 15, 8,
    ),
    "KvloopRetentionNearLimit": (
        {
            f"vllm:kvloop_pinned_blocks{{{D}}}": "10x5 95x40",
            f"vllm:kvloop_pin_limit_blocks{{{D}}}": "100x45",
        }, 18, 12,
    ),
    "KvloopPinsRefused": (
        {
            f'vllm:kvloop_pins_refused_total{{{D},reason="over_share"}}': "0+6x40",
            f"vllm:kvloop_pins_total{{{D}}}": "0+60x40",
        }, 15, 8,
    ),
    "KvloopEvictsMuch": (
        {
            'kvloop_evictions_total{reason="budget"}': "0+20x40",
            'kvloop_commits_total{result="stored"}': "0+60x40",
        }, 22, 12,
    ),
    "KvloopLeasesExpireUnused": (
        {
            f"vllm:kvloop_pins_expired_total{{{D}}}": "0+40x90",
            f"vllm:kvloop_pins_total{{{D}}}": "0+60x90",
        }, 40, 20,
    ),
}  # fmt: skip

# A day of normal work: turns come, most are reused, some leases run out, a few clients leave.
CALM: Series = {
    'kvloop_evictions_total{reason="budget"}': "0+5x200",
    'kvloop_commits_total{result="stored"}': "0+60x200",
    TURNS: "0+30x200",
    PULL_TURNS: "0+60x200",
    HITS: "0+60x200",
    MISSES: "0+5x200",
    "kvloop_stream_errors_total": "0x200",
    'kvloop_cold_retries_total{leg="decode",cause="WorkerFailed"}': "0+1x200",
    'kvloop_stranded_prefills_total{cause="client_left"}': "0+1x200",
    'kvloop_canary_checks_total{result="equal"}': "0+1x200",
    'kvloop_canary_checks_total{result="different"}': "0x200",
    'kvloop_canary_checks_total{result="failed"}': "0x50 1x150",
    'kvloop_refused_turns_total{cause="draining"}': "0+1x200",
    'kvloop_table_up{instance="x"}': "1x200",
    "kvloop_reuse_enabled": "1x200",
    "kvloop_reuse_cold_estimate_seconds_total": "0+6x200",
    "kvloop_reuse_spent_seconds_total": "0+2x200",
    "kvloop_pulls_declined_total": "0+1x200",
    'kvloop_worker_healthy{worker="a",role="decode",instance="x"}': "1x200",
    'kvloop_worker_paused{worker="a",role="prefill",what="pulls"}': "0x200",
    'up{job="kvloop-proxy",instance="x"}': "1x200",
    f"vllm:nixl_num_notifications_after_expiry_total{{{D}}}": "0x200",
    f"vllm:kvloop_pinned_blocks{{{D}}}": "60x200",
    f"vllm:kvloop_pin_limit_blocks{{{D}}}": "100x200",
    f"vllm:kvloop_pins_total{{{D}}}": "0+60x200",
    f"vllm:kvloop_pins_expired_total{{{D}}}": "0+10x200",
    f'vllm:kvloop_pins_refused_total{{{D},reason="over_share"}}': "0+1x200",
}


def promtool(*arguments: str | Path) -> str:
    outcome = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def play(folder: Path, series: Series, expected: list[tuple[int, str, bool]]) -> None:
    """Play ``series`` to the rules; ``expected``: minute, alert, does it fire?"""
    checks = [
        # How often an alert fires, whatever its labels say.
        {
            "eval_time": f"{minute}m",
            "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > bool 0',
            "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
        }
        for minute, alert, fires in expected
    ]
    test: dict[str, Any] = {
        "rule_files": [str(path) for path in sorted(observed.RULES.glob("*.yml"))],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": checks,
            }
        ],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", folder / "test.yml")


def test_promtool_accepts_rules_and_configuration(tmp_path: Path) -> None:
    promtool("check", "rules", *sorted(observed.RULES.glob("*.yml")))
    found = promtool("check", "config", observed.RULES.parent / "prometheus.yml")
    assert "rule files found" in found


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == {rule["alert"] for rule in observed.rules() if "alert" in rule}


@pytest.mark.parametrize("alert", CASES)
def test_the_alert_fires_in_time_and_not_before(alert: str, tmp_path: Path) -> None:
    series, fires, not_yet = CASES[alert]
    play(tmp_path, series, [(not_yet, alert, False), (fires, alert, True)])


def test_no_alert_fires_on_a_calm_day(tmp_path: Path) -> None:
    play(tmp_path, CALM, [(minute, alert, False) for alert in CASES for minute in (60, 190)])
