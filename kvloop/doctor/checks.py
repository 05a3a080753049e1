"""[pure] Facts -> findings. One function a question; what is not fine says its mend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from kvloop.doctor.facts import Facts, TransferConfig, WorkerFacts, metric_total

SUPPORTED = "0.32."
"""The vLLM series that the plugin and the connector accept."""

SLOWEST_RDMA = 2e9
"""Bytes a second of one rank. Published P5en numbers come to some 6e9, TCP to 1e9 or less."""

ENOUGH_TO_JUDGE = 16 * 2**20
"""Bytes; a smaller transfer is mostly latency and says nothing about bandwidth."""

PULL_MARGIN_SECONDS = 5
"""Prefill declines a pull this shortly before decode's TTL."""

CLOCK_SKEW_SECONDS = 5


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """``mend`` is empty exactly for what is fine."""

    check: str
    verdict: Verdict
    said: str
    mend: str = ""


def examine(facts: Facts) -> list[Finding]:
    """All findings, in the order in which mending makes sense."""
    return [finding for question in _QUESTIONS for finding in question(facts)]


def failed(findings: list[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAIL for finding in findings)


def _ok(check: str, said: str) -> Finding:
    return Finding(check, Verdict.OK, said)


def _warn(check: str, said: str, mend: str) -> Finding:
    return Finding(check, Verdict.WARN, said, mend)


def _fail(check: str, said: str, mend: str) -> Finding:
    return Finding(check, Verdict.FAIL, said, mend)


def _skip(check: str, said: str, mend: str) -> Finding:
    return Finding(check, Verdict.SKIP, said, mend)


def _workers(facts: Facts) -> tuple[WorkerFacts, WorkerFacts]:
    return facts.prefill, facts.decode


def _both_answer(facts: Facts) -> bool:
    return all(worker.error is None for worker in _workers(facts))


def _answers(facts: Facts) -> Iterator[Finding]:
    for worker in _workers(facts):
        if worker.error is None:
            yield _ok(f"{worker.role} answers", worker.url)
        else:
            yield _fail(
                f"{worker.role} answers",
                f"{worker.url}: {worker.error}",
                f"start it (kvloop worker {worker.role} ...), wait until GET /health is 200, and "
                "check that this machine may connect to the port",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    if not _both_answer(facts):
        return
    found = {worker.role: worker.version for worker in _workers(facts)}
    said = ", ".join(f"{role} {version or 'unknown'}" for role, version in found.items())
    if None in found.values():
        yield _skip("vLLM versions", said, "GET /version must be reachable on both workers")
    elif len(set(found.values())) > 1:
        yield _fail(
            "vLLM versions",
            said,
            "run the same vLLM on both: NIXL refuses a peer of another version at the handshake",
        )
    elif not str(found["decode"]).startswith(SUPPORTED):
        yield _warn(
            "vLLM versions",
            said,
            f"kvloop's plugin and connector know vLLM {SUPPORTED}x only: install that, or expect "
            "reuse for non-streamed turns alone",
        )
    else:
        yield _ok("vLLM versions", said)


def _models(facts: Facts) -> Iterator[Finding]:
    if not _both_answer(facts):
        return
    prefill, decode = _workers(facts)
    if set(prefill.models) & set(decode.models):
        said = ", ".join(decode.models)
        if prefill.max_model_len == decode.max_model_len:
            yield _ok("model", f"{said}, context {decode.max_model_len}")
        else:
            yield _warn(
                "model",
                f"{said}: context {prefill.max_model_len} on prefill, "
                f"{decode.max_model_len} on decode",
                "give both the same --max-model-len, or long turns fail on the smaller one",
            )
    else:
        yield _fail(
            "model",
            f"prefill serves {', '.join(prefill.models) or 'nothing'}, "
            f"decode {', '.join(decode.models) or 'nothing'}",
            "start both with the same --model and --served-model-name",
        )


def _block_sizes(facts: Facts) -> Iterator[Finding]:
    if not _both_answer(facts):
        return
    prefill, decode = (worker.block_size for worker in _workers(facts))
    if prefill is None or decode is None:
        yield _skip(
            "block size",
            "not in /metrics",
            "start the workers without --disable-log-stats, or vllm:cache_config_info is missing",
        )
    elif prefill == decode:
        yield _ok("block size", f"{decode} tokens on both")
    else:
        yield _fail(
            "block size",
            f"prefill {prefill}, decode {decode}",
            "start both with the same --block-size: with different ones every transfer of one "
            "direction fails",
        )


def _configuration(facts: Facts) -> Iterator[Finding]:
    for worker in _workers(facts):
        if worker.error is not None:
            continue
        config = worker.config
        name = f"{worker.role} transfer settings"
        if config is None:
            yield _skip(
                name,
                "cannot be seen from here",
                "run the doctor on the worker's machine (it reads the process's arguments), or "
                "start the worker with VLLM_SERVER_DEV_MODE=1 on a closed network",
            )
            continue
        wrong = list(_wrong_settings(worker.role, config))
        if wrong:
            yield _fail(name, "; ".join(wrong), "start it with `kvloop worker` and a profile")
        else:
            yield _ok(
                name,
                f"bidirectional, policy {config.policy}, TTL {config.ttl_seconds:g} s, "
                f"{'+'.join(config.backends)} (from {config.source})",
            )


def _wrong_settings(role: str, config: TransferConfig) -> Iterator[str]:
    if not config.bidirectional:
        yield "bidirectional_kv_xfer is off: " + (
            "prefill hangs on every handle" if role == "prefill" else "decode keeps nothing"
        )
    if config.policy != "fail":
        yield (
            f"kv_load_failure_policy is {config.policy}: a failed read then hangs prefill for ever"
        )
    expected = "kv_producer" if role == "prefill" else "kv_consumer"
    if config.role not in (expected, None):
        yield f"kv_role is {config.role} and should be {expected}"


def _prefill_to_decode(facts: Facts) -> Iterator[Finding]:
    probe, name = facts.probe, "transfer prefill to decode"
    if probe.prefill is None:
        return
    if probe.prefill.error is not None:
        yield _fail(
            name,
            f"prefill: {probe.prefill.error}",
            "prefill must answer one token and a handle: start it with a kv-transfer-config",
        )
    elif probe.decode is None or probe.decode.error is not None:
        why = probe.decode.error if probe.decode else "not tried"
        yield _fail(
            name,
            f"decode: {why}",
            "decode's log says why: usually prefill's side channel cannot be reached, or model, "
            "dtype, block size, tensor parallel size or vLLM version differ",
        )
    else:
        yield _ok(name, f"works, decode answered in {probe.decode.seconds:.2f} s")


def _plugin(facts: Facts) -> Iterator[Finding]:
    probe = facts.probe
    if probe.plugin is not None:
        if probe.plugin:
            yield _ok("plugin on decode", "streams end with kvloop's event")
        else:
            yield _fail(
                "plugin on decode",
                "streams end without kvloop's event: streamed turns are never reused, and each of "
                "them pins decode's blocks for the whole TTL",
                "install kvloop in decode's environment (pip install kvloop) and see that "
                "VLLM_PLUGINS is unset or contains kvloop",
            )
    if facts.decode.error is None:
        if facts.decode.has_our_connector:
            yield _ok("connector on decode", "pins are limited to a share of the blocks")
        elif probe.decode is None:
            yield _skip(
                "connector on decode",
                "its metrics show only after a first request",
                "run the doctor with its probe",
            )
        else:
            yield _warn(
                "connector on decode",
                "stock NixlConnector: nothing limits pinned blocks, and a busy decode can stop "
                "answering until pins expire",
                "start decode with `kvloop worker decode`, which loads kvloop's connector",
            )


def _decode_keeps(facts: Facts) -> Iterator[Finding]:
    probe = facts.probe
    if probe.handle is None:
        return
    if probe.handle:
        yield _ok("decode keeps blocks", "decode's answer carries a handle")
    elif probe.pin_refused:
        yield _warn(
            "decode keeps blocks",
            f"decode refused this pin: {probe.pin_refused}",
            "decode's pinned share is full: wait, lower the TTL, or give it more KV memory",
        )
    else:
        yield _fail(
            "decode keeps blocks",
            "decode's answer carries no handle",
            "start decode with bidirectional_kv_xfer (every kvloop profile has it)",
        )


def _decode_to_prefill(facts: Facts) -> Iterator[Finding]:
    probe, name = facts.probe, "pull decode to prefill"
    leg = probe.pull
    if leg is None:
        return
    if leg.timed_out:
        yield _fail(
            name,
            f"prefill did not answer in {leg.seconds:.0f} s",
            "most likely prefill was started without bidirectional_kv_xfer, which hangs on every "
            "handle: restart it with a kvloop profile (the blocks of this probe stay lost to it "
            "until then). If it has the flag: the transport hangs, see 'EFA' and 'side channel'",
        )
    elif leg.error is not None:
        yield _fail(
            name,
            leg.error,
            "prefill's log says why: usually decode's side channel cannot be reached from prefill, "
            "or block sizes differ",
        )
    elif not probe.pulled_tokens:
        yield _fail(
            name,
            "prefill answered, but computed everything itself",
            f"the probe offered {probe.asked_tokens} tokens: is kv_recompute_threshold larger? "
            "Else prefill's log says why it declined",
        )
    else:
        yield _ok(name, f"{probe.pulled_tokens} tokens, prefill answered in {leg.seconds:.2f} s")


def _bandwidth(facts: Facts) -> Iterator[Finding]:
    leg, name = facts.probe.pull, "bandwidth decode to prefill"
    if leg is None or leg.error is not None or leg.timed_out or not facts.probe.pulled_tokens:
        return
    if leg.transfer is None:
        yield _skip(
            name,
            "prefill's /metrics did not count the transfer",
            "NIXL's telemetry is off in this vLLM; look for 'KV Transfer metrics' in its log",
        )
        return
    rate = leg.transfer.bytes_per_second
    said = (
        f"{leg.transfer.bytes / 2**20:.1f} MiB, {rate / 1e9:.2f} GB/s a rank, "
        f"{leg.transfer.seconds * 1000:.1f} ms summed over ranks"
    )
    configs = [worker.config for worker in _workers(facts) if worker.config]
    on_cpu = any(config.buffer_device == "cpu" for config in configs)
    if on_cpu or leg.transfer.bytes < ENOUGH_TO_JUDGE or rate >= SLOWEST_RDMA:
        yield _ok(name, said)
    else:
        yield _warn(
            name,
            said,
            "this is what TCP gives. On EFA: kv.backends must be LIBFABRIC and FI_PROVIDER efa; "
            "NIXL_LOG_LEVEL=DEBUG then logs one rail for each EFA device",
        )


def _transport(facts: Facts) -> Iterator[Finding]:
    for worker in _workers(facts):
        config = worker.config
        if config is None:
            continue
        name = f"{worker.role} transport"
        only_tcp = config.ucx_tls is not None and not (
            set(config.ucx_tls.split(",")) - {"tcp", "self", "sm", "shm"}
        )
        if "LIBFABRIC" in config.backends and config.fi_provider != "efa":
            yield _warn(
                name,
                f"LIBFABRIC with FI_PROVIDER={config.fi_provider or 'unset'}",
                "set FI_PROVIDER=efa: else libfabric silently takes tcp where it finds no EFA",
            )
        elif "UCX" in config.backends and only_tcp and config.buffer_device != "cpu":
            yield _warn(
                name,
                f"UCX_TLS={config.ucx_tls} leaves only TCP",
                "unset UCX_TLS or add the RDMA transports; on EFA use a p5en profile (LIBFABRIC)",
            )
        elif "UCX" in config.backends and facts.node.infiniband and facts.node.efa_domains:
            yield _warn(
                name,
                "UCX on a machine with EFA",
                "many UCX builds have no EFA transport and use TCP silently: "
                "--set 'kv.backends=[\"LIBFABRIC\"]' --set env.FI_PROVIDER=efa",
            )
        else:
            yield _ok(name, "+".join(config.backends) + (" on the CPU" if only_tcp else ""))


def _efa(facts: Facts) -> Iterator[Finding]:
    node = facts.node
    expected = any(
        worker.config and "LIBFABRIC" in worker.config.backends for worker in _workers(facts)
    )
    if not expected and not node.infiniband:
        yield _skip(
            "EFA", "this machine has none", "on a P5en run the doctor on both GPU machines too"
        )
        return
    if node.efa_domains is None:
        yield _fail(
            "EFA",
            "there is no fi_info",
            "install the EFA installer's user space (deploy/Dockerfile.worker does) and put "
            "/opt/amazon/efa/bin on PATH",
        )
    elif node.efa_domains == 0:
        yield _fail(
            "EFA",
            "fi_info -p efa finds no provider",
            "launch the instance with EFA interfaces, install the EFA kernel module, and give the "
            "container /dev/infiniband",
        )
    else:
        yield _ok("EFA", f"fi_info finds {node.efa_domains} domains")
    if not node.memlock_unlimited:
        yield _fail(
            "locked memory",
            "ulimit -l is not unlimited: RDMA cannot register memory",
            "docker: ulimits.memlock -1 (docker-compose.yml has it); bare machine: limits.conf",
        )


def _side_channels(facts: Facts) -> Iterator[Finding]:
    urls = {worker.role: worker.url for worker in _workers(facts)}
    other = {"prefill": "decode", "decode": "prefill"}
    for reach in facts.reach:
        name = f"{reach.worker} side channel"
        at = f"{reach.host}:{reach.port}"
        if _is_loopback(reach.host) and not _is_loopback(
            urlsplit(urls[other[reach.worker]]).hostname or ""
        ):
            yield _fail(
                name,
                f"{at} is an address that only its own machine can reach",
                "start the worker with --side-channel-host <address the other worker connects to>",
            )
        elif reach.error is not None:
            yield _warn(
                name,
                f"{at} from here: {reach.error}",
                "open this TCP port between the workers; if the transfers above work, only this "
                "machine is shut out, which is fine",
            )
        else:
            yield _ok(name, at)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _lifetimes(facts: Facts) -> Iterator[Finding]:
    measured = facts.probe.ttl_seconds
    config = facts.decode.config
    expiry, name = facts.session_expiry_seconds, "TTL against session expiry"
    if measured is None and config is None:
        yield _skip(
            name,
            f"sessions expire after {expiry:g} s; decode's TTL cannot be seen from here",
            "run the doctor on decode's machine; decoder_kv_blocks_ttl must exceed the expiry",
        )
        return
    ttl = measured if measured is not None else config.ttl_seconds if config else 0.0
    if expiry > ttl - PULL_MARGIN_SECONDS:
        yield _fail(
            name,
            f"sessions live {expiry:g} s, decode's blocks {ttl:.0f} s",
            "set KVLOOP_DECODE_KV_TTL_SECONDS to decode's decoder_kv_blocks_ttl: late turns would "
            "be refused by prefill and repeated cold",
        )
    else:
        yield _ok(name, f"sessions live {expiry:g} s, decode's blocks {ttl:.0f} s")


def _clocks(facts: Facts) -> Iterator[Finding]:
    ahead = {worker.role: worker.clock_ahead_seconds for worker in _workers(facts)}
    if facts.redis is not None and facts.redis.error is None:
        ahead["redis"] = facts.redis.clock_ahead_seconds
    known = {name: seconds for name, seconds in ahead.items() if seconds is not None}
    if not known:
        return
    worst = max(known, key=lambda name: abs(known[name]))
    if abs(known[worst]) > CLOCK_SKEW_SECONDS:
        yield _warn(
            "clock",
            f"{worst} is {known[worst]:+.0f} s from this machine",
            "run chrony everywhere. Leases are not affected (they use monotonic clocks); logs and "
            "dashboards do not line up",
        )
    else:
        yield _ok("clock", f"within {CLOCK_SKEW_SECONDS} s of this machine")


def _history(facts: Facts) -> Iterator[Finding]:
    for worker in _workers(facts):
        late = metric_total(worker.metrics, "vllm:nixl_num_notifications_after_expiry_total")
        broken = metric_total(worker.metrics, "vllm:nixl_num_failed_transfers_total")
        if late:
            yield _fail(
                f"{worker.role} history",
                f"{late:.0f} reads of blocks that were already freed: those answers may be wrong",
                "make sessions expire earlier than decode's TTL, and let only kvloop proxies talk "
                "to these workers",
            )
        if broken:
            yield _warn(
                f"{worker.role} history",
                f"{broken:.0f} failed transfers since it started",
                "its log names the peer; look at the network and at restarts at those times",
            )


def _proxy(facts: Facts) -> Iterator[Finding]:
    proxy = facts.proxy
    if proxy is None:
        return
    if proxy.error is not None:
        yield _fail(
            "proxy", f"{proxy.url}: {proxy.error}", "start it: kvloop proxy; GET /ready must answer"
        )
        return
    if proxy.ready:
        yield _ok("proxy", f"ready, {len(proxy.workers)} workers")
    else:
        yield _fail("proxy", "no healthy decode worker", "see the workers' errors below")
    if not proxy.table:
        yield _warn(
            "proxy's table", "does not answer", "turns run without reuse: check KVLOOP_REDIS_URL"
        )
    for worker in proxy.workers:
        if not worker.get("healthy"):
            yield _fail(
                f"proxy's {worker.get('role')} {worker.get('name')}",
                str(worker.get("error") or "not healthy"),
                "the proxy must reach this worker's /health at exactly this address",
            )
    named = {str(worker.get("name")) for worker in proxy.workers}
    for asked in _workers(facts):
        if urlsplit(asked.url).netloc not in named:
            yield _warn(
                "proxy's workers",
                f"{asked.url} is none of them",
                "if it is one under another address, fine; else add it to "
                f"KVLOOP_{asked.role.upper()}_URLS",
            )


def _redis(facts: Facts) -> Iterator[Finding]:
    redis = facts.redis
    if redis is None:
        return
    if redis.error is not None:
        yield _fail(
            "redis",
            redis.error,
            "turns run without reuse until the proxies reach it: check the URL",
        )
        return
    yield _ok("redis", f"{redis.version}, {redis.round_trip_seconds * 1000:.1f} ms")
    if redis.round_trip_seconds > 0.05:
        yield _warn(
            "redis latency",
            f"{redis.round_trip_seconds * 1000:.0f} ms a round trip",
            "keep it in the proxies' zone: each turn waits for two or three",
        )
    if redis.max_memory and redis.eviction == "noeviction":
        yield _warn(
            "redis memory",
            "refuses writes when full",
            "maxmemory-policy volatile-ttl: then the sessions nearest to expiry go first",
        )


_QUESTIONS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _answers,
    _versions,
    _models,
    _block_sizes,
    _configuration,
    _efa,
    _transport,
    _side_channels,
    _prefill_to_decode,
    _plugin,
    _decode_keeps,
    _decode_to_prefill,
    _bandwidth,
    _lifetimes,
    _history,
    _clocks,
    _redis,
    _proxy,
)
