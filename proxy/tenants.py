"""[pure] Tenants and their API keys, as a file or the environment gives them.

A key is stored as its SHA-256, ``sha256:<64 hex digits>``. That is enough for keys that a machine
made (``kvloop keys TENANT``: 256 random bits, nothing to guess). Passwords that a person chose
would need a slow hash: do not use them here.

The file is TOML::

    [tenants.acme]
    keys = ["sha256:..."]          # several while one is being replaced
    max_in_flight = 64             # optional, else the setting's
    requests_per_minute = 600      # optional, else the setting's
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_KEY_LENGTH = 512
"""Bytes. A longer key is not looked at."""


class KeysError(ValueError):
    """The keys cannot be used; the message says where and how to mend it, and shows no key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose keys they are, and how much it may ask for. None: the setting's value."""

    name: str
    max_in_flight: int | None = None
    requests_per_minute: int | None = None


def hashed(key: bytes) -> str:
    """The form in which a key is stored."""
    return "sha256:" + sha256(key).hexdigest()


def keys_from_file(text: str) -> dict[str, Tenant]:
    """Stored form -> tenant. Raises ``KeysError``."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KeysError(f"is not valid TOML: {error}") from None
    tenants = content.get("tenants")
    if not isinstance(tenants, dict) or not tenants:
        raise KeysError("has no [tenants.<name>] table")
    found: dict[str, Tenant] = {}
    for name, entry in tenants.items():
        if not isinstance(entry, dict):
            raise KeysError(f"tenants.{name} is not a table")
        tenant = Tenant(
            _name(name),
            _limit(name, entry, "max_in_flight"),
            _limit(name, entry, "requests_per_minute"),
        )
        unknown = set(entry) - {"keys", "max_in_flight", "requests_per_minute"}
        if unknown:
            raise KeysError(f"tenants.{name} has an unknown field {min(unknown)!r}")
        keys = entry.get("keys")
        if not isinstance(keys, list) or not keys:
            raise KeysError(f"tenants.{name}.keys must be an array with at least one hash")
        for key in keys:
            _add(found, key, tenant)
    return found


def keys_from_text(text: str) -> dict[str, Tenant]:
    """``tenant=sha256:...`` pairs, comma separated: the form of the environment variable."""
    found: dict[str, Tenant] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, key = pair.partition("=")
        if not equals:
            raise KeysError("must be tenant=sha256:... pairs, comma separated")
        _add(found, key.strip(), Tenant(_name(name.strip())))
    return found


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key in a request: ``Authorization: Bearer``, or ``x-api-key`` as Anthropic clients do."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    found = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    return found if 0 < len(found) <= MAX_KEY_LENGTH else None


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise KeysError(f"tenant name {name[:80]!r} must be letters, digits, '.', '_' or '-'")
    return name


def _limit(name: str, entry: Mapping[str, Any], field: str) -> int | None:
    value = entry.get(field)
    if value is not None and (type(value) is not int or value < 1):
        raise KeysError(f"tenants.{name}.{field} must be an integer of at least 1")
    return value


def _add(found: dict[str, Tenant], key: object, tenant: Tenant) -> None:
    if not isinstance(key, str) or not _HASH.fullmatch(key):
        raise KeysError(
            f"a key of tenant {tenant.name!r} is not of the form sha256:<64 hex digits>; "
            "make one with: kvloop keys TENANT"
        )
    if key in found and found[key].name != tenant.name:
        raise KeysError(f"tenants {found[key].name!r} and {tenant.name!r} share a key")
    found[key] = tenant
