"""[io] What decode keeps for ended turns: how long, how much in all, and what is given up first.

``retention`` values, ``session/ledger`` counts, ``session/table`` decides who gets a holding; here
is the order in which a turn meets them:

* a claim notes how long the conversation took to come back;
* when decode begins, the room that its answer will take is reserved, so that decode finds it free
  when it finishes: its connector refuses to keep what would exceed its share;
* when it has ended, the reservation becomes an entry, and what is then above the budget goes;
* every few seconds overdue entries are dropped.

All of it runs in the background: a turn waits for none of these calls. A victim is first taken out
of the session table, which exactly one caller can do, then released; a proxy that dies in between
leaves the pin to its lease, and the ledger's entry with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from proxy import log
from proxy.errors import TableUnavailable
from proxy.metrics import Metrics
from proxy.retention import EDGES, Entry, Groups, budget_blocks, by_worth, group_of
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
_MOST_VICTIMS = 1000
_GUESSED_BLOCK = 16


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
        self._locks: dict[str, asyncio.Lock] = {}
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
        gone = []
        if turn.taken is not None and Place(turn.taken.worker, turn.taken.epoch) == place:
            gone.append(turn.taken.id)
            turn.taken = None
        self.turn_over(turn)
        entry = Entry(
            id=new_holding_id(),
            blocks=ceil(tokens / (worker.block_size or _GUESSED_BLOCK)),
            tokens=tokens,
            group=self.group(turn),
            reserved=True,
        )
        reserving = self._background.start(self._reserve(worker, place, entry, gone), "reserve")
        turn.reservation = Reservation(place, entry.id, reserving)

    def ended(
        self,
        turn: Turn,
        worker: Worker,
        holding: Holding,
        *,
        usable_seconds: float,
        pinned_seconds: float,
    ) -> asyncio.Future[bool | None]:
        """Decode has pinned ``holding``. The caller says through the future if it was stored."""
        stored: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
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
        self._background.start(
            self._enter(worker, entry, holding.epoch, pinned_seconds, reservation, stored), "enter"
        )
        return stored

    def turn_kept(self, turn: Turn) -> None:
        """A turn has ended that may have a next one."""
        self.groups.learn(self.group(turn)).turn_kept()

    def turn_over(self, turn: Turn) -> None:
        """Whatever this turn still has in a ledger goes."""
        if turn.taken is not None:
            self.gone(turn.taken)
            turn.taken = None
        if turn.reservation is not None:
            self._background.start(self._unreserve(turn.reservation), "unreserve")
            turn.reservation = None

    def gone(self, holding: Holding) -> None:
        """Decode will not hold these blocks much longer: somebody pulls or releases them."""
        place = Place(holding.worker, holding.epoch)
        self._background.start(self._remove(place, [holding.id]), "ledger")

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

    async def _update(self, place: Place, **what: object) -> Page | None:
        """An update, counted; None when Redis failed, and then nothing waits for it."""
        try:
            page = await self._ledger.update(place, **what)  # type: ignore[arg-type]
        except TableUnavailable as error:
            self._metrics.table_failures.labels("ledger").inc()
            log.event("ledger_failed", worker=place.worker, error=str(error))
            return None
        self._metrics.retained_blocks.labels(place.worker).set(page.blocks)
        for entry in (*page.expired, *page.removed):
            if not entry.reserved:
                held = max(0.0, min(page.now, entry.deadline) - entry.since)
                self._metrics.retained_block_seconds.labels(place.worker).inc(entry.blocks * held)
        for entry in page.expired:
            if not entry.reserved:
                self._metrics.leases_expired.labels(place.worker).inc()
        return page

    async def _remove(self, place: Place, ids: list[str]) -> None:
        await self._update(place, remove=ids)

    async def _reserve(self, worker: Worker, place: Place, entry: Entry, gone: list[str]) -> None:
        page = await self._update(
            place, add=entry, seconds=RESERVED_SECONDS, remove=gone, budget=self.budget(worker)
        )
        if page is not None:
            await self._make_room(worker, place, page, newcomer=entry)

    async def _unreserve(self, reservation: Reservation) -> None:
        await asyncio.wait([reservation.entering])
        await self._remove(reservation.place, [reservation.id])

    async def _enter(
        self,
        worker: Worker,
        entry: Entry,
        epoch: str,
        pinned_seconds: float,
        reservation: Reservation | None,
        stored: asyncio.Future[bool | None],
    ) -> None:
        place = Place(worker.name, epoch)
        began = time.monotonic()
        remove = []
        if reservation is not None:
            await asyncio.wait([reservation.entering])
            if reservation.place == place:
                remove = [reservation.id]
            else:
                await self._remove(reservation.place, [reservation.id])
        # Decode's lease did not wait for the room that the reservation made.
        late = time.monotonic() - began
        entry = entry._replace(usable_seconds=max(0.0, entry.usable_seconds - late))
        pinned_seconds = max(0.001, pinned_seconds - late)
        # Before the commit is certain: an entry too many corrects itself, one too few does not.
        page = await self._update(
            place, add=entry, seconds=pinned_seconds, remove=remove, budget=self.budget(worker)
        )
        if await stored is False:
            await self._remove(place, [entry.id])
        elif page is not None:
            await self._make_room(worker, place, page)

    async def _make_room(
        self, worker: Worker, place: Place, page: Page, *, newcomer: Entry | None = None
    ) -> None:
        """Give up the least valuable holdings until the budget is kept.

        One at a time and looking again after each, because other proxies do the same.
        """
        budget = self.budget(worker)
        if budget is None or page.blocks <= budget:
            return
        lock = self._locks.setdefault(place.worker, asyncio.Lock())
        waited = lock.locked()
        async with lock:
            current = await self._update(place, budget=budget) if waited else page
            seen: set[str] = set()
            while current is not None and current.blocks > budget and len(seen) < _MOST_VICTIMS:
                ranked = by_worth(
                    current.candidates, self.groups, now=current.now, newcomer=newcomer
                )
                victim = next((entry for entry in ranked if entry.id not in seen), None)
                if victim is None:
                    return
                seen.add(victim.id)
                current = await self._evict(place, victim, budget, age=current.now - victim.since)

    async def _evict(self, place: Place, victim: Entry, budget: int, *, age: float) -> Page | None:
        try:
            holding = await self._table.evict(victim.scope, victim.id, Reason.EVICTED)
        except TableUnavailable as error:
            self._metrics.table_failures.labels("evict").inc()
            log.event("evict_failed", worker=place.worker, error=str(error))
            return None
        remove = [victim.id]
        if holding is not None:
            self._metrics.evictions.labels("budget").inc()
            self.on_given_up(victim.id)
            self._releases.later(victim.model, holding)
        elif age < _SETTLED_SECONDS:
            remove = []
        return await self._update(place, remove=remove, budget=budget)

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for worker in self._pool.workers:
                if worker.role is Role.DECODE and worker.epoch:
                    await self.sweep(worker)

    async def sweep(self, worker: Worker) -> None:
        """Drop what is overdue, and keep the budget if it has shrunk."""
        place = Place(worker.name, worker.epoch)
        page = await self._update(place, budget=self.budget(worker))
        if page is not None:
            self._strays(worker).seen(worker, page.blocks)
            await self._make_room(worker, place, page)
        budget = self.budget(worker)
        if budget is not None:
            self._metrics.retention_budget_blocks.labels(worker.name).set(budget)
