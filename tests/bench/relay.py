"""``make bench-relay``: what the relay costs, beside vllm-router and a worker asked directly.

Fake workers that cost nothing, our proxy with everything on (tokenise, session lookup, claim,
verify, commit, metrics, log; its private Valkey counts as part of it), vllm-router in its
prefill/decode mode if it is installed (``pip install vllm-router==0.1.17``). The targets take turns
within one run, so that a machine that changes its speed changes all of them. All processes share
this machine's cores: read ratios, and the CPU time per request, which hardly depends on load.

    make bench-relay                                    the grid; writes docs/bench/relay-*
    make bench-relay ARGS="--clients 32 --quick"        one column, to see what a change did
    make bench-relay ARGS="--soak 1800"                 memory over half an hour of traffic
    make bench-relay ARGS="--streams 4000"              memory per open stream
    make bench-relay ARGS="--profile"                   where the time goes (needs py-spy)
    make bench-relay ARGS="--quick --beside before=../old-checkout"    a change, in one run with it
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.load import Requests, Sample, connect, round_of
from tests.real.conftest import free_port

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "docs" / "bench"
ROUTER = (
    "vllm-router --vllm-pd-disaggregation --prefill {p} --decode {d} --host 127.0.0.1 "
    "--port {port} --policy round_robin --prometheus-port {metrics}"
)
_PACE = 0.02
"""Seconds between two tokens of one stream: 50 tokens/s."""
DIRECT = "worker, asked directly"


@dataclass
class Target:
    """A process tree that answers on a port."""

    name: str
    port: int
    pid: int


@dataclass(frozen=True)
class Beside:
    """Another checkout of the proxy to measure in the same run, and the interpreter it runs on."""

    name: str
    folder: Path
    python: str

    @classmethod
    def of(cls, text: str) -> Beside:
        """``NAME=FOLDER`` or ``NAME=FOLDER:PYTHON``."""
        name, _, rest = text.partition("=")
        folder, _, python = rest.partition(":")
        if not (name and (Path(folder) / "proxy").is_dir()):
            raise argparse.ArgumentTypeError("NAME=FOLDER, where FOLDER is a checkout")
        interpreter = shutil.which(python or sys.executable)
        if interpreter is None:
            raise argparse.ArgumentTypeError(f"there is no {python!r}")
        # It is started in the folder. A virtual environment's link must not be followed.
        return cls(name, Path(folder).resolve(), os.path.abspath(interpreter))


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    prompt_bytes: int
    chunks: int
    clients: int


# The system under test.


@contextmanager
def started(
    command: list[str], folder: Path = ROOT, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(port: int, path: str) -> None:
    for _ in range(600):
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            link.request("GET", path)
            if link.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"nothing answers {path} on port {port}")


@contextmanager
def targets(
    chunks: int,
    prompt_bytes: int,
    router: str | None,
    processes: list[int],
    *,
    more: tuple[str, ...] = (),
    pipe: bool = False,
    beside: Sequence[Beside] = (),
) -> Iterator[list[Target]]:
    """Two fake workers and everything that stands before them."""
    prefill, decode = free_port(), free_port()
    fake = [sys.executable, "-m", "tests.fakes.fast", "--chunks", str(chunks)]
    fake += ["--prompt-tokens", str(max(16, prompt_bytes // 4)), *more]
    p, d = f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"
    found: list[Target] = []
    with (
        started([*fake, "--port", str(prefill)]),
        started([*fake, "--port", str(decode)]) as direct,
    ):
        wait_for(prefill, "/health")
        wait_for(decode, "/health")
        found.append(Target(DIRECT, decode, direct.pid))
        with _routers(p, d, router, processes, beside) as routers, ExitStack() as stack:
            if pipe:
                port = free_port()
                command = [sys.executable, "-m", "tests.bench.pipe", "--port", str(port)]
                process = stack.enter_context(started([*command, "--to", str(decode)]))
                wait_for(port, "/health")
                found.append(Target("bare pipe to decode", port, process.pid))
            yield found + routers


@contextmanager
def _routers(
    p: str, d: str, router: str | None, processes: list[int], beside: Sequence[Beside]
) -> Iterator[list[Target]]:
    found: list[Target] = []
    with ExitStack() as stack:
        ours = [
            ("kvloop" if n == 1 else f"kvloop, {n} processes", n, ROOT, sys.executable)
            for n in processes
        ]
        ours += [(each.name, 1, each.folder, each.python) for each in beside]
        for name, count, folder, python in ours:
            port = free_port()
            process = stack.enter_context(
                started(
                    [python, "-m", "proxy", "--workers", str(count)],
                    folder,
                    KVLOOP_PREFILL_URLS=p,
                    KVLOOP_DECODE_URLS=d,
                    KVLOOP_PORT=str(port),
                    KVLOOP_ADMIN_PORT=str(free_port()),
                    KVLOOP_MAX_IN_FLIGHT="20000",
                )
            )
            wait_for(port, "/ready")
            found.append(Target(name, port, process.pid))
        if router:
            port = free_port()
            command = router.format(p=p, d=d, port=port, metrics=free_port())
            process = stack.enter_context(started(command.split()))
            wait_for(port, "/health")
            found.append(Target("vllm-router", port, process.pid))
        yield found


# What a process tree uses, from /proc.


def descendants(root: int) -> list[tuple[int, list[str]]]:
    """(pid, fields of its stat file after the name) of a process and all below it."""
    children: dict[int, list[int]] = {}
    stat: dict[int, list[str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
            stat[int(entry)] = fields
    found, waiting = [], [root]
    while waiting:
        each = waiting.pop()
        if each in stat:
            found.append((each, stat[each]))
        waiting += children.get(each, [])
    return found


def cpu_seconds(root: int) -> float:
    """Processor time of a process and all below it so far."""
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in descendants(root))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(root: int, *, alone: bool = False) -> int:
    """Private memory of a process and all below it, or of it ``alone``."""
    total = 0
    for pid, _ in descendants(root):
        if alone and pid != root:
            continue
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024
            for line in lines
            if line.startswith(("Private_Clean", "Private_Dirty"))
        )
    return total


# Measurements.


def measure(target: Target, cell: Cell, seconds: float) -> Sample:
    before = cpu_seconds(target.pid)
    sample = uvloop.run(round_of(target.port, cell.clients, seconds, cell.prompt_bytes))
    sample.cpu = cpu_seconds(target.pid) - before
    return sample


@dataclass
class Result:
    """One target at one point: medians over the rounds, TTFT over all requests, in ms."""

    cell: Cell
    target: str
    rate: float
    ttft: float
    ttft_high: float
    cpu: float
    errors: int

    @classmethod
    def of(cls, cell: Cell, target: str, samples: list[Sample]) -> Result:
        ttft = sorted(value * 1000 for each in samples for value in each.ttft) or [float("nan")]
        return cls(
            cell,
            target,
            rate=statistics.median(each.requests / each.seconds for each in samples),
            ttft=statistics.median(ttft),
            ttft_high=ttft[int(len(ttft) * 0.99)],
            cpu=statistics.median(1000 * each.cpu / max(1, each.requests) for each in samples),
            errors=sum(each.errors for each in samples),
        )


def grid(chosen: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    for prompt_bytes, chunks in itertools.product(chosen.prompt_bytes, chosen.chunks):
        with targets(
            chunks, prompt_bytes, chosen.router, chosen.processes, beside=chosen.beside
        ) as found:
            for clients in chosen.clients:
                cell = Cell(prompt_bytes, chunks, clients)
                samples: dict[str, list[Sample]] = {each.name: [] for each in found}
                for turn in range(chosen.rounds):
                    # Another one begins each round: none always follows the same neighbour.
                    order = found[turn % len(found) :] + found[: turn % len(found)]
                    for target in order:
                        samples[target.name].append(measure(target, cell, chosen.seconds))
                for name, each in samples.items():
                    results.append(Result.of(cell, name, each))
                print(table([each for each in results if each.cell == cell]), flush=True)
        if not chosen.quick:
            write(results, chosen)  # after each part: the whole grid takes a while
    return results


def table(results: list[Result]) -> str:
    lines = []
    for cell in dict.fromkeys(each.cell for each in results):
        rows = [each for each in results if each.cell == cell]
        direct = next(each for each in rows if each.target == DIRECT)
        lines += [
            f"\n{cell.clients} clients, {cell.prompt_bytes:,} bytes, {cell.chunks:,} chunks\n",
            "| target | requests/s | TTFT p50 | p99 | added p50 | CPU ms/request | errors |",
            "|---|---|---|---|---|---|---|",
        ]
        for each in rows:
            added = "" if each is direct else f"{each.ttft - direct.ttft:.1f}"
            lines.append(
                f"| {each.target} | {each.rate:,.0f} | {each.ttft:.1f} | {each.ttft_high:.1f} | "
                f"{added} | {each.cpu:.2f} | {each.errors} |"
            )
    return "\n".join(lines)


def chunk_costs(results: list[Result]) -> str:
    """CPU per relayed chunk: what the longest answers cost more than the shortest."""
    counts = [each.cell.chunks for each in results]
    few, many = min(counts), max(counts)
    if few == many:
        return ""
    cost = {(each.cell, each.target): each.cpu for each in results}
    lines = ["| clients | prompt bytes | target | CPU µs/chunk |", "|---|---|---|---|"]
    for each in results:
        if each.cell.chunks == many and each.target != DIRECT:
            short = Cell(each.cell.prompt_bytes, few, each.cell.clients)
            if (short, each.target) not in cost:
                continue
            micro = 1000 * (each.cpu - cost[short, each.target]) / (many - few)
            at = f"{each.cell.clients} | {each.cell.prompt_bytes:,}"
            lines.append(f"| {at} | {each.target} | {micro:.1f} |")
    return "\n".join(lines)


def machine() -> str:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores ({model}), {gigabytes:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}; "
        f"load average at the end {load}"
    )


def write(results: list[Result], chosen: argparse.Namespace) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    text = f"""# Relay: measured

Written by `make bench-relay`; what it means is in [relay.md](relay.md). Times in ms.

{machine()}. Load generator, fake workers and targets share the machine. {chosen.rounds} rounds of
{chosen.seconds:g} s for each target, in turn; requests/s and CPU are medians over the rounds, TTFT
over all requests.

![Requests/s and CPU per request](relay.png)

## CPU per relayed chunk

{chunk_costs(results)}

## The grid
{table(results)}
"""
    (OUT / "relay-results.md").write_text(text)
    plot(results)


def plot(results: list[Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = list(dict.fromkeys(each.cell for each in results))
    names = [name for name in dict.fromkeys(each.target for each in results) if name != DIRECT]
    value = {(each.cell, each.target): each for each in results}
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [index + (number - (len(names) - 1) / 2) * width for index in range(len(cells))]
        found = [value.get((cell, name)) for cell in cells]
        rates, costs = ([getattr(e, f, 0.0) for e in found] for f in ("rate", "cpu"))
        axes[0].bar(places, rates, width, label=name)
        axes[1].bar(places, costs, width)
    axes[0].set_ylabel("requests/s")
    axes[1].set_ylabel("CPU ms/request")
    for axis in axes:
        axis.set_yscale("log")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend()
    labels = [f"{c.clients} clients\n{c.prompt_bytes // 1000} kB\n{c.chunks} chunks" for c in cells]
    axes[1].set_xticks(range(len(cells)), labels, fontsize=8)
    figure.savefig(OUT / "relay.png", dpi=110)


def streams(chosen: argparse.Namespace) -> None:
    """Memory of open streams on which nothing happens, and that they can all be opened."""
    count = chosen.streams

    async def open_all(port: int) -> list[Any]:
        requests = Requests(chosen.prompt_bytes[0])
        found = []
        for start in range(0, count, 100):
            some = [await connect(port, requests) for _ in range(min(100, count - start))]
            for each in some:
                each.send()
            while any(each.first is None and not each.lost for each in some):
                await asyncio.sleep(0.01)
            found += some
        return found

    async def measured(target: Target) -> None:
        before = memory_bytes(target.pid)
        clients = await open_all(target.port)
        lost = sum(each.lost for each in clients)
        used = cpu_seconds(target.pid)
        await asyncio.sleep(2)
        idle = (cpu_seconds(target.pid) - used) / 2
        each_kib = (memory_bytes(target.pid) - before) / count / 1024
        print(f"| {target.name} | {count - lost} | {each_kib:.1f} | {100 * idle:.1f} |", flush=True)
        for client in clients:
            client.close()
        await asyncio.sleep(1)

    print("| target | open streams | KiB each | CPU % while idle |\n|---|---|---|---|")
    with targets(64, chosen.prompt_bytes[0], chosen.router, [1], more=("--hold",)) as found:
        for target in found:
            uvloop.run(measured(target))


def paced(chosen: argparse.Namespace) -> str:
    """CPU per chunk when chunks come one by one, as real workers send them."""
    lines = ["| streams | target | chunks/s | CPU µs/chunk | CPU % |", "|---|---|---|---|---|"]
    chunks = 1000  # 20 s: a turn's own cost is then a small part
    with targets(
        chunks, chosen.prompt_bytes[0], chosen.router, [1], more=("--pace", str(_PACE)), pipe=True
    ) as found:
        for clients in (32, 256):
            cell = Cell(chosen.prompt_bytes[0], chunks, clients)
            for target in found[1:]:
                sample = measure(target, cell, 0.1)
                count = sample.requests * chunks
                lines.append(
                    f"| {clients} | {target.name} | {count / sample.seconds:,.0f} | "
                    f"{1e6 * sample.cpu / max(1, count):.1f} | "
                    f"{100 * sample.cpu / sample.seconds:.0f} |"
                )
    return "\n".join(lines)


def soak(chosen: argparse.Namespace) -> None:
    """Memory while traffic goes on. A leak is a line that does not level off."""
    print("| minute | requests | errors | proxy MiB | its Valkey MiB |\n|---|---|---|---|---|")
    with targets(chosen.chunks[0], chosen.prompt_bytes[0], None, [1]) as found:
        ours = found[1]
        total, step = 0, max(2.0, chosen.soak / 30)
        start = time.monotonic()
        while time.monotonic() - start < chosen.soak:
            cell = Cell(chosen.prompt_bytes[0], chosen.chunks[0], chosen.clients[-1])
            sample = measure(ours, cell, step)
            total += sample.requests
            minute = (time.monotonic() - start) / 60
            proxy = memory_bytes(ours.pid, alone=True) / 2**20
            store = memory_bytes(ours.pid) / 2**20 - proxy
            row = f"| {minute:.1f} | {total} | {sample.errors} | {proxy:.1f} | {store:.1f} |"
            print(row, flush=True)


def profile(chosen: argparse.Namespace) -> None:
    """A flame graph of one process under load, next to the results."""
    OUT.mkdir(parents=True, exist_ok=True)
    with targets(chosen.chunks[0], chosen.prompt_bytes[0], None, [1]) as found:
        ours = found[1]
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(ours.pid)]
        spy += ["--duration", "8", "--rate", "400", "--output", str(OUT / "relay-profile.svg")]
        measure(ours, Cell(chosen.prompt_bytes[0], chosen.chunks[0], 32), 1)
        with started(spy):
            measure(ours, Cell(chosen.prompt_bytes[0], chosen.chunks[0], 32), 12)


def router_command() -> str | None:
    name = ROUTER.split()[0]
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    return ROUTER.replace(name, found, 1) if found else None


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--clients", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument("--prompt-bytes", type=int, nargs="+", default=[2_000, 300_000])
    options.add_argument("--chunks", type=int, nargs="+", default=[64, 1000])
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--seconds", type=float, default=3)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--router",
        default=router_command(),
        help="command of another router; {p}, {d}, {port}, {metrics} are filled in; '' for none",
    )
    options.add_argument(
        "--beside",
        type=Beside.of,
        nargs="+",
        default=[],
        metavar="NAME=FOLDER[:PYTHON]",
        help="other checkouts of kvloop to measure in the same run",
    )
    options.add_argument("--quick", action="store_true", help="short prompt and answer, no files")
    options.add_argument("--soak", type=float, help="seconds of traffic to watch memory over")
    options.add_argument("--streams", type=int, help="idle streams to open at once")
    options.add_argument("--profile", action="store_true")
    options.add_argument("--paced", action="store_true", help="chunks one by one, 50 a second")
    chosen = options.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if chosen.soak:
        soak(chosen)
    elif chosen.streams:
        streams(chosen)
    elif chosen.profile:
        profile(chosen)
    elif chosen.paced:
        print(paced(chosen))
    elif chosen.quick:
        chosen.prompt_bytes, chosen.chunks = chosen.prompt_bytes[:1], chosen.chunks[:1]
        grid(chosen)
    else:
        grid(chosen)


if __name__ == "__main__":
    main()
