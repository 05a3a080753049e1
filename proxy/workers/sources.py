"""[io] Where workers come from: lists of addresses, a watched file, DNS.

An address is ``http://host:port``, or ``dns+http://host:port`` for every address that the name has,
looked up again and again. A Kubernetes headless service is such a name: its endpoints come and go
with the pods.
"""

from __future__ import annotations

import asyncio
import socket
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from proxy.workers.worker import Role

DNS_SCHEME = "dns+http"
_DNS_SECONDS = 5.0
_FILE_KEYS = {"prefill_urls": Role.PREFILL, "decode_urls": Role.DECODE}


class SourceError(Exception):
    """A source could not be read; what it said last still holds."""


@dataclass(frozen=True, slots=True)
class Named:
    """A worker as a source names it."""

    url: str
    role: Role
    source: str

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc


def check_url(url: str) -> str:
    """The address without a slash at its end. Raises ValueError for what is none."""
    url = url.strip().rstrip("/")
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https", DNS_SCHEME) and parts.hostname
        port = parts.port
    except ValueError:
        known, port = None, None
    if not known or parts.path or (parts.scheme == DNS_SCHEME and port is None):
        raise ValueError(
            f"{url!r} is not a worker address; write http://host:port, or dns+http://name:port for "
            "all addresses of a name"
        )
    return url


def is_dns(url: str) -> bool:
    return url.startswith(DNS_SCHEME + "://")


def read_file(path: str) -> list[tuple[str, Role]]:
    """Addresses in a TOML file with ``prefill_urls`` and ``decode_urls``. Raises SourceError."""
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: {error}") from error
    found: list[tuple[str, Role]] = []
    for key, value in content.items():
        role = _FILE_KEYS.get(key)
        if role is None:
            raise SourceError(f"{path}: unknown key {key!r}; known: {', '.join(_FILE_KEYS)}")
        if not isinstance(value, list) or not all(isinstance(url, str) for url in value):
            raise SourceError(f"{path}: {key} must be a list of addresses")
        try:
            found += [(check_url(url), role) for url in value]
        except ValueError as error:
            raise SourceError(f"{path}: {key}: {error}") from error
    return found


async def look_up(url: str) -> list[str]:
    """``http://address:port`` of all addresses behind a ``dns+http`` one. Raises SourceError."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_DNS_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, parts.port, type=socket.SOCK_STREAM
            )
    except OSError as error:  # TimeoutError is one
        raise SourceError(f"{parts.hostname}: {error.strerror or 'no answer'}") from error
    hosts = sorted({str(entry[4][0]) for entry in found})
    return [f"http://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]


class Sources:
    """All sources of one proxy."""

    def __init__(self, fixed: Iterable[tuple[str, Role]], file: str | None) -> None:
        self._fixed = list(fixed)
        self._file = file
        self._last: dict[str, list[str] | list[tuple[str, Role]]] = {}
        self.errors: dict[str, str] = {}
        """What could not be read last time, and why."""

    async def read(self) -> dict[str, Named]:
        """Workers by name; of two sources that name one the first counts."""
        entries = [(url, role, "settings") for url, role in self._fixed]
        if self._file is not None:
            entries += [(url, role, "file") for url, role in await self._from_file(self._file)]
        found: dict[str, Named] = {}
        for url, role, source in entries:
            if is_dns(url):
                named = [Named(each, role, "dns") for each in await self._from_dns(url)]
            else:
                named = [Named(url, role, source)]
            for each in named:
                found.setdefault(each.name, each)
        return found

    async def _from_file(self, path: str) -> list[tuple[str, Role]]:
        try:
            self._last[path] = await asyncio.to_thread(read_file, path)
            self.errors.pop(path, None)
        except SourceError as error:
            self.errors[path] = str(error)
        return self._last.get(path, [])  # type: ignore[return-value]

    async def _from_dns(self, url: str) -> list[str]:
        try:
            self._last[url] = await look_up(url)
            self.errors.pop(url, None)
        except SourceError as error:
            self.errors[url] = str(error)
        return self._last.get(url, [])  # type: ignore[return-value]
