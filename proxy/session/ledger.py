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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from proxy.retention import Entry
from proxy.session.table import SessionTable

SAMPLE = 64
"""Fewest entries among which the least valuable are looked for: a ledger up to this size is
compared whole, and of a larger one a single victim is, with a chance of 0.96, among the worst
twentieth."""
PER_VICTIM = 8
"""Entries compared for each one that must go, where several must: more costs every proxy time in
which it answers nobody, fewer gives up better ones."""
_MOST_SAMPLED = 1000
_MOST_OVERDUE = 1000
"""Overdue entries dropped at once: more would keep Redis from other work."""
_LINGER_MS = 60_000
"""An idle ledger goes this long after its last deadline."""

# ARGV: budget, sum to come down to, most overdue, smallest and largest sample, entries for each
# victim, expiry after a repair, lingering; then, in their order, "add", id, blocks, milliseconds,
# record or "remove", id or "take", id (removed as long as the sum is above what to come down to:
# of several proxies that found the same excess the first one takes it). The reply: sum, time,
# overdue, removed and taken entries, and a sample when the sum is above the budget.
# A server short of memory may drop either key by itself (the private one does): then both start
# anew from what is left, or blocks would be counted that no deadline could ever free.
_UPDATE = """
local entries, deadlines, early = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone = {}
local sum = tonumber(redis.call('HGET', entries, '#') or 0)
local before = sum

if redis.call('ZCARD', deadlines) ~= math.max(0, redis.call('HLEN', entries) - 1) then
  redis.call('DEL', deadlines)
  redis.call('HDEL', entries, '#')
  sum, before = 0, -1
  local all = redis.call('HGETALL', entries)
  for i = 1, #all, 2 do
    local blocks, deadline = string.match(all[i + 1], '^(%d+) (%d+)')
    redis.call('ZADD', deadlines, deadline, all[i])
    sum = sum + blocks
  end
  if #all > 0 then
    redis.call('HSET', entries, '#', sum)
    redis.call('PEXPIRE', entries, ARGV[7])
    redis.call('PEXPIRE', deadlines, ARGV[7])
  end
end

local function take(id, why)
  local record = redis.call('HGET', entries, id)
  if not record then return false end
  redis.call('HDEL', entries, id)
  redis.call('ZREM', deadlines, id)
  sum = sum - tonumber(string.match(record, '^%d+'))
  gone[#gone + 1] = why
  gone[#gone + 1] = id
  gone[#gone + 1] = record
  return true
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, ARGV[3])) do
  take(id, 'expired')
end

local longest = 0
local enough = tonumber(ARGV[2])
local known_early = redis.call('EXISTS', early) == 1
local position = 9
while position <= #ARGV do
  local what, id = ARGV[position], ARGV[position + 1]
  if what == 'take' then
    if sum > enough then take(id, 'taken') end
    position = position + 2
  elseif what == 'remove' then
    if not take(id, 'removed') then
      redis.call('ZADD', early, now, id)
      known_early = true
    end
    position = position + 2
  else
    take(id, 'removed')
    if not known_early or redis.call('ZREM', early, id) == 0 then
      local blocks, left, rest = ARGV[position + 2], ARGV[position + 3], ARGV[position + 4]
      local deadline = now + left
      local record = blocks .. ' ' .. string.format('%.0f %.0f', deadline, now) .. ' ' .. rest
      redis.call('HSET', entries, id, record)
      redis.call('ZADD', deadlines, deadline, id)
      sum = sum + blocks
      longest = math.max(longest, left)
    end
    position = position + 5
  end
end
if known_early then
  redis.call('ZREMRANGEBYSCORE', early, '-inf', now - ARGV[8])
  redis.call('PEXPIRE', early, ARGV[8])
end
local size = redis.call('ZCARD', deadlines)
if size == 0 then
  redis.call('DEL', entries)
elseif sum ~= before then
  redis.call('HSET', entries, '#', sum)
end
if longest > 0 then
  local linger = string.format('%.0f', longest + ARGV[8])
  for _, key in ipairs({entries, deadlines}) do
    if redis.call('PTTL', key) < tonumber(linger) then redis.call('PEXPIRE', key, linger) end
  end
end

local sample = {}
local budget = tonumber(ARGV[1])
if budget >= 0 and sum > budget then
  local victims = math.ceil((sum - enough) * size / sum)
  local wanted = math.min(math.max(victims * ARGV[6], ARGV[4]), ARGV[5])
  sample = redis.call('HRANDFIELD', entries, wanted + 1, 'WITHVALUES')
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
    taken: list[Entry]
    candidates: list[Entry]


class Ledger:
    """Reads and writes all ledgers. Raises ``TableUnavailable`` as the session table does."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self._update = table.script(_UPDATE)
        self._all = table.script(_ALL)

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
        """Drop what is overdue and ``remove``, then ``add`` entries for so many seconds each, then
        ``take`` entries as long as their sum is above ``enough`` blocks; what is left.

        An entry with the id of an older one replaces it. An id that is removed before it was added
        is not added within the next minute.
        """
        changes: list[Any] = []
        for id in remove:
            changes += ("remove", id)
        for entry, seconds in add:
            changes += ("add", entry.id, entry.blocks, int(seconds * 1000), entry.encode())
        for id in take:
            changes += ("take", id)
        reply = await self._table.run(
            self._update,
            keys=_keys(place),
            args=[
                -1 if budget is None else budget,
                enough,
                _MOST_OVERDUE,
                SAMPLE,
                _MOST_SAMPLED,
                PER_VICTIM,
                _LONGEST_MS,
                _LINGER_MS,
                *changes,
            ],
        )
        blocks, now, gone, sample = reply
        told: dict[bytes, list[Entry]] = {b"expired": [], b"removed": [], b"taken": []}
        for why, id, record in zip(gone[::3], gone[1::3], gone[2::3], strict=True):
            told[why].append(Entry.decode(id.decode(), record))
        return Page(
            blocks=blocks,
            now=int(now) / 1000,
            expired=told[b"expired"],
            removed=told[b"removed"],
            taken=told[b"taken"],
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
