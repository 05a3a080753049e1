"""[pure] Headers and body -> who is talking.

Precedence, first found wins: body ``conversation_id`` (what vLLM's multi-turn benchmark sends),
header ``X-Conversation-ID``, header ``X-Session-ID``: each names one conversation. Body
``prompt_cache_key`` names a group of prompts that share prefixes (its meaning in OpenAI's API), so
it narrows the search by token prefix instead of naming a conversation. With none of these the
token prefix alone finds the session. The client's address is never used.

Ids are hashed before they are stored or logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

CONVERSATION_HEADERS = (b"x-conversation-id", b"x-session-id")
BY_PREFIX = "by-prefix"
"""Label of a conversation that the client did not name."""
MAX_ID_LENGTH = 512
"""Characters. Longer ids are refused: nobody types them, and they would sit in every log line."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. ``tenant`` is empty when no API keys are configured."""

    tenant: str = ""


NOBODY = Caller()
"""The caller of a proxy without API keys."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Under what a turn's session is looked up.

    ``scope`` (16 bytes) separates what must never share KV: tenant, model or adapter, cache salt.
    ``namespace`` seeds the token digests. ``conversation`` (16 bytes) is empty when the client
    named none. ``tenant`` (16 bytes) says whose the session is.
    """

    scope: bytes
    namespace: bytes
    conversation: bytes
    tenant: bytes = b""

    @property
    def label(self) -> str:
        """For logs: tells conversations apart, names nobody."""
        return self.conversation.hex()[:12] if self.conversation else BY_PREFIX


class IdentityError(ValueError):
    """An id of the wrong type or length; ``field`` names where it was found."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def identify(
    body: Mapping[str, Any], headers: Mapping[bytes, bytes], *, tenant: str = ""
) -> Identity:
    """Read the ids of a request. Raises ``IdentityError``.

    ``headers`` has lower-case names, as ASGI delivers them.
    """
    conversation = _body_id(body, "conversation_id")
    if conversation is None:
        for name in CONVERSATION_HEADERS:
            value = headers.get(name)
            if value:
                conversation = _checked(name.decode(), value.decode("latin-1"))
                break
    return identity_of(
        str(body.get("model", "")),
        tenant=tenant,
        cache_salt=str(body.get("cache_salt") or ""),
        conversation=conversation,
        cache_key=_body_id(body, "prompt_cache_key") if conversation is None else None,
    )


def identity_of(
    model: str,
    *,
    tenant: str = "",
    cache_salt: str = "",
    conversation: str | None = None,
    cache_key: str | None = None,
) -> Identity:
    """The identity of these ids."""
    names = model, tenant, cache_salt, cache_key or ""
    short = sum(map(len, names)) <= MAX_ID_LENGTH
    scope, namespace = _remembered_scope(*names) if short else _scope(*names)
    return Identity(
        tenant=tenant_digest(tenant),
        scope=scope,
        namespace=namespace,
        conversation=_digest(b"conversation", scope.hex(), conversation) if conversation else b"",
    )


def _scope(model: str, tenant: str, cache_salt: str, cache_key: str) -> tuple[bytes, bytes]:
    """Scope and namespace."""
    scope = _digest(b"scope", tenant, model, cache_salt)
    return scope, _digest(b"namespace", scope.hex(), cache_key)


_remembered_scope = lru_cache(maxsize=1024)(_scope)
"""Most requests name the same few; long names are not kept."""


@lru_cache(maxsize=1024)
def tenant_digest(tenant: str) -> bytes:
    """How a tenant appears in stored records (16 bytes)."""
    return _digest(b"tenant", tenant)


def _body_id(body: Mapping[str, Any], field: str) -> str | None:
    value = body.get(field)
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # vLLM's benchmark numbers its conversations
    if not isinstance(value, str):
        raise IdentityError(field, f"'{field}' must be a string.")
    return _checked(field, value)


def _checked(field: str, value: str) -> str:
    if len(value) > MAX_ID_LENGTH:
        raise IdentityError(field, f"'{field}' is longer than {MAX_ID_LENGTH} characters.")
    return value


def _digest(kind: bytes, *parts: str) -> bytes:
    state = blake2b(kind, digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(4, "big"))
        state.update(encoded)
    return state.digest()
