"""A model of two workers' KV memory and of the table, around the real conductor.

Every slot of every block knows which token sequence its KV stands for, so a read can be judged.
Each call of the proxy to a worker or to the table stops at a *gate*; a test opens the gates in any
order, fails them, cancels turns between them and moves the clock. What is judged:

* a block is read whose KV is that of other tokens, of another adapter, or of another position;
* a handle is read twice, after its blocks were freed, or after they expired;
* decode keeps blocks that nobody will ever pull or release;
* what was given up for the retention budget is pulled, or released more than once.
* decode is to append to a history that was given back before, or has no connector for it.

The rules of P and D are those of vLLM 0.32.0: what P declines, what it reads when the list is
longer than it needs, when it notifies D, what D keeps after each kind of ending.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil
from types import SimpleNamespace
from typing import Any

import orjson

from proxy.errors import KvloopError, TableUnavailable, WorkerFailed, WorkerUnreachable
from proxy.metrics import Metrics
from proxy.retention import Entry
from proxy.session.fingerprint import PromptTokens, anchors, lookup_keys
from proxy.session.holding import Holding, decode, encode
from proxy.session.identity import Identity, identify
from proxy.session.ledger import Page, Place
from proxy.settings import Settings
from proxy.turn import (
    conductor,
    decode_leg,
    keeping,
    lookup,
    parts,
    prefill_leg,
    record,
    releases,
    retaining,
)
from proxy.turn.conductor import Conductor
from proxy.turn.record import Turn
from proxy.workers import verdicts
from proxy.workers.pool import Pool, Role, Worker

_CLOCKED = (
    conductor,
    decode_leg,
    keeping,
    lookup,
    parts,
    prefill_leg,
    record,
    releases,
    retaining,
    verdicts,
)
"""Modules that read the clock."""

_TURN: ContextVar[asyncio.Task[Any] | None] = ContextVar("turn", default=None)
"""The turn on whose behalf something runs; the tasks that it starts inherit it."""

TTL = 480.0
MARGIN = 30.0
DECLINE_MARGIN = 5.0
"""P declines a pull this long before the blocks expire."""
P_LEASE = 30.0
THRESHOLD = 64


@dataclass
class Gate:
    """A call that is under way. ``then`` is what happens where the call arrives."""

    name: str
    future: asyncio.Future[str]
    task: asyncio.Task[Any] | None


@dataclass
class Pin:
    """Blocks that D keeps for one finished request."""

    engine: str
    groups: list[list[int]]
    expires: float
    task: asyncio.Task[Any] | None
    """The turn that D's answer is on its way to: its owner until it has ended."""
    nobody: str = ""
    """Why nobody can own it, where the proxy is not to blame."""


@dataclass
class Script:
    """How decode will answer a turn."""

    output: list[int]
    ending: str = "stop"
    plugin: bool = True
    ahead: int = 0
    hidden: int = 0
    streamed: bool = False


@dataclass
class Decode:
    """One decode process."""

    engine: str
    epoch: str
    block_size: int
    groups: int
    free: list[int] = field(default_factory=lambda: list(range(4096)))
    contents: dict[int, list[Any]] = field(default_factory=dict)

    def take(self, count: int) -> list[int]:
        # Lowest first: what was freed a moment ago is overwritten at once.
        return [heapq.heappop(self.free) for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self.free, block)


def chain(model: str, ids: list[int]) -> list[int]:
    """What the KV at each position stands for: all tokens up to there, and the adapter."""
    found = []
    value = hash(("adapter", model.count("lora"), len(model)))
    for token in ids:
        value = hash((value, token))
        found.append(value)
    return found


class World:
    """Everything but the proxy. ``faults`` must stay empty."""

    def __init__(
        self,
        *,
        block_size: int,
        groups: int,
        connector: bool = False,
        proxies: int = 2,
        pin_limit: int | None = None,
        ledger_gates: bool = False,
    ) -> None:
        self.connector = connector or pin_limit is not None
        self.pin_limit = pin_limit
        self.ledger_gates = ledger_gates
        self.evicted: dict[str, int] = {}
        """Request ids of handles that were given up, and how often each was released."""
        self.failed_evictions = 0
        """Since the last sweep: what could not be given up then may still be there."""
        self.entries_may_lack = False
        """A proxy died or Redis failed: then the ledger may know less, or more, until a lease."""
        self.loop = asyncio.new_event_loop()
        self.clock = 1000.0
        self.faults: list[str] = []
        self.gates: list[Gate] = []
        self.late: list[Any] = []
        self.block_size = block_size
        self.groups = groups
        self.appends = 0
        self.given_back: set[str] = set()
        """Handles that decode was told to free."""
        self.prompts: dict[str, list[int]] = {}
        self.scripts: dict[str, Script] = {}
        self.pins: dict[str, Pin] = {}
        self.claimed: dict[str, asyncio.Task[Any] | None] = {}
        self.numbers = itertools.count(1)
        self.prefill_cache: set[Any] = set()
        self.prefill_handles: dict[str, tuple[list[int], float]] = {}
        self.pulled = 0
        self.restarts = 0
        self.decode = Decode("d0", "1", block_size, groups)
        self.table = ModelTable(self)
        self.ledger = ModelLedger(self)
        self._time = conductor.time
        for module in _CLOCKED:
            clocks = SimpleNamespace(monotonic=lambda: self.clock, time=lambda: self.clock)
            module.time = clocks  # type: ignore[attr-defined]
        self._settles = prefill_leg.ABORT_SETTLES
        prefill_leg.ABORT_SETTLES = 0.0
        self._gathers = retaining.GATHER_SECONDS
        retaining.GATHER_SECONDS = 0.0
        self.proxies = [ModelProxy(self) for _ in range(proxies)]
        self.turns: list[ModelTurn] = []

    def close(self) -> None:
        for module in _CLOCKED:
            module.time = self._time  # type: ignore[attr-defined]
        prefill_leg.ABORT_SETTLES = self._settles
        retaining.GATHER_SECONDS = self._gathers
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.settle()
        self.loop.close()

    def late_call(self, asked: float) -> None:
        """A call to Redis takes milliseconds or fails: a later one's lifetimes are not the real
        ones, and table and ledger may differ."""
        if self.clock - asked > 1:
            self.entries_may_lack = True

    # Running the proxy between gates.

    def settle(self) -> None:
        """Run everything until all tasks wait at gates."""
        while self.loop._ready:  # type: ignore[attr-defined]
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    async def gate(self, name: str) -> str:
        """Wait until the test lets this call through; "ok", or how it fails."""
        future: asyncio.Future[str] = self.loop.create_future()
        gate = Gate(name, future, asyncio.current_task())
        self.gates.append(gate)
        try:
            return await future
        finally:
            if gate in self.gates:
                self.gates.remove(gate)

    def open(self, index: int, how: str = "ok") -> None:
        index %= len(self.gates)
        if self.gates[index].name == "ledger":
            # Sent one after the other to one server, they arrive in that order.
            index = next(i for i, gate in enumerate(self.gates) if gate.name == "ledger")
        gate = self.gates.pop(index)
        if not gate.future.done():
            gate.future.set_result(how)
        self.settle()
        self.judge()

    def drain(self) -> None:
        """Let everything that is under way finish well."""
        for _ in range(10_000):
            if not self.gates:
                break
            self.open(0)
        assert not self.gates
        self.judge()

    # Clock and processes.

    def tick(self, seconds: float) -> None:
        self.clock += seconds
        for key in [key for key, pin in self.pins.items() if pin.expires <= self.clock]:
            self.free(key)
        self.judge()

    def free(self, key: str) -> None:
        pin = self.pins.pop(key)
        if pin.engine == self.decode.engine:
            for blocks in pin.groups:
                self.decode.give(blocks)

    def restart_decode(self) -> None:
        self.restarts += 1
        self.pins = {k: p for k, p in self.pins.items() if p.engine != self.decode.engine}
        self.decode = Decode(
            f"d{self.restarts}", f"{self.restarts + 1}", self.block_size, self.groups
        )

    def restart_prefill(self) -> None:
        self.prefill_cache.clear()
        self.prefill_handles.clear()
        while any(gate.name.startswith("prefill") for gate in self.gates):
            index = next(i for i, g in enumerate(self.gates) if g.name.startswith("prefill"))
            self.open(index, "gone")

    # What P does (facts 4).

    def run_prefill(self, model: str, salt: str, ids: list[int], params: dict[str, Any]) -> Any:
        """P's answer, or None for a 500."""
        held = chain(model, ids)
        size = self.block_size
        local = 0
        while (local + 1) * size <= len(ids) - 1 and (
            (salt, held[(local + 1) * size - 1]) in self.prefill_cache
        ):
            local += 1
        pulled = 0
        groups = params.get("remote_block_ids")
        if groups and params.get("do_remote_decode"):
            wanted = min(params["remote_num_tokens"], len(ids))
            count = wanted - local * size
            if params["remote_engine_id"] != self.decode.engine:
                return None  # the handshake finds another engine
            if wanted <= 0 or count < THRESHOLD:
                self._notify(params["remote_request_id"])
            else:
                expiry = params.get("remote_blocks_expiry_time")
                if expiry is not None and self.clock > expiry - DECLINE_MARGIN:
                    return None
                if not self._read(params, held, wanted, local):
                    return None
                pulled = count
        for whole in range(1, len(ids) // size + 1):
            self.prefill_cache.add((salt, held[whole * size - 1]))
        name = f"p{next(self.numbers)}"
        self.prefill_handles[name] = (held, self.clock)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]] * self.groups,
            "remote_engine_id": "p",
            "remote_request_id": name,
            "remote_host": "p",
            "remote_port": 1,
            "remote_num_tokens": len(ids),
            "remote_prefill_cached_tokens": pulled + local * size,
            "kvloop_pulled_tokens": pulled,
            "kvloop_local_tokens": local * size,
        }

    def _notify(self, key: str) -> None:
        self.given_back.add(key)
        if key in self.evicted:
            self.evicted[key] += 1
            if self.evicted[key] > 1:
                self.faults.append("released twice what was given up")
        if key in self.pins:
            self.free(key)

    def _read(self, params: dict[str, Any], held: list[int], wanted: int, local: int) -> bool:
        key = params["remote_request_id"]
        pin = self.pins.get(key)
        if key in self.evicted:
            self.faults.append("read of blocks that were given up")
        if pin is None:
            self.faults.append("read of blocks that were read, released or expired before")
        elif pin.expires <= self.clock:
            self.faults.append("read after expiry")
        need = ceil(wanted / self.block_size) - local
        for number, group in enumerate(params["remote_block_ids"]):
            if len(group) < need:
                return False  # vLLM asserts: 500
            for offset, block in enumerate(group[-need:]):
                slots = self.decode.contents.get(block, [])
                start = (local + offset) * self.block_size
                for slot, position in enumerate(range(start, min(start + self.block_size, wanted))):
                    if number == 0:
                        right = slot < len(slots) and slots[slot] == held[position]
                    else:  # a state group: one state, of one position
                        right = slots == [("state", held[wanted - 1])]
                    if not right:
                        self.faults.append("read KV of other tokens")
                        return True
        self.pulled += wanted - local * self.block_size
        if pin is not None:
            self.free(key)
        return True

    # What D does (facts 1.2, 5).

    def run_decode(
        self, model: str, ids: list[int], params: dict[str, Any] | None, script: Script
    ) -> dict[str, Any] | None:
        """D's handle, or None when it keeps nothing."""
        held = chain(model, ids + script.output)
        if params and not params.get("do_remote_prefill"):
            self._appended()
        elif params:
            source = self.prefill_handles.pop(params["remote_request_id"], None)
            if source is None:
                return None
            if source[0] != held[: len(ids)]:
                self.faults.append("decode pulls a prompt that is not its own from prefill")
        computed = len(ids) + len(script.output) - 1 + script.ahead
        known = len(ids) + len(script.output) - 1
        blocks = ceil(computed / self.block_size)
        groups = []
        for number in range(self.groups):
            taken = self.decode.take(blocks)
            groups.append(taken)
            for index, block in enumerate(taken):
                if number:
                    state = held[known - 1] if not script.ahead else object()
                    self.decode.contents[block] = [("state", state)]
                    continue
                start = index * self.block_size
                self.decode.contents[block] = [
                    held[position] if position < known else object()
                    for position in range(start, min(start + self.block_size, computed))
                ]
        keeps = (
            params is not None
            and params.get("kvloop_lease_seconds") != 0
            and script.ending in ("stop", "length")
            and not self._over_share(sum(map(len, groups)))
        )
        if not keeps:
            for taken in groups:
                self.decode.give(taken)
            return None
        name = f"d{next(self.numbers)}"
        assert params is not None
        lease = min(TTL, params.get("kvloop_lease_seconds", TTL))
        self.pins[name] = Pin(
            self.decode.engine,
            groups,
            self.clock + lease,
            _TURN.get(),
            # A stock worker pins for a stream whose answer cannot carry the handle.
            nobody="stock stream" if script.streamed and not script.plugin else "",
        )
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": groups,
            "remote_engine_id": self.decode.engine,
            "remote_request_id": name,
            "remote_host": "d",
            "remote_port": 1,
            "remote_num_tokens": computed,
            "remote_blocks_expiry_time": self.clock + lease,
            "kvloop_lease_seconds": lease,
        }

    def _appended(self) -> None:
        """A turn without prefill that decode keeps: its history comes from decode's own cache."""
        self.appends += 1
        if not self.connector:
            self.faults.append("a stock worker was told to keep a turn without prefill")
        turn = _TURN.get()
        mine = [key for key, task in self.claimed.items() if task is turn]
        if any(key in self.given_back for key in mine):
            self.faults.append("the history was given back before the append")

    def _over_share(self, blocks: int) -> bool:
        pinned = sum(len(group) for pin in self.pins.values() for group in pin.groups)
        return self.pin_limit is not None and pinned + blocks > self.pin_limit

    # The judge.

    def judge(self) -> None:
        for name, pin in self.pins.items():
            # In its last seconds no proxy may hand it out any more: it is about to expire.
            if pin.nobody or pin.expires - MARGIN <= self.clock:
                continue
            if self.table.holds(name) or _running(pin.task) or _running(self.claimed.get(name)):
                continue
            if any(gate.name == f"late commit {name}" for gate in self.gates):
                continue
            if any(_carries(each, name) for each in self.turns):
                continue
            if any(proxy.conductor.background_tasks for proxy in self.proxies):
                continue  # a release is under way; when it has ended this is judged again
            self.faults.append(f"pinned without an owner: {name}")
        assert not self.faults, self.faults


def _carries(turn: ModelTurn, name: str) -> bool:
    """Does this turn, under way, answer for what was given up?"""
    claimed = turn.turn.claimed
    return (
        _running(turn.task)
        and claimed is not None
        and claimed.handle is not None
        and claimed.handle["remote_request_id"] == name
    )


def _running(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and not task.done()


class ModelTable:
    """The session table's rules in memory. Every operation has a gate before and after it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows: list[tuple[Identity, bytes, str, float, list[bytes], str]] = []
        """Newest first: identity, record, id, expiry, index keys, request id of the handle."""

    def holds(self, request_id: str) -> bool:
        return any(row[5] == request_id for row in self._live())

    def held_ids(self) -> set[str]:
        """Ids of the holdings that may be claimed."""
        return {row[2] for row in self._live() if row[5]}

    def _live(self) -> list[tuple[Identity, bytes, str, float, list[bytes], str]]:
        return [row for row in self._rows if row[3] > self._world.clock]

    async def find(self, identity: Identity, prompt: PromptTokens) -> list[Holding]:
        await self._arrive("find")
        rows = [row for row in self._live() if row[0].scope == identity.scope]
        if identity.conversation:
            mine = [row for row in rows if row[0].conversation == identity.conversation]
            return [held for row in mine[:8] if (held := decode(row[2], row[1]))]
        for digest in lookup_keys(prompt.fingerprint):
            for row in rows:
                if not row[0].conversation and digest in row[4]:
                    found = decode(row[2], row[1])
                    return [found] if found else []
        return []

    async def claim(self, identity: Identity, holding: Holding) -> bool:
        await self._arrive("claim")
        row = next((row for row in self._live() if row[2] == holding.id), None)
        if row is not None:
            self.take_out(row)
            self._world.claimed[row[5]] = _TURN.get()
        unknown = await self._world.gate("claim answer") != "ok"
        if unknown:
            if row is not None and row[5] in self._world.pins:
                self._world.pins[row[5]].nobody = "the table's answer was lost"
            self._world.entries_may_lack = True
            raise TableUnavailable("lost")
        return row is not None

    def take_out(self, row: Any) -> None:
        self._rows.remove(row)

    async def evict(self, scope: str, id: str, why: Any) -> Holding | None:
        try:
            await self._arrive("evict")
        except TableUnavailable:
            self._world.failed_evictions += 1
            raise
        row = next((row for row in self._live() if row[2] == id), None)
        if row is None:
            return None
        assert row[0].scope.hex() == scope
        self.take_out(row)
        self._world.evicted[row[5]] = 0
        if await self._world.gate("evict answer") != "ok":
            if row[5] in self._world.pins:
                self._world.pins[row[5]].nobody = "the table's answer was lost"
            self._world.entries_may_lack = True
            raise TableUnavailable("lost")
        return decode(id, row[1])

    async def evict_all(self, wanted: Any, why: Any) -> list[Any]:
        return await asyncio.gather(
            *(self.evict(scope, id, why) for scope, id in wanted), return_exceptions=True
        )

    async def commit(
        self, identity: Identity, holding: Holding, *, ttl_seconds: float, mark_seconds: float
    ) -> bool:
        await self._arrive("commit")
        keys = anchors(holding.fingerprint)
        if not identity.conversation and not keys:
            return False
        request_id = holding.handle["remote_request_id"] if holding.handle else ""
        row = (
            identity,
            encode(holding),
            holding.id,
            self._world.clock + ttl_seconds,
            keys,
            request_id,
        )
        asked = self._world.clock
        how = await self._world.gate("commit effect")
        self._world.late_call(asked)
        if how != "ok":
            self._world.entries_may_lack = True
            # The command sits in a socket: it takes effect later, and nobody hears of it.
            self._world.loop.create_task(self._late(row, ttl_seconds))
            raise TableUnavailable("no answer in time")
        self._rows.insert(0, row)
        await self._world.gate("commit answer")
        return True

    async def _late(self, row: Any, ttl_seconds: float) -> None:
        await self._world.gate(f"late commit {row[5]}")
        self._rows.insert(0, (*row[:3], self._world.clock + ttl_seconds, *row[4:]))

    async def _arrive(self, name: str) -> None:
        asked = self._world.clock
        if await self._world.gate(name) != "ok":
            raise TableUnavailable("refused", certain=True)
        self._world.late_call(asked)


class ModelLedger:
    """The ledger's rules in memory; a gate before each operation if the world wants them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.places: dict[Place, dict[str, Entry]] = {}
        self._early: set[str] = set()

    async def update(
        self,
        place: Place,
        *,
        add: Iterable[tuple[Entry, float]] = (),
        remove: Iterable[str] = (),
        take: Iterable[str] = (),
        budget: int | None = None,
        enough: int = 0,
    ) -> Page:
        world = self._world
        asked = world.clock
        if world.ledger_gates and await world.gate("ledger") != "ok":
            world.entries_may_lack = True
            raise TableUnavailable("refused")
        world.late_call(asked)
        entries = self.places.setdefault(place, {})
        expired = [entry for entry in entries.values() if entry.deadline <= world.clock]
        for entry in expired:
            del entries[entry.id]
        remove = list(remove)
        self._early |= {id for id in remove if id not in entries}
        removed = [entries.pop(id) for id in remove if id in entries]
        for entry, seconds in add:
            if entry.id not in self._early:
                entries[entry.id] = entry._replace(
                    since=world.clock, deadline=world.clock + seconds
                )
        blocks = sum(entry.blocks for entry in entries.values())
        taken = []
        for id in take:
            if id in entries and blocks > enough:
                taken.append(entries.pop(id))
                blocks -= taken[-1].blocks
        over = budget is not None and blocks > budget
        candidates = list(entries.values()) if over else []
        return Page(blocks, world.clock, expired, removed, taken, candidates)


class ModelClient:
    """Calls to the workers, as ``WorkerClient`` offers them."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def post(self, worker: Worker, path: str, body: bytes, **more: Any) -> bytes:
        request = orjson.loads(body)
        assert path.endswith("/render")
        return orjson.dumps({"token_ids": self._world.prompts[request["messages"][0]["content"]]})

    async def call(
        self, worker: Worker, path: str, body: bytes, *, timeout: float, **more: Any
    ) -> dict[str, Any]:
        request = orjson.loads(body)
        if worker.role is Role.PREFILL:
            return await self._prefill(worker, request)
        return await self._decode(worker, request)

    async def _prefill(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        world = self._world
        how = await world.gate("prefill")
        params = request["kv_transfer_params"]
        alone = request["prompt"] == [0]
        released = "remote_request_id" in params and not params["remote_num_tokens"]
        if (alone and how != "ok") or (released and how == "gone"):
            # A release is tried once; what is left then ends with its lease.
            key = params["remote_request_id"]
            if key in world.pins:
                world.pins[key].nobody = "prefill died with the release"
        self._fail_unless_ok(worker, how)
        handle = world.run_prefill(
            request["model"],
            request.get("cache_salt", ""),
            request["prompt"],
            params,
        )
        how = await world.gate("prefill answer")
        if how == "failed" and released:
            how = "gone"  # a 500 comes from a read that failed, and here nothing was to be read
        self._fail_unless_ok(worker, how)
        if handle is None:
            raise WorkerFailed(worker.name, 500)
        return {"kv_transfer_params": handle}

    async def _decode(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        ending, _ = await self._decoded(worker, request)
        script, handle = ending
        shown = script.output[script.hidden :]
        if script.plugin and handle is not None:
            handle = {**handle, "kvloop": {"token_ids": script.output}}
        choice = {"index": 0, "message": {"content": "x"}, "token_ids": shown}
        return {"choices": [choice], "kv_transfer_params": handle}

    async def _decoded(self, worker: Worker, request: dict[str, Any]) -> Any:
        world = self._world
        params = request.get("kv_transfer_params")
        ids = world.prompts[request["messages"][0]["content"]]
        if params:
            given = params.get("prompt_token_ids")
            if given is not None and given != ids:
                world.faults.append("decode was given other ids than the prompt's")
            source = world.prefill_handles.get(params.get("remote_request_id"))
            if source is not None and world.clock - source[1] > P_LEASE:
                world.faults.append("prefill's lease had ended")
        script = world.scripts[request["messages"][0]["content"]]
        engine = world.decode.engine
        self._fail_unless_ok(worker, await world.gate("decode"))
        if engine != world.decode.engine:
            raise WorkerUnreachable(worker.name, "connection reset")
        handle = world.run_decode(request["model"], ids, params, script)
        try:
            self._fail_unless_ok(worker, await world.gate("decode answer"))
        except (WorkerUnreachable, WorkerFailed, asyncio.CancelledError):
            if handle is not None and handle["remote_request_id"] in world.pins:
                world.pins[handle["remote_request_id"]].nobody = "decode's answer was lost"
            raise
        return (script, handle), ids

    @asynccontextmanager
    async def stream(
        self, worker: Worker, path: str, body: bytes, **more: Any
    ) -> AsyncIterator[Any]:
        (script, handle), _ = await self._decoded(worker, orjson.loads(body))
        yield _Stream(script, handle)

    async def read_some(self, worker: Worker, response: Any, **more: Any) -> bytes:
        part: bytes = response.parts.pop(0) if response.parts else b""
        return part

    def ended(self, response: Any) -> bool:
        return not response.parts

    def _fail_unless_ok(self, worker: Worker, how: str) -> None:
        if how == "gone":
            raise WorkerUnreachable(worker.name, "connection reset")
        if how != "ok":
            raise WorkerFailed(worker.name, 500)


class _Stream:
    """A 200 answer in pieces."""

    def __init__(self, script: Script, handle: dict[str, Any] | None) -> None:
        self.content_type = "text/event-stream"
        content = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
        self.parts = [b"data: " + orjson.dumps(content) + b"\n\n"]
        if script.plugin:
            event = {"token_ids": script.output, "kv_transfer_params": handle}
            self.parts.append(b": kvloop " + orjson.dumps(event) + b"\n\n")
        self.parts.append(b"data: [DONE]\n\n")


class _Sink:
    async def begin(self, content_type: str, headers: dict[str, str]) -> None: ...

    async def write(self, data: bytes, *, last: bool = False) -> None: ...

    def offer(self, data: bytes) -> bool:
        return False


class ModelProxy:
    """One replica: the real conductor and pool, with the model around them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.settings = Settings(
            prefill_urls=("http://p:1",),
            decode_urls=("http://d:1",),
            decode_kv_ttl_seconds=TTL,
            expiry_margin_seconds=MARGIN,
            pull_threshold=THRESHOLD,
        )
        self.prefill = Worker("http://p:1", Role.PREFILL, "p:1", healthy=True, epoch="1")
        self.decode = Worker("http://d:1", Role.DECODE, "d:1", healthy=True, epoch="1")
        self.prefill.block_size = self.decode.block_size = world.block_size
        self.decode.pin_limit_blocks = world.pin_limit
        if world.connector and world.pin_limit is None:
            self.decode.pin_limit_blocks = 4096
        self.pool = Pool([self.prefill, self.decode])
        self.start()

    def start(self) -> None:
        self.conductor = Conductor(
            settings=self.settings,
            pool=self.pool,
            client=ModelClient(self.world),  # type: ignore[arg-type]
            table=self.world.table,  # type: ignore[arg-type]
            ledger=self.world.ledger,  # type: ignore[arg-type]
            metrics=Metrics(),
        )

        async def wait() -> None:
            await self.world.gate("ride")

        self.conductor.releases.wait_for_rides = wait  # type: ignore[method-assign]
        self.conductor.releases.proved(
            self.prefill,
            Holding("", self.decode.name, "1", PromptTokens(b"", []).fingerprint, None),
        )

    def notice(self) -> None:
        """The health loop sees the decode process that now runs."""
        if self.decode.epoch != self.world.decode.epoch:
            self.decode.engine_id = ""
            self.decode.epoch = self.world.decode.epoch


@dataclass
class ModelTurn:
    """A turn under way or done."""

    turn: Turn
    proxy: ModelProxy
    task: asyncio.Task[None]

    @property
    def failed(self) -> bool:
        if not self.task.done() or self.task.cancelled():
            return False
        error = self.task.exception()
        if error is not None and not isinstance(error, KvloopError):
            raise error
        return error is not None


def start_turn(
    world: World,
    proxy: ModelProxy,
    *,
    ids: list[int],
    script: Script,
    model: str = "m",
    salt: str | None = None,
    tenant: str = "",
    conversation: str | None = None,
) -> ModelTurn:
    """A client sends a request."""
    key = f"turn-{next(world.numbers)}"
    world.prompts[key] = ids
    world.scripts[key] = script
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": key}]}
    if salt is not None:
        body["cache_salt"] = salt
    if conversation is not None:
        body["conversation_id"] = conversation
    if script.streamed:
        body["stream"] = True
    turn = Turn(
        body=body,
        identity=identify(body, {}, tenant=tenant),
        request_id=key,
        started=world.clock,
    )

    async def perform() -> None:
        _TURN.set(asyncio.current_task())
        await proxy.conductor.perform(turn, _Sink())

    task = world.loop.create_task(perform())
    found = ModelTurn(turn, proxy, task)
    world.turns.append(found)
    world.settle()
    return found


def cancel(world: World, turn: ModelTurn) -> None:
    """The client goes away."""
    turn.task.cancel()
    world.settle()
    world.judge()


def crash(world: World, proxy: ModelProxy) -> None:
    """The replica's process dies: whatever it was about to do is never done."""
    world.entries_may_lack = True
    tasks = [each.task for each in world.turns if each.proxy is proxy]
    tasks += list(proxy.conductor.background.tasks)
    for key, pin in world.pins.items():
        if world.table.holds(key) or any(
            _running(task) and task not in tasks for task in (pin.task, world.claimed.get(key))
        ):
            continue
        pin.nobody = "its proxy died"
    # A cancelled task may still start a release; a dead process does not: its gates are shut.
    for task in tasks:
        task.cancel()
    world.settle()
    dead = set(proxy.conductor.background.tasks)
    for task in dead:
        task.cancel()
    world.settle()
    proxy.start()
    world.judge()
