"""The ledgers on a real Valkey server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.errors import TableUnavailable
from proxy.retention import Entry
from proxy.session.ledger import SAMPLE, Ledger, Page, Place
from proxy.session.table import SessionTable, new_holding_id

PLACE = Place("d:1", "1")


def entry(blocks: int, **more: Any) -> Entry:
    return Entry(new_holding_id(), blocks, tokens=blocks * 16, usable_seconds=50.0, **more)


@pytest.fixture
async def table(valkey_url: str) -> AsyncIterator[SessionTable]:
    table = SessionTable(valkey_url, timeout_seconds=10)
    await table._redis.flushall()
    yield table
    await table.close()


@pytest.fixture
def ledger(table: SessionTable) -> Ledger:
    return Ledger(table)


async def add(ledger: Ledger, new: Entry, seconds: float = 60, **more: Any) -> Page:
    return await ledger.update(PLACE, add=[(new, seconds)], **more)


async def test_blocks_add_up_and_go_with_their_entries(ledger: Ledger) -> None:
    """Each entry counts once, also when it is written or removed twice."""
    one, two = entry(10), entry(7)
    assert (await add(ledger, one)).blocks == 10
    assert (await add(ledger, two)).blocks == 17
    assert (await add(ledger, one._replace(blocks=12))).blocks == 19
    page = await ledger.update(PLACE, remove=[two.id, "unknown", two.id])
    assert page.blocks == 12
    assert [gone.id for gone in page.removed] == [two.id]


async def test_an_entry_that_was_removed_before_it_came_is_not_entered(ledger: Ledger) -> None:
    """The next turn claimed the blocks while this one's entry was on its way; that holds once."""
    fast, other = entry(10), entry(7)
    await ledger.update(PLACE, remove=[fast.id])
    assert (await add(ledger, fast)).blocks == 0
    assert (await add(ledger, other)).blocks == 7
    assert (await add(ledger, fast)).blocks == 17


async def test_an_entry_comes_back_as_it_was_written(ledger: Ledger) -> None:
    """With the times that the server gave it."""
    written = entry(
        3,
        group="g",
        scope="5c" * 16,
        tenant="7e" * 16,
        conversation="c0" * 16,
        model="a model, with spaces",
    )
    await add(ledger, written, seconds=60)
    now, (read,) = await ledger.entries(PLACE)
    assert read._replace(since=0.0, deadline=0.0) == written
    assert read.since <= now
    assert read.deadline == pytest.approx(read.since + 60)


async def test_overdue_entries_are_dropped_whoever_wrote_them(ledger: Ledger) -> None:
    """Nothing that a dead proxy left stays longer than decode keeps the blocks."""
    dead, alive = entry(10), entry(5)
    await add(ledger, dead, seconds=0.03)
    await add(ledger, alive)
    await asyncio.sleep(0.05)
    page = await ledger.update(PLACE)
    assert ([gone.id for gone in page.expired], page.blocks) == ([dead.id], 5)
    assert (await ledger.update(PLACE)).expired == []


async def test_candidates_come_only_above_the_budget(ledger: Ledger) -> None:
    """A ledger that fits in the sample is given whole, the new entry included."""
    entries = [entry(10) for _ in range(5)]
    for each in entries:
        page = await add(ledger, each, budget=49)
        assert bool(page.candidates) == (page.blocks > 49)
    assert {each.id for each in page.candidates} == {each.id for each in entries}
    assert (await ledger.update(PLACE)).candidates == []


async def test_processes_and_workers_have_ledgers_of_their_own(ledger: Ledger) -> None:
    """A restarted worker begins with nothing."""
    await add(ledger, entry(10))
    for place in (Place("d:1", "2"), Place("d:2", "1")):
        assert (await ledger.update(place)).blocks == 0


async def test_a_ledger_leaves_no_key(ledger: Ledger, table: SessionTable) -> None:
    """Neither when its last entry is removed, nor for good when nobody ever looks again."""
    last = entry(10)
    await add(ledger, last)
    for key in await table._redis.keys("*"):
        assert 60_000 < await table._redis.pttl(key) <= 120_000
    await ledger.update(PLACE, remove=[last.id])
    assert await table._redis.keys("*") == []


@pytest.mark.parametrize("lost", ["entries", "deadlines"])
async def test_a_key_that_the_server_dropped_counts_no_block_for_ever(
    ledger: Ledger, table: SessionTable, lost: str
) -> None:
    """A server short of memory takes keys singly; the rest is put in order again."""
    await add(ledger, entry(10), seconds=0.03)
    await add(ledger, entry(5))
    await table._redis.delete(f"kvloop:{{d:d:1}}:1:{lost}")
    await asyncio.sleep(0.05)
    page = await add(ledger, entry(2))
    assert page.blocks == (2 if lost == "entries" else 7)


async def test_what_is_taken_stops_where_it_is_enough(ledger: Ledger) -> None:
    """In the order given; what another one has taken or removed is no longer there to take."""
    entries = [entry(10) for _ in range(5)]
    for each in entries:
        await add(ledger, each)
    ids = [each.id for each in entries]
    pages = await asyncio.gather(
        ledger.update(PLACE, take=["unknown", ids[3], ids[0], ids[1]], enough=30),
        ledger.update(PLACE, take=[ids[4], ids[2], ids[3]], enough=30),
    )
    assert [[each.id for each in page.taken] for page in pages] == [[ids[3], ids[0]], []]
    assert [page.blocks for page in pages] == [30, 30]
    _, left = await ledger.entries(PLACE)
    assert {each.id for each in left} == {ids[1], ids[2], ids[4]}


async def test_many_victims_are_chosen_among_more(ledger: Ledger) -> None:
    """A large ledger is not read whole, and a larger part of it the more must go."""
    await ledger.update(PLACE, add=[(entry(1), 60) for _ in range(900)])
    few = await ledger.update(PLACE, budget=899, enough=895)
    many = await ledger.update(PLACE, budget=899, enough=850)
    assert SAMPLE <= len(few.candidates) <= SAMPLE + 1
    assert 8 * 50 <= len(many.candidates) <= 8 * 50 + 1


async def test_a_failed_trip_is_told_each_time() -> None:
    table = SessionTable("redis://127.0.0.1:1", timeout_seconds=0.1)
    down = Ledger(table)
    for _ in range(2):
        with pytest.raises(TableUnavailable):
            await down.update(PLACE)
    await table.close()


async def test_parallel_writers_lose_no_block(ledger: Ledger) -> None:
    """Additions and removals from many callers leave the sum of what is there."""
    entries = [entry(blocks) for blocks in range(1, 41)]
    await asyncio.gather(*(add(ledger, each) for each in entries))
    await asyncio.gather(*(ledger.update(PLACE, remove=[each.id]) for each in entries[::2]))
    page = await ledger.update(PLACE)
    _, left = await ledger.entries(PLACE)
    assert page.blocks == sum(each.blocks for each in left) == sum(range(2, 41, 2))
