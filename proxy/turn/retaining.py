"""[io] What decode keeps for ended turns: how long, how much in all, and what is given up first.

``retention`` values, ``session/ledger`` counts, ``session/table`` decides who gets a holding; here
is the order in which a turn meets them:

* a claim notes how long the conversation took to come back;
* when decode begins, the room that its answer will take is reserved, so that decode finds it free
  when it finishes: its connector refuses to keep what would exceed its share;
* when it has ended, the reservation becomes an entry, and what is then above the budget goes;
* every few seconds overdue entries are dropped.

A turn waits for none of this: it notes what changed, and one task for each decode worker tells the
ledger a few times a second what all turns have noted. What is given up goes several at a time, down
to somewhat less than the budget, so that under pressure not every turn has to look for a victim. A
victim is first taken out of the ledger, so that of several proxies that see the same excess one
makes the room; then out of the session table, which exactly one caller can do; then it is released.
A proxy that dies in between leaves the pin to its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from proxy import log
from proxy.errors import TableUnavailable
from proxy.metrics import Metrics
from proxy.retention import EDGES, Entry, Groups, budget_blocks, group_of, to_give_up
from proxy.session.holding import Holding
from proxy.session.ledger import Ledger, Page, Place
from proxy.session.table import SessionTable, new_holding_id
from proxy.settings import Settings
from proxy.tasks import end
from proxy.turn.background import Background
from proxy.turn.reasons import Reason
from proxy.turn.record import Reservation, Turn
from proxy.turn.releases import Releases
from proxy.workers.pool import Pool, Role, Worker

MARK_SECONDS = EDGES[-1]
"""How long a mark outlives its turn: later than this no return is counted anyway."""
RESERVED_SECONDS = 120.0
"""A reservation ends by itself: its proxy may have died. An answer that takes longer is then only
counted when it has ended."""
_SETTLED_SECONDS = 10.0
"""An entry without a holding is normal for a moment: its commit, or the removal after a claim, is
under way. After this time it is left from a crash and dropped."""
_SWEEP_SECONDS = 2.0
GATHER_SECONDS = 0.05
"""How long changes to a ledger wait for others that go along. A turn that is shorter reserves
nothing; longer, and other proxies would learn late what decode keeps."""
_TELLING_SECONDS = 1.0
"""Longest wait of a page that shows the ledger for what this proxy has still to tell it."""
DOWN_TO = 0.97
"""Share of the budget that is left when room is made: 1 would have each turn look for a victim of
its own, much less gives up sessions for room that nobody needs yet."""
_MOST_VICTIMS = 1000
_GUESSED_BLOCK = 16


@dataclass(slots=True)
class _Changes:
    """What one ledger is still to be told: entries, each with its seconds and the monotonic time
    from which they count, and ids to remove."""

    add: dict[str, tuple[Entry, float, float]] = field(default_factory=dict)
    remove: dict[str, None] = field(default_factory=dict)
    told: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Strays:
    """Blocks that a decode worker says it pins beyond its ledger: of proxies that died at the wrong
    moment, of releases that failed, of proxies on another Redis."""

    blocks: int = 0
    _last: int = 0
    _asked: int = 0

    def seen(self, worker: Worker, ledger_blocks: int) -> None:
        """Compare, once for each time the worker was asked.

        Only what was there twice counts: in between, pins are made and released that the ledger
        is a moment ahead of, or behind.
        """
        if worker.facts_read == self._asked or worker.pinned_blocks is None:
            return
        self._asked = worker.facts_read
        now = max(0, worker.pinned_blocks - ledger_blocks)
        self.blocks, self._last = min(now, self._last), now


class Retention:
    """The retention of one proxy. ``start`` and ``stop`` drive the sweep."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        table: SessionTable,
        ledger: Ledger,
        metrics: Metrics,
        background: Background,
        releases: Releases,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._table = table
        self._ledger = ledger
        self._metrics = metrics
        self._background = background
        self._releases = releases
        self.groups = Groups()
        self._changes: dict[Place, _Changes] = {}
        self._telling: dict[Place, _Changes] = {}
        """Where somebody tells, or waits to; and what is being told."""
        self._hurry = asyncio.Event()
        self._spared: dict[Place, set[str]] = {}
        """Ids that could not be given up: not tried again before the next sweep."""
        self._stray: dict[Place, _Strays] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self.on_given_up: Callable[[str], None] = lambda id: None
        """Told the id of each holding that this proxy gives up."""

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep_on(), name="retention sweep")

    async def stop(self) -> None:
        if self._sweeper is not None:
            await end([self._sweeper])

    def budget(self, worker: Worker) -> int | None:
        """Blocks that may be retained on this worker; None while its size is unknown."""
        blocks = budget_blocks(
            share=self._settings.retention_share,
            pin_limit_blocks=worker.pin_limit_blocks,
            kv_blocks=worker.kv_blocks,
        )
        return None if blocks is None else max(0, blocks - self._strays(worker).blocks)

    def _strays(self, worker: Worker) -> _Strays:
        place = Place(worker.name, worker.epoch)
        if place not in self._stray:
            self._stray = {k: v for k, v in self._stray.items() if k.worker != place.worker}
            self._stray[place] = _Strays()
        return self._stray[place]

    # What a turn says on its way.

    def came(self, turn: Turn, holding: Holding) -> None:
        """The turn claimed this record: how long did its conversation take?"""
        turn.continues = True
        if holding.handle is not None:
            turn.taken = holding
        if holding.kept_at:
            gap = max(0.0, time.time() - holding.kept_at)
            self._metrics.turn_gap_seconds.observe(gap)
            if holding.group:
                self.groups.learn(holding.group).turn_came(gap)

    def group(self, turn: Turn) -> str:
        """To whose habits this turn's own next turn will count."""
        return group_of(turn.identity, continues=turn.continues)

    def lease(self, turn: Turn) -> float:
        """Seconds for which decode is asked to keep this turn's blocks, the margin included."""
        settings = self._settings
        usable = self.groups.of(self.group(turn)).lease(
            shortest=settings.shortest_lease_seconds, longest=settings.longest_usable_seconds
        )
        return usable + settings.expiry_margin_seconds

    def decode_begins(self, turn: Turn, worker: Worker, tokens: int) -> None:
        """Prefill is through with what was claimed; decode will want room for ``tokens``."""
        place = Place(worker.name, worker.epoch)
        self.turn_over(turn)
        entry = Entry(
            id=new_holding_id(),
            blocks=ceil(tokens / (worker.block_size or _GUESSED_BLOCK)),
            tokens=tokens,
            group=self.group(turn),
            reserved=True,
        )
        self._add(place, entry, RESERVED_SECONDS)
        turn.reservation = Reservation(place, entry.id)

    def ended(
        self,
        turn: Turn,
        worker: Worker,
        holding: Holding,
        *,
        usable_seconds: float,
        pinned_seconds: float,
    ) -> None:
        """Decode has pinned ``holding``, and the turn is about to store it.

        Before the commit is certain: an entry too many corrects itself, one too few does not.
        """
        identity = turn.identity
        entry = Entry(
            id=holding.id,
            blocks=holding.block_count,
            tokens=holding.fingerprint.token_count,
            group=holding.group,
            scope=identity.scope.hex(),
            tenant=identity.tenant.hex(),
            conversation=identity.conversation.hex(),
            model=turn.model,
            usable_seconds=usable_seconds,
        )
        reservation, turn.reservation = turn.reservation, None
        if reservation is not None:
            self._remove(reservation.place, reservation.id)
        self._add(Place(worker.name, holding.epoch), entry, pinned_seconds)

    def stored(self, worker: Worker, holding: Holding) -> None:
        """The commit has succeeded: from now on the blocks can be given up."""
        place = Place(worker.name, holding.epoch)
        spared = self._spared.get(place, ())
        if holding.id in spared:
            self._spared[place].discard(holding.id)
            self._of(place)

    def not_stored(self, worker: Worker, holding: Holding) -> None:
        """The commit failed for certain: the blocks are about to be released."""
        self._remove(Place(worker.name, holding.epoch), holding.id)

    def turn_kept(self, turn: Turn) -> None:
        """A turn has ended that may have a next one."""
        self.groups.learn(self.group(turn)).turn_kept()

    def turn_over(self, turn: Turn) -> None:
        """Whatever this turn still has in a ledger goes."""
        if turn.taken is not None:
            self.gone(turn.taken)
            turn.taken = None
        if turn.reservation is not None:
            self._remove(turn.reservation.place, turn.reservation.id)
            turn.reservation = None

    def gone(self, holding: Holding) -> None:
        """Decode will not hold these blocks much longer: somebody pulls or releases them."""
        self._remove(Place(holding.worker, holding.epoch), holding.id)

    async def give_up(self, scope: str, id: str, model: str) -> int:
        """Release a holding at once because its owner says so; how many blocks that frees.

        Raises ``TableUnavailable``.
        """
        holding = await self._table.evict(scope, id, None)
        if holding is None or holding.handle is None:
            return 0
        self._metrics.evictions.labels("session_deleted").inc()
        self.on_given_up(id)
        self._releases.later(model, holding)
        self.gone(holding)
        return holding.block_count

    # The ledger.

    def _add(self, place: Place, entry: Entry, seconds: float) -> None:
        self._of(place).add[entry.id] = entry, seconds, time.monotonic()

    def _remove(self, place: Place, id: str) -> None:
        changes = self._of(place)
        if changes.add.pop(id, None) is None:  # else nobody was told of it yet
            changes.remove[id] = None

    def _of(self, place: Place) -> _Changes:
        """What is to be told, with somebody who will tell it."""
        changes = self._changes.get(place)
        if changes is None:
            changes = self._changes[place] = _Changes()
        if place not in self._telling:
            self._telling[place] = changes
            self._background.start(self._tell(place), "ledger")
        return changes

    async def _tell(self, place: Place) -> None:
        """One at a time for each ledger: changes arrive in the order in which they were made."""
        try:
            while place in self._changes:
                await self._gather()
                changes = self._telling[place] = self._changes.pop(place)
                now, budget = time.monotonic(), self._budget_of(place)
                page = await self._update(
                    place,
                    budget,
                    add=[_as_of(now, *each) for each in changes.add.values()],
                    remove=changes.remove,
                )
                changes.told.set()
                if page is not None:
                    added = [entry for entry, _, _ in changes.add.values()]
                    newcomers = [entry for entry in added if entry.reserved]
                    await self._make_room(place, budget, page, newcomers)
        finally:
            self._telling.pop(place).told.set()

    async def _gather(self) -> None:
        if GATHER_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_SECONDS):
                    await self._hurry.wait()

    async def told(self) -> None:
        """Return when the ledgers have been told what was noted up to now, or cannot be told."""
        waiting = [*self._changes.values(), *self._telling.values()]
        self._hurry.set()
        try:
            async with asyncio.timeout(_TELLING_SECONDS):
                for each in waiting:
                    await each.told.wait()
        except TimeoutError:
            log.event("ledger_slow")
        finally:
            self._hurry.clear()

    def _budget_of(self, place: Place) -> int | None:
        worker = self._pool.get(place.worker)
        if worker is None or worker.epoch != place.epoch:
            return None
        return self.budget(worker)

    async def _update(self, place: Place, budget: int | None, **what: Any) -> Page | None:
        """An update, counted; None when Redis failed, and then nothing waits for it."""
        try:
            page = await self._ledger.update(
                place, budget=budget, enough=int((budget or 0) * DOWN_TO), **what
            )
        except TableUnavailable as error:
            self._metrics.table_failures.labels("ledger").inc()
            log.event("ledger_failed", worker=place.worker, error=str(error))
            return None
        metrics = self._metrics
        metrics.retained_blocks.labels(place.worker).set(page.blocks)
        ended = [each for each in (*page.expired, *page.removed, *page.taken) if not each.reserved]
        if ended:
            metrics.retained_block_seconds.labels(place.worker).inc(
                sum(
                    entry.blocks * max(0.0, min(page.now, entry.deadline) - entry.since)
                    for entry in ended
                )
            )
        if lapsed := sum(not entry.reserved for entry in page.expired):
            metrics.leases_expired.labels(place.worker).inc(lapsed)
        return page

    async def _make_room(
        self, place: Place, budget: int | None, page: Page, newcomers: Sequence[Entry] = ()
    ) -> None:
        """Give up the least valuable holdings until the budget is kept again.

        ``newcomers``: reservations that are new; they take room only from what is worth less.
        """
        if budget is None:
            return
        current: Page | None = page
        reserved = sum(each.blocks for each in newcomers)
        spared = self._spared.get(place, ())
        seen = set(spared)
        while (
            current is not None
            and current.blocks > budget
            and len(seen) < _MOST_VICTIMS + len(spared)
        ):
            victims = to_give_up(
                [each for each in current.candidates if each.id not in seen],
                self.groups,
                now=current.now,
                excess=current.blocks - int(budget * DOWN_TO),
                must=current.blocks - reserved - budget,
                newcomers=newcomers,
            )
            if not victims:
                return
            seen.update(victims)
            current = await self._update(place, budget, take=victims)
            if current is not None and current.taken:
                await self._evict(place, current)

    async def _evict(self, place: Place, page: Page) -> None:
        """Give up what was taken out of the ledger; what cannot be goes back."""
        read = time.monotonic()
        got = await self._table.evict_all(
            [(entry.scope, entry.id) for entry in page.taken], Reason.EVICTED
        )
        for entry, holding in zip(page.taken, got, strict=True):
            age = page.now - entry.since
            if isinstance(holding, TableUnavailable):
                self._metrics.table_failures.labels("evict").inc()
                log.event("evict_failed", worker=place.worker, error=str(holding))
            elif holding is not None:
                self._metrics.evictions.labels("budget").inc()
                self.on_given_up(entry.id)
                self._releases.soon(entry.model, holding)
                continue
            elif age >= _SETTLED_SECONDS:
                continue
            self._spared.setdefault(place, set()).add(entry.id)
            late = time.monotonic() - read
            left = entry._replace(usable_seconds=entry.usable_seconds - age - late)
            self._add(place, left, entry.deadline - page.now - late)

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for worker in self._pool.workers:
                if worker.role is Role.DECODE and worker.epoch:
                    await self.sweep(worker)

    async def sweep(self, worker: Worker) -> None:
        """Drop what is overdue, and keep the budget if it has shrunk."""
        place = Place(worker.name, worker.epoch)
        self._spared = {k: v for k, v in self._spared.items() if k.worker != place.worker}
        page = await self._update(place, self.budget(worker))
        if page is not None:
            on_its_way = self._releases.waiting_blocks(place.worker, place.epoch)
            self._strays(worker).seen(worker, page.blocks + on_its_way)
            await self._make_room(place, self.budget(worker), page)
        budget = self.budget(worker)
        if budget is not None:
            self._metrics.retention_budget_blocks.labels(worker.name).set(budget)


def _as_of(now: float, entry: Entry, seconds: float, counted_from: float) -> tuple[Entry, float]:
    """What is left of an entry's times: decode's lease did not wait for the ledger."""
    waited = now - counted_from
    usable = max(0.0, entry.usable_seconds - waited)
    return entry._replace(usable_seconds=usable), max(0.001, seconds - waited)
