"""[io] The session table: holdings in Redis (or Valkey), shared by all proxies.

Keys, all under ``kvloop:{<scope>}:`` so that one scope stays in one cluster slot:

``h:<id>``            one holding; its existence is the right to claim it
``c:<conversation>``  ids of a named conversation's holdings, newest first
``a:<digest>``        ids of the holdings whose tokens begin with this prefix, newest first

Every key expires with the blocks it speaks of. The races each step closes are told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import redis.asyncio as redis_asyncio
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from proxy.errors import TableUnavailable
from proxy.session.fingerprint import DIGEST_BYTES, PromptTokens, anchors
from proxy.session.holding import Holding, decode, encode
from proxy.session.identity import Identity

T = TypeVar("T")

REUSE_KEY = "kvloop:reuse"
"""Fleet-wide switch: the value ``off`` stops reuse, anything else or no key allows it."""

_KEPT_PER_CONVERSATION = 8
"""Parallel branches of one conversation worth remembering; fewer would forget sub-agents."""
_KEPT_PER_ANCHOR = 256
"""Conversations found by the same prefix. A shared system prompt with short questions gives many,
and what falls off the list is lost to its owner while decode still keeps it. 32 bytes each."""
_PAUSE_AFTER_FAILURE = 1.0
"""Seconds during which Redis is not asked again, so that an outage costs one turn the timeout and
not every turn."""

# Reads, claims nothing: several turns may see one holding, and only one will claim it. Ids whose
# holding is gone (claimed or expired) are dropped on the way, or a busy list would fill with them.
_FIND_BY_CONVERSATION = """
local found = {}
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  local record = redis.call('GET', ARGV[1] .. id)
  if record then
    found[#found + 1] = id
    found[#found + 1] = record
  else
    redis.call('LREM', KEYS[1], 0, id)
  end
end
return found
"""

# The prompt's digests come as one argument: a key for each of thousands of spans would cost the
# client more than the search costs the server. All keys are in the scope's slot, as KEYS[1] is.
# Lists go newest first; of the longest shared prefix the newest live holding is taken.
_FIND_BY_PREFIX = """
local prefix, size, digests = KEYS[1], tonumber(ARGV[2]), ARGV[3]
for last = #digests, size, -size do
  local key = prefix .. string.sub(digests, last - size + 1, last)
  if redis.call('EXISTS', key) == 1 then
    for _, id in ipairs(redis.call('LRANGE', key, 0, -1)) do
      local record = redis.call('GET', ARGV[1] .. id)
      if record then return {id, record} end
    end
  end
end
return {}
"""

# One script, so that no reader sees an index entry without its holding or the reverse.
_COMMIT = """
local ttl = tonumber(ARGV[2])
redis.call('SET', ARGV[1], ARGV[4], 'PX', ttl)
for position, key in ipairs(KEYS) do
  redis.call('LPUSH', key, ARGV[3])
  redis.call('LTRIM', key, 0, tonumber(ARGV[4 + position]) - 1)
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
end
return 1
"""


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
        self._clock = clock
        self._paused_until = 0.0
        self._find_by_conversation = self._redis.register_script(_FIND_BY_CONVERSATION)
        self._find_by_prefix = self._redis.register_script(_FIND_BY_PREFIX)
        self._commit = self._redis.register_script(_COMMIT)

    async def find(self, identity: Identity, prompt: PromptTokens) -> list[Holding]:
        """Holdings that may serve this prompt, newest first. Nothing is claimed yet."""
        scope = _scope_prefix(identity)
        if identity.conversation:
            reply = await self._guard(
                lambda: self._find_by_conversation(
                    keys=[scope + b"c:" + identity.conversation.hex().encode()],
                    args=[scope + b"h:"],
                )
            )
        else:
            digests = prompt.fingerprint.spans
            if not digests:
                return []
            reply = await self._guard(
                lambda: self._find_by_prefix(
                    keys=[scope + b"a:"], args=[scope + b"h:", DIGEST_BYTES, digests]
                )
            )
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return [found for id, record in pairs if (found := decode(id.decode(), record))]

    async def claim(self, identity: Identity, holding: Holding) -> bool:
        """Take the holding out of the table. True for exactly one caller, ever.

        DEL answers how many keys it removed, so of all turns and proxies that saw the holding one
        gets 1. A handle is good for a single read on decode: it is never put back.
        """
        key = _scope_prefix(identity) + b"h:" + holding.id.encode()
        return bool(await self._guard(lambda: self._redis.delete(key)))

    async def commit(self, identity: Identity, holding: Holding, *, ttl_seconds: float) -> bool:
        """Make a holding findable until its blocks expire.

        False when nothing could ever find it: no conversation was named and the tokens do not fill
        one span. The caller then releases the blocks.
        """
        scope = _scope_prefix(identity)
        if identity.conversation:
            keys = [scope + b"c:" + identity.conversation.hex().encode()]
            limits = [_KEPT_PER_CONVERSATION]
        else:
            keys = [scope + b"a:" + digest for digest in anchors(holding.fingerprint)]
            limits = [_KEPT_PER_ANCHOR] * len(keys)
        if not keys:
            return False
        await self._guard(
            lambda: self._commit(
                keys=keys,
                args=[
                    scope + b"h:" + holding.id.encode(),
                    max(1, int(ttl_seconds * 1000)),
                    holding.id,
                    encode(holding),
                    *limits,
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

    async def ping(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    async def close(self) -> None:
        await self._redis.aclose()

    async def _guard(self, call: Callable[[], Awaitable[T]]) -> T:
        if self._clock() < self._paused_until:
            raise TableUnavailable("Redis failed a moment ago", certain=True)
        try:
            return await call()
        except (RedisError, OSError, TimeoutError) as error:
            self._paused_until = self._clock() + _PAUSE_AFTER_FAILURE
            raise TableUnavailable(
                f"Redis: {type(error).__name__}", certain=_never_arrived(error)
            ) from error


def _never_arrived(error: BaseException) -> bool:
    """Is it certain that the command had no effect? Redis refused it, or nobody listens there.

    After a timeout or a broken connection it may still be executed.
    """
    return isinstance(error, ResponseError) or isinstance(
        error.__context__, (ConnectionRefusedError, FileNotFoundError)
    )


def new_holding_id() -> str:
    return uuid4().hex


def _scope_prefix(identity: Identity) -> bytes:
    return b"kvloop:{" + identity.scope.hex().encode() + b"}:"
