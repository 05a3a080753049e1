"""The session table on a real Valkey server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import TableUnavailable
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import Holding
from proxy.session.identity import Identity, identify
from proxy.session.private_store import PrivateStore
from proxy.session.table import SessionTable, new_holding_id
from proxy.turn.reasons import Reason


def who(conversation: str | None = None, model: str = "m") -> Identity:
    body: dict[str, object] = {"model": model}
    if conversation:
        body["conversation_id"] = conversation
    return identify(body, {})


def holding(identity: Identity, length: int) -> Holding:
    tokens = PromptTokens(identity.namespace, range(length))
    handle = {"remote_block_ids": [[1, 2, 3]]}
    return Holding(new_holding_id(), "d:1", "1", tokens.fingerprint, handle)


@pytest.fixture
async def table(valkey_url: str) -> AsyncIterator[SessionTable]:
    table = SessionTable(valkey_url, timeout_seconds=10)
    await table._redis.flushall()
    yield table
    await table.close()


async def test_one_of_a_hundred_claims_wins(table: SessionTable) -> None:
    """The claim is atomic: of many callers one owns the holding, and it is never there again."""
    identity = who("c")
    stored = holding(identity, 200)
    assert await table.commit(identity, stored, ttl_seconds=60)
    prompt = PromptTokens(identity.namespace, range(300))
    assert await table.find(identity, prompt) == [stored]
    wins = await asyncio.gather(*(table.claim(identity, stored) for _ in range(100)))
    assert sum(wins) == 1
    assert await table.find(identity, prompt) == []


async def test_a_prefix_finds_the_session_without_an_id(table: SessionTable) -> None:
    """Any extension of the stored tokens finds it, other tokens do not."""
    identity = who()
    stored = holding(identity, 1000)
    await table.commit(identity, stored, ttl_seconds=60)
    for length in (1000, 1001, 5000):
        assert await table.find(identity, PromptTokens(identity.namespace, range(length)))
    other = PromptTokens(identity.namespace, range(1, 1001))
    assert await table.find(identity, other) == []
    tiny = PromptTokens(identity.namespace, range(10))
    assert await table.find(identity, tiny) == []


async def test_scopes_do_not_see_each_other(table: SessionTable) -> None:
    """Another model's session is not found, by id or by prefix."""
    for conversation in (None, "c"):
        mine, theirs = who(conversation, "a"), who(conversation, "b")
        await table.commit(mine, holding(mine, 500), ttl_seconds=60)
        assert await table.find(theirs, PromptTokens(theirs.namespace, range(600))) == []


async def test_holdings_expire_and_leave_no_key(table: SessionTable) -> None:
    """Every key of a session goes with its blocks."""
    for identity in (who("c"), who()):
        await table.commit(identity, holding(identity, 500), ttl_seconds=0.05)
    await asyncio.sleep(0.1)
    assert await table._redis.keys("*") == []


async def test_a_mark_outlives_its_holding_and_says_what_became_of_it(table: SessionTable) -> None:
    """Expired or evicted, by id or by prefix; recognised as a whole, claimed once."""
    for identity in (who("c"), who()):
        for evicted in (False, True):
            stored = replace(holding(identity, 500), kept_at=5.0, group="g")
            await table.commit(identity, stored, ttl_seconds=0.05, mark_seconds=60)
            if evicted:
                found = await table.evict(identity.scope.hex(), stored.id, Reason.EVICTED)
                assert found == stored
            else:
                await asyncio.sleep(0.1)
            prompt = PromptTokens(identity.namespace, range(600))
            (mark,) = await table.find(identity, prompt)
            expected = Reason.EVICTED if evicted else Reason.LEASE_EXPIRED
            assert (mark.absent, mark.handle) == (expected, None)
            assert (mark.kept_at, mark.group) == (5.0, "g")
            assert prompt.common_prefix(mark.fingerprint) == 500
            assert await table.claim(identity, mark)
            assert await table.find(identity, prompt) == []


async def test_a_mark_hides_no_holding_and_goes_with_the_claim(table: SessionTable) -> None:
    """What can be pulled comes first, its own mark and those of others after it."""
    for identity in (who("c"), who()):
        gone, stored = holding(identity, 500), holding(identity, 480)
        await table.commit(identity, stored, ttl_seconds=60, mark_seconds=60)
        await table.commit(identity, gone, ttl_seconds=60, mark_seconds=60)
        await table.evict(identity.scope.hex(), gone.id, Reason.EVICTED)
        prompt = PromptTokens(identity.namespace, range(600))
        found = [each for each in await table.find(identity, prompt) if each.handle]
        assert found == [stored]
        assert await table.claim(identity, stored)
        left = await table.find(identity, prompt)
        assert [each.absent for each in left] == [Reason.EVICTED]


async def test_evicted_or_claimed_but_never_both(table: SessionTable) -> None:
    """Of many that claim and evict one holding exactly one gets it; after that nobody."""
    identity = who("c")
    stored = holding(identity, 200)
    await table.commit(identity, stored, ttl_seconds=60, mark_seconds=60)
    claims = [table.claim(identity, stored) for _ in range(50)]
    evictions = [table.evict(identity.scope.hex(), stored.id, Reason.EVICTED) for _ in range(50)]
    calls: list[Any] = [each for pair in zip(claims, evictions, strict=True) for each in pair]
    results = await asyncio.gather(*calls)
    assert sum(bool(result) for result in results) == 1


async def test_a_holding_is_given_out_even_if_its_mark_is_gone(table: SessionTable) -> None:
    """Who took it out must release it: nobody else can any more. No mark comes to be."""
    identity = who("c")
    stored = holding(identity, 200)
    await table.commit(identity, stored, ttl_seconds=60, mark_seconds=60)
    mark = f"kvloop:{{{identity.scope.hex()}}}:h:{stored.id}x"
    assert await table._redis.delete(mark) == 1
    assert await table.evict(identity.scope.hex(), stored.id, Reason.EVICTED) == stored
    assert await table._redis.exists(mark) == 0


async def test_several_are_taken_out_at_once_and_each_says_why(table: SessionTable) -> None:
    """Of different scopes, in one trip; one that was claimed before is nobody's."""
    owners = [who(f"c{number}", model=f"m{number}") for number in range(4)]
    stored = [holding(owner, 200 + number) for number, owner in enumerate(owners)]
    for owner, each in zip(owners, stored, strict=True):
        await table.commit(owner, each, ttl_seconds=60, mark_seconds=90)
    assert await table.claim(owners[1], stored[1])
    found = await table.evict_all(
        [(owner.scope.hex(), each.id) for owner, each in zip(owners, stored, strict=True)],
        Reason.EVICTED,
    )
    assert found == [stored[0], None, *stored[2:]]
    for number in (0, 2, 3):
        prompt = PromptTokens(owners[number].namespace, range(600))
        (mark,) = await table.find(owners[number], prompt)
        assert (mark.handle, mark.absent) == (None, Reason.EVICTED)
        assert mark.fingerprint.token_count == 200 + number
        key = f"kvloop:{{{owners[number].scope.hex()}}}:h:{stored[number].id}x"
        assert 60_000 < await table._redis.pttl(key) <= 90_000


async def test_a_failed_trip_is_told_for_each_that_was_wanted() -> None:
    """Then nobody knows whether they were taken out."""
    table = SessionTable("redis://127.0.0.1:1", timeout_seconds=0.1)
    found = await table.evict_all([("a", "1"), ("b", "2")], Reason.EVICTED)
    assert [type(each) for each in found] == [TableUnavailable, TableUnavailable]
    await table.close()


async def test_what_its_owner_deletes_leaves_no_mark(table: SessionTable) -> None:
    identity = who("c")
    stored = holding(identity, 200)
    await table.commit(identity, stored, ttl_seconds=60, mark_seconds=60)
    assert await table.evict(identity.scope.hex(), stored.id, None) == stored
    assert await table.find(identity, PromptTokens(identity.namespace, range(300))) == []


async def test_what_nothing_could_find_is_not_stored(table: SessionTable) -> None:
    """Without an id and below one span there is no key to find it by: the caller must release."""
    identity = who()
    assert await table.commit(identity, holding(identity, 10), ttl_seconds=60) is False
    assert await table._redis.keys("*") == []


async def test_branches_of_a_conversation_are_all_kept(table: SessionTable) -> None:
    """Parallel turns of one conversation each leave a holding; a late one hides no other."""
    identity = who("c")
    stored = [holding(identity, length) for length in (100, 200, 300)]
    for each in stored:
        await table.commit(identity, each, ttl_seconds=60)
    prompt = PromptTokens(identity.namespace, range(400))
    assert await table.find(identity, prompt) == stored[::-1]
    await table.claim(identity, stored[1])
    assert await table.find(identity, prompt) == [stored[2], stored[0]]


async def test_an_outage_costs_one_timeout_not_every_turn() -> None:
    """After a failure Redis is left alone for a moment, then asked again."""
    now = [0.0]
    table = SessionTable("redis://127.0.0.1:1", timeout_seconds=0.1, clock=lambda: now[0])
    identity = who("c")
    prompt = PromptTokens(identity.namespace, range(10))
    with pytest.raises(TableUnavailable, match="Redis: "):
        await table.find(identity, prompt)
    with pytest.raises(TableUnavailable, match="a moment ago"):
        await table.find(identity, prompt)
    now[0] += 2
    with pytest.raises(TableUnavailable, match="Redis: "):
        await table.find(identity, prompt)
    await table.close()


async def test_the_private_store_is_a_real_server_that_ends() -> None:
    """Started on demand, usable through the same table, gone after stop."""
    store = PrivateStore()
    url = await store.start()
    table = SessionTable(url, timeout_seconds=10)
    assert await table.ping()
    await table.close()
    await store.stop()
    gone = SessionTable(url, timeout_seconds=0.2)
    assert not await gone.ping()
    await gone.close()


_STARTS_A_STORE = """
import asyncio, signal
from proxy.session.private_store import PrivateStore

store = PrivateStore()
print(asyncio.run(store.start()), flush=True)
signal.pause()
"""


async def test_the_private_store_ends_with_a_proxy_that_is_killed() -> None:
    """SIGKILL leaves neither a server nor its files."""
    proxy = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _STARTS_A_STORE), stdout=asyncio.subprocess.PIPE
    )
    assert proxy.stdout is not None
    path = (await proxy.stdout.readline()).decode().strip().removeprefix("unix://")
    reader, writer = await asyncio.open_unix_connection(path)
    proxy.kill()
    async with asyncio.timeout(10):
        assert await proxy.stdout.read() == b""  # nobody else holds what its output goes to
        assert await reader.read() == b""  # the server has closed what was connected to it
        while Path(path).parent.exists():
            await asyncio.sleep(0.01)
        await proxy.wait()
    writer.close()


async def test_a_cancelled_operation_ends_its_task(table: SessionTable) -> None:
    """At whatever moment: redis-py alone loses a part of the cancellations."""
    await table.reuse_is_off()

    async def ask_for_ever() -> None:
        while True:
            await table.reuse_is_off()

    for turns in range(60):
        task = asyncio.create_task(ask_for_ever())
        for _ in range(turns % 12 + 1):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()


@pytest.mark.parametrize("conversation", ["c", None])
async def test_what_another_server_process_wrote_is_void(
    table: SessionTable, conversation: str | None
) -> None:
    """After a failover or a restart from disk a claim may be undone: such records count no more."""
    identity = who(conversation)
    stored = holding(identity, 200)
    prompt = PromptTokens(identity.namespace, range(300))
    await table.commit(identity, stored, ttl_seconds=60)
    key = await anext(table._redis.scan_iter(match=f"kvloop:*:h:{stored.id}"))
    value = await table._redis.get(key)
    await table._redis.set(key, b"f" * 40 + value[40:])
    assert not await table.claim(identity, stored)
    assert await table.find(identity, prompt) == []
    await table._redis.set(key, value)
    assert await table.claim(identity, stored)
