"""[io] The session table: holdings in Redis (or Valkey), shared by all proxies.

Keys, all under ``kvloop:{<scope>}:`` so that one scope stays in one cluster slot:

``h:<id>``            one holding; its existence is the right to claim it
``c:<conversation>``  ids of a named conversation's holdings, newest first
``a:<digest>``        ids of the holdings whose tokens begin with this prefix, newest first
``h:<id>x``           the holding's mark: stays some time after it, and says what became of it

Every key expires, a holding's with the blocks it speaks of. The races each step closes are told
beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from proxy.errors import TableUnavailable
from proxy.session.fingerprint import DIGEST_BYTES, PromptTokens, anchors
from proxy.session.holding import MARK, Holding, absent_field, decode, encode, mark_of
from proxy.session.identity import Identity
from proxy.session.redis_link import RedisLink
from proxy.turn.reasons import Reason

T = TypeVar("T")

REUSE_KEY = "kvloop:reuse"
"""Fleet-wide switch: the value ``off`` stops reuse, anything else or no key allows it."""

WORKERS_KEY = "kvloop:workers"
"""Fleet-wide: workers that operators added, drain or removed."""

_KEPT_PER_CONVERSATION = 16
"""Parallel branches of one conversation worth remembering, each with its mark; fewer would forget
sub-agents."""
_KEPT_PER_ANCHOR = 256
"""Conversations found by the same prefix. A shared system prompt with short questions gives many,
and what falls off the list is lost to its owner while decode still keeps it. 32 bytes each."""
_PAUSE_AFTER_FAILURE = 1.0
"""Seconds during which Redis is not asked again, so that an outage costs one turn the timeout and
not every turn."""

_RUN_ID_LENGTH = 40

# Every record begins with the id of the server process that wrote it, and counts only there. A
# replica that takes over, or a server that restarts from disk, may lack the last second: a claim
# of that second is undone with it, and a handle that has been read would be found again. A second
# read answers 200 with whatever lies in the freed blocks, so what was written before the change is
# void; its blocks are left to their lease, because a release could meet a read that goes on.
# Where INFO is forbidden this protection is off.
_HERE = """
local info = redis.pcall('INFO', 'server')
local here = type(info) == 'string' and string.match(info, 'run_id:(%x+)')
if not here or #here ~= 40 then here = string.rep('0', 40) end
"""

# Reads, claims nothing: several turns may see one holding, and only one will claim it. Ids whose
# holding is gone (claimed or expired) are dropped on the way, or a busy list would fill with them.
_FIND_BY_CONVERSATION = (
    _HERE
    + """
local found = {}
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  local record = redis.call('GET', ARGV[1] .. id)
  if record and string.sub(record, 1, 40) == here then
    found[#found + 1] = id
    found[#found + 1] = string.sub(record, 41)
  else
    redis.call('LREM', KEYS[1], 0, id)
  end
end
return found
"""
)

# The prompt's digests come as one argument: a key for each of thousands of spans would cost the
# client more than the search costs the server. Most of them exist nowhere: they are asked for a
# hundred at once, which is a quarter of the price. All keys are in the scope's slot, as KEYS[1] is.
# Lists go newest first; of the longest shared prefix the newest live holding is taken, and a mark
# only where there is no holding at all.
_FIND_BY_PREFIX = (
    _HERE
    + """
local prefix, size, digests = KEYS[1], tonumber(ARGV[2]), ARGV[3]
local mark = {}
local function look(key)
  for _, id in ipairs(redis.call('LRANGE', key, 0, -1)) do
    local record = redis.call('GET', ARGV[1] .. id)
    if record and string.sub(record, 1, 40) == here then
      if string.sub(id, -1) ~= ARGV[4] then return {id, string.sub(record, 41)} end
      if not mark[1] then mark = {id, string.sub(record, 41)} end
    end
  end
end
local last = #digests
while last > 0 do
  local keys, many = {}, 0
  while last > 0 and many < 100 do
    many = many + 1
    keys[many] = prefix .. string.sub(digests, last - size + 1, last)
    last = last - size
  end
  if redis.call('EXISTS', unpack(keys)) > 0 then
    for _, key in ipairs(keys) do
      local found = look(key)
      if found then return found end
    end
  end
end
return mark
"""
)

# One script, so that no reader sees an index entry without its holding or the reverse.
# The mark is indexed behind its holding and under the longest prefix only: under a shorter, shared
# one it would stand before the holdings of others.
_COMMIT = (
    _HERE
    + """
local ttl, marked = tonumber(ARGV[2]), tonumber(ARGV[6])
redis.call('SET', ARGV[1], here .. ARGV[4], 'PX', ttl)
if marked > 0 then redis.call('SET', ARGV[1] .. ARGV[7], here .. ARGV[8], 'PX', marked) end
for position, key in ipairs(KEYS) do
  local keep = ttl
  if marked > 0 and position == 1 then
    redis.call('LPUSH', key, ARGV[3] .. ARGV[7])
    keep = math.max(ttl, marked)
  end
  redis.call('LPUSH', key, ARGV[3])
  redis.call('LTRIM', key, 0, tonumber(ARGV[5]) - 1)
  if redis.call('PTTL', key) < keep then redis.call('PEXPIRE', key, keep) end
end
return 1
"""
)

# DEL answers how many keys it removed: of all turns and proxies that saw the holding one gets 1.
_CLAIM = (
    _HERE
    + """
if redis.call('GETRANGE', KEYS[1], 0, 39) ~= here then return 0 end
redis.call('UNLINK', KEYS[1] .. ARGV[1])
return redis.call('DEL', KEYS[1])
"""
)

# As exclusive as the claim: of all that evict or claim a holding one gets it. Its mark then says
# why it is gone, in the field with which a record begins; without a reason the mark goes too.
_EVICT = (
    _HERE
    + """
local mark = KEYS[1] .. ARGV[1]
if ARGV[2] == '' then redis.call('UNLINK', mark) end
if redis.call('GETRANGE', KEYS[1], 0, 39) ~= here then return false end
if ARGV[2] ~= '' and redis.call('GETRANGE', mark, 0, 39) == here then
  redis.call('SETRANGE', mark, 40, ARGV[2])
end
return string.sub(redis.call('GETDEL', KEYS[1]), 41)
"""
)


@dataclass(frozen=True, slots=True)
class TableSize:
    """Keys in the database, and bytes that the whole server uses."""

    keys: int
    memory_bytes: int


class SessionTable:
    """Find, claim, commit. Every method raises ``TableUnavailable`` when Redis fails or is slow."""

    def __init__(
        self, url: str, *, timeout_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis: Any = redis_asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            # A retry would spend the time in which the turn could have been prefilled.
            retry=Retry(NoBackoff(), 0),
            max_connections=4096,
        )
        self._link = RedisLink(url, timeout_seconds=timeout_seconds)
        self._clock = clock
        self._paused_until = 0.0
        self._find_by_conversation = self._link.register_script(_FIND_BY_CONVERSATION)
        self._find_by_prefix = self._link.register_script(_FIND_BY_PREFIX)
        self._commit = self._link.register_script(_COMMIT)
        self._claim = self._link.register_script(_CLAIM)
        self._evict = self._link.register_script(_EVICT)

    async def find(self, identity: Identity, prompt: PromptTokens) -> list[Holding]:
        """Holdings that may serve this prompt, newest first. Nothing is claimed yet."""
        scope = _scope_prefix(identity)
        if identity.conversation:
            reply = await self._ask(
                lambda: self._find_by_conversation(
                    keys=[scope + b"c:" + identity.conversation.hex().encode()],
                    args=[scope + b"h:"],
                )
            )
        else:
            digests = prompt.fingerprint.spans
            if not digests:
                return []
            reply = await self._ask(
                lambda: self._find_by_prefix(
                    keys=[scope + b"a:"], args=[scope + b"h:", DIGEST_BYTES, digests, MARK]
                )
            )
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return [found for id, record in pairs if (found := decode(id.decode(), record))]

    async def claim(self, identity: Identity, holding: Holding) -> bool:
        """Take the holding out of the table. True for exactly one caller, ever.

        A handle is good for a single read on decode: it is never put back.
        """
        key = _scope_prefix(identity) + b"h:" + holding.id.encode()
        # The mark goes too: the turn that it waited for has come.
        return bool(await self._ask(lambda: self._claim(keys=[key], args=[MARK])))

    async def evict(self, scope: str, id: str, why: Reason | None) -> Holding | None:
        """Take a holding out because nobody shall use it; None if somebody has claimed it.

        ``scope`` is the identity's in hex. The holding's mark, if it has one, then says ``why``;
        with None it goes too.
        """
        (found,) = await self.evict_all([(scope, id)], why)
        if isinstance(found, TableUnavailable):
            raise found
        return found

    async def evict_all(
        self, wanted: Sequence[tuple[str, str]], why: Reason | None
    ) -> list[Holding | TableUnavailable | None]:
        """Several holdings of any scopes, (scope, id), in one trip; each answer, or its failure."""
        reason = absent_field(why) if why is not None else b""

        async def ask(scope: str, id: str) -> bytes | None:
            key = b"kvloop:{" + scope.encode() + b"}:h:" + id.encode()
            record: bytes | None = await self._ask(
                lambda: self._evict(keys=[key], args=[MARK, reason])
            )
            return record

        answers = await asyncio.gather(
            *(ask(scope, id) for scope, id in wanted), return_exceptions=True
        )
        found: list[Holding | TableUnavailable | None] = []
        for (_, id), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, TableUnavailable):
                found.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(decode(id, answer) if answer else None)
        return found

    async def commit(
        self,
        identity: Identity,
        holding: Holding,
        *,
        ttl_seconds: float,
        mark_seconds: float = 0.0,
    ) -> bool:
        """Make a holding findable until its blocks expire, and its mark for ``mark_seconds``.

        False when nothing could ever find it: no conversation was named and the tokens do not fill
        one span. The caller then releases the blocks.
        """
        scope = _scope_prefix(identity)
        if identity.conversation:
            keys = [scope + b"c:" + identity.conversation.hex().encode()]
            limit = _KEPT_PER_CONVERSATION
        else:
            keys = [scope + b"a:" + digest for digest in anchors(holding.fingerprint)]
            limit = _KEPT_PER_ANCHOR
        if not keys:
            return False
        await self._ask(
            lambda: self._commit(
                keys=keys,
                args=[
                    scope + b"h:" + holding.id.encode(),
                    max(1, int(ttl_seconds * 1000)),
                    holding.id,
                    encode(holding),
                    limit,
                    int(mark_seconds * 1000),
                    MARK,
                    encode(mark_of(holding, Reason.LEASE_EXPIRED)),
                ],
            )
        )
        return True

    async def reuse_is_off(self) -> bool:
        """Has somebody switched reuse off for all proxies? (``kvloop reuse off``)"""
        return bool(await self._guard(lambda: self._redis.get(REUSE_KEY)) == b"off")

    async def size(self) -> TableSize:
        """How much there is. A server that will not say how much memory it uses shows 0."""
        keys = int(await self._guard(self._redis.dbsize))
        try:
            memory = (await self._redis.info("memory")).get("used_memory", 0)
        except (RedisError, OSError):
            memory = 0  # hosted servers may forbid INFO; that is no reason to pause the table
        return TableSize(keys, int(memory))

    async def set_reuse(self, on: bool) -> None:
        """Write the fleet-wide switch."""
        if on:
            await self._guard(lambda: self._redis.delete(REUSE_KEY))
        else:
            await self._guard(lambda: self._redis.set(REUSE_KEY, "off"))

    async def worker_changes(self) -> dict[str, bytes]:
        """What operators want of workers, by worker name (``workers/roster.py``)."""
        stored = await self._guard(lambda: self._redis.hgetall(WORKERS_KEY))
        return {name.decode(): record for name, record in stored.items()}

    async def set_worker_change(self, name: str, record: bytes | None) -> None:
        """None: nothing special is wanted of it any more."""
        if record is None:
            await self._guard(lambda: self._redis.hdel(WORKERS_KEY, name))
        else:
            await self._guard(lambda: self._redis.hset(WORKERS_KEY, name, record))

    async def run(self, script: Any, *, keys: list[str], args: list[Any]) -> Any:
        """Run a script that ``script()`` made, under the same rules as everything here."""
        return await self._ask(lambda: script(keys=keys, args=args))

    def script(self, text: str) -> Any:
        """Register a Lua script."""
        return self._link.register_script(text)

    async def ping(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    async def close(self) -> None:
        await self._link.close()
        await self._redis.aclose()

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call through the link, which may be cancelled at any moment."""
        self._check_pause()
        try:
            return await call()
        except (RedisError, OSError, TimeoutError) as error:
            raise self._failed(error) from error

    async def _guard(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call through redis-py.

        redis-py 8.1 with a socket timeout may swallow a cancellation (measured: one of three). Then
        the turn of a client that left, or a poll that is to stop, goes on for ever. Shielded, the
        cancellation is ours and the command just ends.
        """
        self._check_pause()
        asking = asyncio.ensure_future(call())
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_forget)
            raise
        except (RedisError, OSError, TimeoutError) as error:
            raise self._failed(error) from error

    def _check_pause(self) -> None:
        if self._clock() < self._paused_until:
            raise TableUnavailable("Redis failed a moment ago", certain=True)

    def _failed(self, error: Exception) -> TableUnavailable:
        self._paused_until = self._clock() + _PAUSE_AFTER_FAILURE
        return TableUnavailable(f"Redis: {type(error).__name__}", certain=_never_arrived(error))


def _forget(asking: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; its failure is nobody's either."""
    if not asking.cancelled():
        asking.exception()


def _never_arrived(error: BaseException) -> bool:
    """Is it certain that the command had no effect? Redis refused it, or nobody listens there.

    After a timeout or a broken connection it may still be executed.
    """
    return isinstance(error, ResponseError) or isinstance(
        error.__context__, (ConnectionRefusedError, FileNotFoundError)
    )


def stored_record(value: bytes) -> bytes:
    """The record in the value of an ``h:`` key, for ``holding.decode``."""
    return value[_RUN_ID_LENGTH:]


def new_holding_id() -> str:
    return urandom(16).hex()


def _scope_prefix(identity: Identity) -> bytes:
    return b"kvloop:{" + identity.scope.hex().encode() + b"}:"
