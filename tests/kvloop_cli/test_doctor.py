"""The doctor against the fake pair: what it finds, and that it says how to mend it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvloop.doctor import checks, gather, report
from kvloop.doctor.checks import Finding, Verdict
from kvloop.doctor.examination import Request, gather_facts
from kvloop.doctor.facts import (
    Facts,
    Leg,
    NodeFacts,
    ProbeFacts,
    ProxyFacts,
    Reach,
    RedisFacts,
    Transfer,
    TransferConfig,
    WorkerFacts,
    config_of_command,
    metric_total,
)
from tests.fakes.worker import Cluster, FakeWorker

GOOD_CONFIG = TransferConfig(
    connector="NixlConnector",
    policy="fail",
    bidirectional=True,
    backends=("LIBFABRIC",),
    buffer_device="cuda",
    fi_provider="efa",
    source="a test",
)
METRICS = (
    'vllm:cache_config_info{block_size="16",engine="0"} 1.0\n'
    'vllm:kvloop_pin_limit_blocks{engine="0"} 512.0\n'
)


def worker(role: str) -> WorkerFacts:
    return WorkerFacts(
        role,
        f"http://10.0.0.{1 if role == 'prefill' else 2}:8000",
        version="0.32.0",
        models=("m",),
        max_model_len=32768,
        metrics=METRICS,
        config=replace(GOOD_CONFIG, role="kv_producer" if role == "prefill" else "kv_consumer"),
        clock_ahead_seconds=0.2,
    )


GOOD = Facts(
    prefill=worker("prefill"),
    decode=worker("decode"),
    probe=ProbeFacts(
        prefill=Leg(seconds=0.1),
        decode=Leg(seconds=0.2),
        pull=Leg(seconds=0.1, transfer=Transfer(1e9, 0.1)),
        plugin=True,
        handle=True,
        asked_tokens=1000,
        pulled_tokens=1000,
    ),
    node=NodeFacts(gpu=True, infiniband=True, efa_domains=16, memlock_unlimited=True),
    session_expiry_seconds=450,
    pull_threshold=64,
    proxy=ProxyFacts(
        "http://p",
        ready=True,
        table=True,
        workers=tuple(
            {"name": f"10.0.0.{n}:8000", "role": role, "healthy": True}
            for n, role in ((1, "prefill"), (2, "decode"))
        ),
    ),
    redis=RedisFacts(version="valkey 9.1", round_trip_seconds=0.001),
    reach=(Reach("prefill", "10.0.0.1", 5600), Reach("decode", "10.0.0.2", 5600)),
)


def bad(findings: list[Finding]) -> dict[str, Verdict]:
    return {f.check: f.verdict for f in findings if f.verdict is not Verdict.OK}


def test_a_good_deployment_has_nothing_to_mend() -> None:
    """With everything as it should be every finding is fine and none has a mend."""
    findings = checks.examine(GOOD)
    assert bad(findings) == {}
    assert not any(finding.mend for finding in findings)
    assert len(findings) >= 18


def changed_worker(role: str, **changes: object) -> Facts:
    made = replace(getattr(GOOD, role), **changes)
    return replace(GOOD, prefill=made) if role == "prefill" else replace(GOOD, decode=made)


def changed_probe(**changes: object) -> Facts:
    return replace(GOOD, probe=replace(GOOD.probe, **changes))  # type: ignore[arg-type]


def changed_config(role: str, **changes: object) -> Facts:
    config = getattr(GOOD, role).config
    return changed_worker(role, config=replace(config, **changes))


def faults() -> Iterator[tuple[str, Facts, str, Verdict, str]]:
    """(what is wrong, facts, the check that finds it, its verdict, a word of the mend)."""
    node = GOOD.node
    slow = Leg(transfer=Transfer(1e9, 2.0))
    yield ("worker is down", changed_worker("decode", error="refused"), "decode answers",
           Verdict.FAIL, "kvloop worker decode")  # fmt: skip
    yield ("versions differ", changed_worker("prefill", version="0.31.0"), "vLLM versions",
           Verdict.FAIL, "same vLLM")  # fmt: skip
    yield ("models differ", changed_worker("prefill", models=("other",)), "model",
           Verdict.FAIL, "--served-model-name")  # fmt: skip
    yield ("block sizes differ",
           changed_worker("prefill", metrics=METRICS.replace('"16"', '"64"')), "block size",
           Verdict.FAIL, "--block-size")  # fmt: skip
    yield ("stock connector", changed_worker("decode", metrics=METRICS.splitlines()[0] + "\n"),
           "connector on decode", Verdict.WARN, "kvloop worker decode")  # fmt: skip
    yield ("one-way prefill", changed_config("prefill", bidirectional=False),
           "prefill transfer settings", Verdict.FAIL, "profile")  # fmt: skip
    yield ("policy recompute", changed_config("prefill", policy="recompute"),
           "prefill transfer settings", Verdict.FAIL, "profile")  # fmt: skip
    yield ("unknown settings", changed_worker("decode", config=None),
           "decode transfer settings", Verdict.SKIP, "VLLM_SERVER_DEV_MODE")  # fmt: skip
    yield ("no fi_info", replace(GOOD, node=replace(node, efa_domains=None)), "EFA",
           Verdict.FAIL, "EFA installer")  # fmt: skip
    yield ("no EFA device", replace(GOOD, node=replace(node, efa_domains=0)), "EFA",
           Verdict.FAIL, "/dev/infiniband")  # fmt: skip
    yield ("memlock", replace(GOOD, node=replace(node, memlock_unlimited=False)),
           "locked memory", Verdict.FAIL, "memlock")  # fmt: skip
    yield ("libfabric may take tcp", changed_config("decode", fi_provider=None),
           "decode transport", Verdict.WARN, "FI_PROVIDER=efa")  # fmt: skip
    yield ("UCX on EFA", changed_config("decode", backends=("UCX",)), "decode transport",
           Verdict.WARN, "LIBFABRIC")  # fmt: skip
    yield ("UCX held to TCP",
           changed_config("decode", backends=("UCX",), ucx_tls="tcp,self,sm"),
           "decode transport", Verdict.WARN, "UCX_TLS")  # fmt: skip
    yield ("slow as TCP", changed_probe(pull=slow), "bandwidth decode to prefill",
           Verdict.WARN, "LIBFABRIC")  # fmt: skip
    yield ("loopback side channel",
           replace(GOOD, reach=(Reach("decode", "localhost", 5600),)), "decode side channel",
           Verdict.FAIL, "--side-channel-host")  # fmt: skip
    yield ("side channel shut",
           replace(GOOD, reach=(Reach("decode", "10.0.0.2", 5600, error="refused"),)),
           "decode side channel", Verdict.WARN, "TCP port")  # fmt: skip
    yield ("handshake fails", changed_probe(decode=Leg(error="HTTP 500: x")),
           "transfer prefill to decode", Verdict.FAIL, "side channel")  # fmt: skip
    yield ("no plugin", changed_probe(plugin=False), "plugin on decode",
           Verdict.FAIL, "VLLM_PLUGINS")  # fmt: skip
    yield ("no handle", changed_probe(handle=False), "decode keeps blocks",
           Verdict.FAIL, "bidirectional_kv_xfer")  # fmt: skip
    yield ("pin refused", changed_probe(handle=False, pin_refused="over_share"),
           "decode keeps blocks", Verdict.WARN, "TTL")  # fmt: skip
    yield ("prefill hangs",
           changed_probe(pull=Leg(error="x", timed_out=True, seconds=60)),
           "pull decode to prefill", Verdict.FAIL, "bidirectional_kv_xfer")  # fmt: skip
    yield ("pull fails", changed_probe(pull=Leg(error="HTTP 500: x")), "pull decode to prefill",
           Verdict.FAIL, "block sizes")  # fmt: skip
    yield ("nothing pulled", changed_probe(pulled_tokens=0), "pull decode to prefill",
           Verdict.FAIL, "kv_recompute_threshold")  # fmt: skip
    yield ("sessions outlive blocks", replace(GOOD, session_expiry_seconds=478),
           "TTL against session expiry", Verdict.FAIL, "KVLOOP_DECODE_KV_TTL_SECONDS")  # fmt: skip
    yield ("freed blocks were read",
           changed_worker("decode", metrics=METRICS
                          + "vllm:nixl_num_notifications_after_expiry_total{engine=\"0\"} 2.0\n"),
           "decode history", Verdict.FAIL, "TTL")  # fmt: skip
    yield ("clock", changed_worker("decode", clock_ahead_seconds=-90.0), "clock",
           Verdict.WARN, "chrony")  # fmt: skip
    yield ("redis is down", replace(GOOD, redis=RedisFacts(error="refused")), "redis",
           Verdict.FAIL, "URL")  # fmt: skip
    yield ("redis refuses when full",
           replace(GOOD, redis=RedisFacts(max_memory=1, eviction="noeviction")), "redis memory",
           Verdict.WARN, "volatile-ttl")  # fmt: skip
    yield ("proxy is down", replace(GOOD, proxy=ProxyFacts("http://p", error="refused")),
           "proxy", Verdict.FAIL, "/ready")  # fmt: skip
    yield ("proxy without table",
           replace(GOOD, proxy=replace(GOOD.proxy, table=False)),  # type: ignore[type-var]
           "proxy's table", Verdict.WARN, "KVLOOP_REDIS_URL")  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "word"),
    [pytest.param(*case, id=name) for name, *case in faults()],
)
def test_each_fault_is_found_and_mended(
    facts: Facts, check: str, verdict: Verdict, word: str
) -> None:
    """One thing is wrong: the check that is about it says so, and its mend names the remedy."""
    found = [f for f in checks.examine(facts) if f.check == check and f.verdict is verdict]
    assert found, bad(checks.examine(facts))
    assert word in found[0].mend
    assert checks.failed(checks.examine(facts)) == (
        Verdict.FAIL in bad(checks.examine(facts)).values()
    )


def test_a_slow_small_transfer_or_a_cpu_pair_is_no_fault() -> None:
    """Bandwidth is judged only where there was enough to judge, and never on CPUs."""
    small = changed_probe(pull=Leg(transfer=Transfer(1e5, 1.0)))
    assert "bandwidth decode to prefill" not in bad(checks.examine(small))


def test_metrics_are_summed_over_labels() -> None:
    """A data-parallel worker has one sample an engine; an unknown metric is None, not zero."""
    page = 'a_total{engine="0"} 2.0\na_total{engine="1"} 3.5\n'
    assert metric_total(page, "a_total") == 5.5
    assert metric_total(page, "b_total") is None


def test_a_process_tells_its_settings() -> None:
    """From the arguments of the worker on the right port, and of no other."""
    made = {"kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}
    argv = ["python3", "--port", "8200", "--kv-transfer-config", json.dumps(made)]
    found = config_of_command(argv, {"FI_PROVIDER": "efa"}, 8200)
    assert found is not None
    assert found.backends == ("LIBFABRIC",)
    assert (found.fi_provider, found.bidirectional, found.policy) == ("efa", False, "fail")
    assert config_of_command(argv, {}, 8100) is None


def test_only_own_addresses_are_local() -> None:
    """Loopback is this machine; a documentation address is not."""
    assert gather.is_local("127.0.0.1")
    assert not gather.is_local("192.0.2.1")


# Against the fake pair.


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[FakeWorker, FakeWorker, Cluster]]:
    cluster = Cluster()
    prefill = await FakeWorker(cluster, "prefill").start()
    decode = await FakeWorker(cluster, "decode").start()
    yield prefill, decode, cluster
    await prefill.stop()
    await decode.stop()


async def examine(
    prefill: FakeWorker, decode: FakeWorker, **more: object
) -> tuple[Facts, list[Finding]]:
    request = Request(prefill=prefill.url, decode=decode.url, timeout_seconds=2)
    facts = await gather_facts(replace(request, **more))  # type: ignore[arg-type]
    return facts, checks.examine(facts)


Pair = tuple[FakeWorker, FakeWorker, Cluster]


async def test_a_probe_pulls_and_leaves_no_pin(pair: Pair, valkey_url: str) -> None:
    """The conversation reaches a real pull, reads nothing wrong and leaves nothing pinned."""
    prefill, decode, cluster = pair
    facts, findings = await examine(prefill, decode, redis=valkey_url)
    told = {finding.check: finding.verdict for finding in findings}
    assert told["pull decode to prefill"] is Verdict.OK
    assert told["plugin on decode"] is Verdict.OK
    assert told["redis"] is Verdict.OK
    assert facts.probe.pulled_tokens == facts.probe.asked_tokens > 1000
    assert facts.probe.ttl_seconds == pytest.approx(480, abs=5)
    assert cluster.faults == []
    assert not [pin for pin in cluster.pins.values() if pin.expires > time.monotonic() + 9999]
    assert cluster.pins == {}


async def test_a_decode_without_plugin_is_found(pair: Pair) -> None:
    """No event in the stream is a failure; the rest is learnt from a whole answer."""
    prefill, decode, _ = pair
    decode.knobs.plugin = False
    facts, findings = await examine(prefill, decode)
    assert bad(findings)["plugin on decode"] is Verdict.FAIL
    assert facts.probe.handle is True
    assert facts.probe.pulled_tokens


async def test_a_prefill_that_hangs_is_found(pair: Pair) -> None:
    """Prefill without bidirectional transfer never answers: the probe gives up and says why."""
    prefill, decode, _ = pair
    prefill.knobs.hang_warm = True
    _, findings = await examine(prefill, decode, timeout_seconds=0.5)
    assert bad(findings)["pull decode to prefill"] is Verdict.FAIL


async def test_different_block_sizes_are_found() -> None:
    """The two sizes are read from the workers' metrics."""
    cluster = Cluster()
    prefill = await FakeWorker(cluster, "prefill", block_size=32).start()
    decode = await FakeWorker(cluster, "decode").start()
    _, findings = await examine(prefill, decode, probe=False)
    await prefill.stop()
    await decode.stop()
    assert bad(findings)["block size"] is Verdict.FAIL


async def test_dead_workers_are_no_crash() -> None:
    """With nothing there at all, the doctor says what to start."""
    request = Request(
        prefill="http://127.0.0.1:9",
        decode="http://127.0.0.1:9",
        proxy="http://127.0.0.1:9",
        redis="redis://:secret@127.0.0.1:9",
    )
    findings = checks.examine(await gather_facts(request))
    assert {"prefill answers", "decode answers", "proxy", "redis"} <= set(bad(findings))
    assert "secret" not in report.as_text(findings) + report.as_json(findings)


def test_the_report_says_verdict_and_mend() -> None:
    """Text has one line a finding and its mend below; JSON has the same, and a verdict for all."""
    findings = checks.examine(changed_probe(plugin=False))
    text = report.as_text(findings)
    assert "FAIL  plugin on decode" in text
    assert "-> install kvloop" in text
    told = json.loads(report.as_json(findings))
    assert told["ok"] is False
    assert any(row["verdict"] == "fail" and row["mend"] for row in told["findings"])
