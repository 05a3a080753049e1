"""Random clients, clocks, crashes and interleavings around the model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.session.ledger import Place
from proxy.turn.retaining import RESERVED_SECONDS
from tests.proxy.model.world import (
    TTL,
    ModelProxy,
    ModelTurn,
    Script,
    World,
    cancel,
    crash,
    start_turn,
)

LENGTHS = st.sampled_from([1, 15, 16, 17, 31, 32, 40, 63, 64, 65, 96, 128, 130, 200])
"""Around block boundaries (16, 32), span boundaries (64) and between."""


TIMES = st.sampled_from([1.0, 10.0, 100.0, 445.0, 470.0, 485.0])


@dataclass
class Conversation:
    """What one client believes its history to be."""

    tenant: str
    model: str
    salt: str | None
    name: str | None
    ids: list[int] = field(default_factory=list)


class Reuse(RuleBasedStateMachine):
    """A step: a client sends, leaves or changes its mind; a call arrives or fails; time passes."""

    pin_limit: int | None = None
    budgeted = False

    def __init__(self) -> None:
        super().__init__()
        self.fresh = itertools.count(1000)
        self.conversations: list[Conversation] = []
        self.last: dict[int, tuple[ModelTurn, list[int]]] = {}

    @initialize(
        block=st.sampled_from([16, 32, 64]),
        groups=st.sampled_from([1, 1, 1, 2]),
        system=LENGTHS,
        connector=st.booleans(),
    )
    def begin(self, block: int, groups: int, system: int, connector: bool) -> None:
        self.world = World(
            block_size=block,
            groups=groups,
            connector=connector,
            pin_limit=self.pin_limit,
            ledger_gates=self.budgeted,
        )
        self.system = self.words(system)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.drain()
                for turn in self.world.turns:
                    assert not turn.failed or turn.task.exception()
            finally:
                self.world.close()

    def words(self, count: int) -> list[int]:
        """New token ids, in no history yet."""
        return [next(self.fresh) for _ in range(count)]

    # Clients.

    @rule(
        tenant=st.sampled_from(["", "", "t"]),
        model=st.sampled_from(["m", "m", "m-lora"]),
        salt=st.sampled_from([None, None, "s"]),
        name=st.sampled_from([None, None, "c", "e"]),
        first=LENGTHS,
        shared=st.booleans(),
    )
    def someone_new(
        self, tenant: str, model: str, salt: str | None, name: str | None, first: int, shared: bool
    ) -> None:
        ids = (self.system if shared else []) + self.words(first)
        self.conversations.append(Conversation(tenant, model, salt, name, ids))

    @precondition(lambda self: self.conversations)
    @rule(
        who=st.integers(0, 20),
        proxy=st.integers(0, 1),
        output=st.sampled_from([1, 2, 16, 17, 33, 64, 90]),
        ending=st.sampled_from(["stop", "stop", "stop", "length", "stop_string"]),
        plugin=st.sampled_from([True, True, True, False]),
        streamed=st.booleans(),
        ahead=st.sampled_from([0, 0, 0, 1, 2]),
        hidden=st.sampled_from([0, 0, 0, 1, 5]),
        finish=st.sampled_from([True, True, True, False]),
    )
    def send(
        self,
        who: int,
        proxy: int,
        output: int,
        ending: str,
        plugin: bool,
        streamed: bool,
        ahead: int,
        hidden: int,
        finish: bool,
    ) -> None:
        """A turn begins; ``finish`` lets it run to its end before anything else happens."""
        number = who % len(self.conversations)
        conversation = self.conversations[number]
        world = self.world
        answer = self.words(output)
        script = Script(answer, ending, plugin, ahead, min(hidden, output), streamed)
        turn = start_turn(
            world,
            world.proxies[proxy],
            ids=list(conversation.ids),
            script=script,
            model=conversation.model,
            salt=conversation.salt,
            tenant=conversation.tenant,
            conversation=conversation.name,
        )
        self.last[number] = (turn, answer[script.hidden :])
        world.judge()
        while finish and not turn.task.done():
            world.open(0)

    @precondition(lambda self: self.last)
    @rule(
        who=st.integers(0, 20),
        how=st.sampled_from(
            ["grow", "grow", "grow", "grow", "edit", "shorten", "compact", "reorder", "retokenise"]
        ),
        more=LENGTHS,
        place=st.floats(0, 1),
    )
    def change_history(self, who: int, how: str, more: int, place: float) -> None:
        """What the client makes of its history before its next request."""
        number = who % len(self.conversations)
        if number not in self.last:
            return
        conversation = self.conversations[number]
        _, answer = self.last[number]
        ids = conversation.ids
        at = int(place * len(ids))
        match how:
            case "grow":
                ids = ids + answer + self.words(more)
            case "retokenise":  # the same text in other tokens
                ids = ids + answer[: len(answer) // 2] + self.words(len(answer) // 2 + more)
            case "edit":
                ids = ids[:at] + self.words(1) + ids[at + 1 :] + self.words(more)
            case "shorten":
                ids = ids[: max(1, at)]
            case "compact":
                ids = self.words(max(1, more // 2)) + ids[at:]
            case "reorder":
                ids = ids[at:] + ids[:at]
        conversation.ids = ids

    @precondition(lambda self: self.conversations)
    @rule(who=st.integers(0, 20), more=LENGTHS)
    def branch(self, who: int, more: int) -> None:
        """A sub-agent goes on from the same history."""
        origin = self.conversations[who % len(self.conversations)]
        ids = [*origin.ids, *self.words(more)]
        self.conversations.append(
            Conversation(origin.tenant, origin.model, origin.salt, origin.name, ids)
        )

    @precondition(lambda self: self.conversations)
    @rule(who=st.integers(0, 20), tenant=st.booleans(), salt=st.booleans(), model=st.booleans())
    def same_words_elsewhere(self, who: int, tenant: bool, salt: bool, model: bool) -> None:
        """Another tenant, salt or adapter sends the very same tokens."""
        origin = self.conversations[who % len(self.conversations)]
        self.conversations.append(
            Conversation(
                "other" if tenant else origin.tenant,
                "m-lora" if model else origin.model,
                "other" if salt else origin.salt,
                origin.name,
                list(origin.ids),
            )
        )

    # Interleavings and failures.

    @precondition(lambda self: self.world.gates)
    @rule(index=st.integers(0, 50))
    def a_call_arrives(self, index: int) -> None:
        self.world.open(index)

    @precondition(lambda self: self.world.gates)
    @rule(index=st.integers(0, 50), how=st.sampled_from(["failed", "gone"]))
    def a_call_fails(self, index: int, how: str) -> None:
        self.world.open(index, how)

    @precondition(lambda self: self.world.turns)
    @rule(index=st.integers(0, 50))
    def a_client_leaves(self, index: int) -> None:
        running = [turn for turn in self.world.turns if not turn.task.done()]
        if running:
            cancel(self.world, running[index % len(running)])

    @rule(seconds=TIMES)
    def time_passes(self, seconds: float) -> None:
        # Between the legs of a turn only a little: prefill's lease is another promise's matter.
        quiet = not any(gate.name == "prefill answer" for gate in self.world.gates)
        self.world.tick(seconds if quiet else 1.0)

    @rule(noticed=st.booleans())
    def decode_restarts(self, noticed: bool) -> None:
        self.world.restart_decode()
        while any(gate.name.startswith("decode") for gate in self.world.gates):
            gates = self.world.gates
            self.world.open(
                next(i for i, g in enumerate(gates) if g.name.startswith("decode")), "gone"
            )
        if noticed:
            for proxy in self.world.proxies:
                proxy.notice()

    @rule(which=st.integers(0, 1))
    def a_restart_is_noticed(self, which: int) -> None:
        self.world.proxies[which].notice()

    @rule(which=st.integers(0, 1), healthy=st.booleans())
    def decode_seems_ill(self, which: int, healthy: bool) -> None:
        """A late health probe takes D out of one proxy's service, though its blocks live on."""
        self.world.proxies[which].decode.healthy = healthy

    @rule()
    def prefill_restarts(self) -> None:
        self.world.restart_prefill()

    @rule(which=st.integers(0, 1))
    def a_proxy_dies(self, which: int) -> None:
        crash(self.world, self.world.proxies[which])


class Budgeted(Reuse):
    """The same with a decode worker that pins little, so that room must be made all the time."""

    pin_limit = 40
    budgeted = True

    @rule(seconds=TIMES)
    def time_passes(self, seconds: float) -> None:
        # Calls to Redis take milliseconds or fail.
        while any(gate.name == "ledger" for gate in self.world.gates):
            gates = self.world.gates
            self.world.open(next(i for i, gate in enumerate(gates) if gate.name == "ledger"))
        super().time_passes(seconds)

    @rule(which=st.integers(0, 1))
    def a_sweep(self, which: int) -> None:
        self.world.failed_evictions = 0
        proxy = self.world.proxies[which]
        task = self.world.loop.create_task(proxy.conductor.retention.sweep(proxy.decode))
        tasks = proxy.conductor.background.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        self.world.settle()

    @invariant()
    def the_budget_is_kept_when_nothing_is_under_way(self) -> None:
        world = getattr(self, "world", None)
        if world is None or world.gates or world.entries_may_lack or world.failed_evictions:
            return
        if self._under_way():
            return
        for proxy in world.proxies:
            self._check_budget(proxy)

    def _under_way(self) -> bool:
        return any(not turn.task.done() for turn in self.world.turns) or any(
            proxy.conductor.background_tasks for proxy in self.world.proxies
        )

    def _check_budget(self, proxy: ModelProxy) -> None:
        world, retention = self.world, proxy.conductor.retention
        budget = retention.budget(proxy.decode)
        entries = world.ledger.places.get(Place(proxy.decode.name, proxy.decode.epoch), {}).values()
        claimable = [e for e in entries if world.clock - e.since < e.usable_seconds]
        assert budget is not None
        over = sum(entry.blocks for entry in entries) > budget
        assert not (over and claimable), "above the budget with something left to give up"

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.drain()
                self._close_the_books()
            finally:
                super().teardown()

    def _close_the_books(self) -> None:
        """When all is quiet the ledger says what is held; in the end it says nothing."""
        world = self.world
        self._quiet(RESERVED_SECONDS + 1)
        for proxy in world.proxies:
            self._check_budget(proxy)
        entries = {
            entry.id
            for place in world.ledger.places.values()
            for entry in place.values()
            if world.clock - entry.since < entry.usable_seconds
        }
        if not world.entries_may_lack:
            assert entries == world.table.held_ids(), "the ledger is not what is held"
        self._quiet(TTL)
        for proxy in world.proxies:
            place = Place(proxy.decode.name, proxy.decode.epoch)
            assert not world.ledger.places.get(place)

    def _quiet(self, seconds: float) -> None:
        self.world.tick(seconds)
        for which in range(len(self.world.proxies)):
            self.a_sweep(which)
            self.world.drain()


def describe(machine: Any) -> str:
    return f"{len(machine.world.turns)} turns, {machine.world.pulled} tokens pulled"
