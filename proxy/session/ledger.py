"""[io] The ledgers: for each decode worker which holdings pin how many of its blocks, and how long.

All proxies on one Redis write the same ledger, so the budget holds for them together. Keys, under
``kvloop:{d:<worker>}:<epoch>:`` because a restarted worker holds nothing of the old process:

``entries``    hash: id -> blocks, deadline, start, and what ``Entry.encode`` adds; under ``#`` the
               sum of the blocks
``deadlines``  sorted set: id by deadline
``early``      sorted set: ids that were removed before they were entered, by time, for a minute

A ledger follows the pins, not the session table: an entry goes when the blocks do (pulled,
released) or when its deadline has passed, whoever has died meanwhile. So a crash can leave an entry
too many until its lease ends, as the crash leaves the pin itself, and never one for ever. Times are
Redis' own: proxies need not agree on one.

The holdings live in the slots of their scopes and no script touches both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.retention import Entry
from proxy.session.table import SessionTable

SAMPLE = 64
"""Entries among which the least valuable are looked for. A ledger up to this size is compared
whole; of a larger one the victim is, with a chance of 0.96, among the worst twentieth."""
_MOST_OVERDUE = 1000
"""Overdue entries dropped at once: more would keep Redis from other work."""
_LINGER_MS = 60_000
"""An idle ledger goes this long after its last deadline."""

# ARGV: budget, most overdue, sample size, expiry after a repair, lingering; then, in their order,
# "add", id, blocks, milliseconds, record or "remove", id. The reply: sum, time, overdue and removed
# entries, and a sample when the sum is above the budget.
# A server short of memory may drop either key by itself (the private one does): then both start
# anew from what is left, or blocks would be counted that no deadline could ever free.
_UPDATE = """
local entries, deadlines, early = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone = {}

if redis.call('ZCARD', deadlines) ~= math.max(0, redis.call('HLEN', entries) - 1) then
  redis.call('DEL', deadlines)
  redis.call('HDEL', entries, '#')
  local sum = 0
  local all = redis.call('HGETALL', entries)
  for i = 1, #all, 2 do
    local blocks, deadline = string.match(all[i + 1], '^(%d+) (%d+)')
    redis.call('ZADD', deadlines, deadline, all[i])
    sum = sum + blocks
  end
  if #all > 0 then
    redis.call('HSET', entries, '#', sum)
    redis.call('PEXPIRE', entries, ARGV[4])
    redis.call('PEXPIRE', deadlines, ARGV[4])
  end
end

local function take(id, why)
  local record = redis.call('HGET', entries, id)
  if not record then return false end
  redis.call('HDEL', entries, id)
  redis.call('ZREM', deadlines, id)
  redis.call('HINCRBY', entries, '#', -tonumber(string.match(record, '^%d+')))
  gone[#gone + 1] = why
  gone[#gone + 1] = id
  gone[#gone + 1] = record
  return true
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, ARGV[2])) do
  take(id, 'expired')
end

local longest = 0
local position = 6
while position <= #ARGV do
  local id = ARGV[position + 1]
  local known = take(id, 'removed')
  if ARGV[position] == 'remove' then
    if not known then redis.call('ZADD', early, now, id) end
    position = position + 2
  elseif redis.call('ZREM', early, id) == 1 then
    position = position + 5
  else
    local blocks, left, rest = ARGV[position + 2], ARGV[position + 3], ARGV[position + 4]
    local deadline = now + left
    local record = blocks .. ' ' .. string.format('%.0f %.0f', deadline, now) .. ' ' .. rest
    redis.call('HSET', entries, id, record)
    redis.call('HINCRBY', entries, '#', blocks)
    redis.call('ZADD', deadlines, deadline, id)
    longest = math.max(longest, left)
    position = position + 5
  end
end
if redis.call('EXISTS', early) == 1 then
  redis.call('ZREMRANGEBYSCORE', early, '-inf', now - ARGV[5])
  redis.call('PEXPIRE', early, ARGV[5])
end
if longest > 0 then
  local linger = string.format('%.0f', longest + ARGV[5])
  for _, key in ipairs({entries, deadlines}) do
    if redis.call('PTTL', key) < tonumber(linger) then redis.call('PEXPIRE', key, linger) end
  end
end

local sum = tonumber(redis.call('HGET', entries, '#') or 0)
if redis.call('HLEN', entries) <= 1 then redis.call('DEL', entries) end
local sample = {}
local budget = tonumber(ARGV[1])
if budget >= 0 and sum > budget then
  sample = redis.call('HRANDFIELD', entries, ARGV[3], 'WITHVALUES')
end
return {sum, string.format('%.0f', now), gone, sample}
"""

_ALL = "return {redis.call('TIME'), redis.call('HGETALL', KEYS[1])}"

_LONGEST_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Place:
    """One decode worker's process."""

    worker: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Page:
    """A ledger after an update. ``now``: Redis' Unix time in seconds.

    ``candidates``: entries to choose from if ``blocks`` is above the budget, else none.
    """

    blocks: int
    now: float
    expired: list[Entry]
    removed: list[Entry]
    candidates: list[Entry]


@dataclass(slots=True)
class _Call:
    """One caller's part of a batch."""

    arguments: list[Any]
    budget: int | None
    answer: asyncio.Future[Page]


class Ledger:
    """Reads and writes all ledgers. Raises ``TableUnavailable`` as the session table does.

    Of each ledger one update is under way at a time, and what comes meanwhile goes along with the
    next: so a busy proxy makes few calls, and its own arrive in the order in which they were made.
    """

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self._update = table.script(_UPDATE)
        self._all = table.script(_ALL)
        self._waiting: dict[Place, list[_Call]] = {}
        self._senders: dict[Place, asyncio.Task[None]] = {}

    async def update(
        self,
        place: Place,
        *,
        add: Entry | None = None,
        seconds: float = 0.0,
        remove: Sequence[str] = (),
        budget: int | None = None,
    ) -> Page:
        """Drop what is overdue and ``remove``, then ``add`` an entry for ``seconds``; what is left.

        An entry with the id of an older one replaces it. What a batch dropped is told to one of
        its callers only.
        """
        arguments: list[Any] = [word for id in remove for word in ("remove", id)]
        if add is not None:
            arguments += ["add", add.id, add.blocks, int(seconds * 1000), add.encode()]
        call = _Call(arguments, budget, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(place, []).append(call)
        if place not in self._senders:
            self._senders[place] = asyncio.create_task(self._send(place), name="ledger")
        return await call.answer

    async def _send(self, place: Place) -> None:
        try:
            while batch := self._waiting.pop(place, None):
                try:
                    page = await self._sent(place, batch)
                except Exception as error:
                    for call in batch:
                        if not call.answer.done():
                            call.answer.set_exception(error)
                    continue
                for call in batch:
                    if not call.answer.done():
                        call.answer.set_result(page)
                        page = replace(page, expired=[], removed=[])
        finally:
            del self._senders[place]

    async def _sent(self, place: Place, batch: list[_Call]) -> Page:
        budgets = [call.budget for call in batch if call.budget is not None]
        reply = await self._table.run(
            self._update,
            keys=_keys(place),
            args=[
                budgets[-1] if budgets else -1,
                _MOST_OVERDUE,
                SAMPLE + 1,  # the sum's field may be among them
                _LONGEST_MS,
                _LINGER_MS,
                *(word for call in batch for word in call.arguments),
            ],
        )
        blocks, now, gone, sample = reply
        expired: list[Entry] = []
        removed: list[Entry] = []
        for why, id, record in zip(gone[::3], gone[1::3], gone[2::3], strict=True):
            entry = Entry.decode(id.decode(), record)
            (expired if why == b"expired" else removed).append(entry)
        return Page(
            blocks=blocks,
            now=int(now) / 1000,
            expired=expired,
            removed=removed,
            candidates=_entries(sample),
        )

    async def entries(self, place: Place) -> tuple[float, list[Entry]]:
        """Redis' Unix time, and everything in a ledger, reservations included."""
        time, flat = await self._table.run(self._all, keys=_keys(place), args=[])
        return int(time[0]) + int(time[1]) / 1e6, _entries(flat)


def _entries(flat: list[bytes]) -> list[Entry]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return [Entry.decode(id.decode(), record) for id, record in pairs if id != b"#"]


def _keys(place: Place) -> list[str]:
    prefix = f"kvloop:{{d:{place.worker}}}:{place.epoch}:"
    return [prefix + "entries", prefix + "deadlines", prefix + "early"]
