"""``make bench-relay``: requests per second and added TTFT, beside a worker asked directly.

Fake workers that cost nothing, our proxy with everything on (tokenise, session lookup, claim,
verify, commit, metrics, log), and any other router whose address is given with ``--router``; the
targets take turns within one run, so that a machine that changes its speed changes all of them.
All processes share this machine's cores: read ratios, not absolute numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

import uvloop

from tests.fakes.fast import MODEL
from tests.real.conftest import free_port

_numbers = itertools.count()


@dataclass
class Sample:
    """What one target did in one round."""

    requests: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    errors: int = 0
    cpu: float = 0.0


def cpu_seconds(root: int) -> float:
    """Processor time of a process and all its descendants so far, in seconds."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
            used[int(entry)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, waiting = 0.0, [root]
    while waiting:
        each = waiting.pop()
        total += used.get(each, 0.0)
        waiting += children.get(each, [])
    return total


def request(prompt_bytes: int) -> bytes:
    """A chat request no two of which are alike, so that each is a session of its own."""
    text = f"{next(_numbers)} " + "word " * (prompt_bytes // 5)
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True},
        separators=(",", ":"),
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )


async def client(port: int, until: float, prompt_bytes: int, sample: Sample) -> None:
    """One client: a request, its whole answer, the next request, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    while time.perf_counter() < until:
        data = request(prompt_bytes)
        start = time.perf_counter()
        writer.write(data)
        tail = b""
        first = None
        while b"\r\n0\r\n\r\n" not in tail:
            piece = await reader.read(65536)
            if not piece:
                sample.errors += 1
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
                break
            if first is None and b"token " in piece:
                first = time.perf_counter() - start
            tail = (tail + piece)[-64:] if len(piece) < 64 else piece[-64:]
        else:
            if first is None:
                sample.errors += 1
            else:
                sample.ttft.append(first)
            sample.requests += 1
    writer.close()


async def round_of(port: int, clients: int, seconds: float, prompt_bytes: int) -> Sample:
    sample = Sample()
    start = time.perf_counter()
    await asyncio.gather(
        *(client(port, start + seconds, prompt_bytes, sample) for _ in range(clients))
    )
    sample.seconds = time.perf_counter() - start
    return sample


def wait_for(port: int, path: str) -> None:
    import http.client

    for _ in range(200):
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
            link.request("GET", path)
            if link.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"nothing answers {path} on port {port}")


def row(name: str, samples: list[Sample]) -> str:
    rate = statistics.median(each.requests / each.seconds for each in samples)
    ttft = sorted(value for each in samples for value in each.ttft)
    errors = sum(each.errors for each in samples)
    middle = statistics.median(ttft) * 1000 if ttft else float("nan")
    high = ttft[int(len(ttft) * 0.99)] * 1000 if ttft else float("nan")
    cpu = 1000 * sum(each.cpu for each in samples) / max(1, sum(each.requests for each in samples))
    return f"| {name} | {rate:,.0f} | {middle:.1f} | {high:.1f} | {cpu:.2f} | {errors} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument("--prompt-bytes", type=int, default=2500)
    options.add_argument("--chunks", type=int, default=64)
    options.add_argument("--seconds", type=float, default=4)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--router", help="command of another router; {p}, {d}, {port} are filled in"
    )
    chosen = options.parse_args()
    prefill, decode, ours, other = (free_port() for _ in range(4))
    tokens = max(16, chosen.prompt_bytes // 4)
    fake = [sys.executable, "-m", "tests.fakes.fast", "--chunks", str(chosen.chunks)]
    fake += ["--prompt-tokens", str(tokens)]
    running = [subprocess.Popen([*fake, "--port", str(port)]) for port in (prefill, decode)]
    try:
        wait_for(prefill, "/health")
        wait_for(decode, "/health")
        urls = f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"
        environment = {
            **os.environ,
            "KVLOOP_PREFILL_URLS": urls[0],
            "KVLOOP_DECODE_URLS": urls[1],
            "KVLOOP_PORT": str(ours),
        }
        with open(os.devnull, "w") as nowhere:
            proxy = [sys.executable, "-m", "proxy"]
            running.append(subprocess.Popen(proxy, env=environment, stderr=nowhere))
        wait_for(ours, "/ready")
        targets = {"worker, asked directly": decode, "kvloop": ours}
        pids = {"worker, asked directly": running[1].pid, "kvloop": running[2].pid}
        if chosen.router:
            command = chosen.router.format(p=urls[0], d=urls[1], port=other).split()
            with open(os.devnull, "w") as nowhere:
                running.append(subprocess.Popen(command, stdout=nowhere, stderr=nowhere))
            wait_for(other, "/health")
            targets["other router"] = other
            pids["other router"] = running[3].pid
        for clients in chosen.clients:
            samples: dict[str, list[Sample]] = {name: [] for name in targets}
            for _ in range(chosen.rounds):
                for name, port in targets.items():
                    before = cpu_seconds(pids[name])
                    one = uvloop.run(round_of(port, clients, chosen.seconds, chosen.prompt_bytes))
                    one.cpu = cpu_seconds(pids[name]) - before
                    samples[name].append(one)
            print(f"\n{clients} clients, {chosen.prompt_bytes} bytes, {chosen.chunks} chunks\n")
            print("| target | requests/s | TTFT p50, ms | TTFT p99, ms | CPU ms/request | errors |")
            print("|---|---|---|---|---|---|")
            for name in targets:
                print(row(name, samples[name]))
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


if __name__ == "__main__":
    main()
