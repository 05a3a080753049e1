"""[io] Who is calling, and may they now? One place that every route which serves data asks.

Keys come from a file, which is read again when it changes, or from the environment. With no keys
everyone is the same caller, whose tenant has no name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from proxy import log
from proxy.errors import ClientError
from proxy.metrics import Metrics
from proxy.session.identity import NOBODY, Caller
from proxy.settings import Settings
from proxy.tenants import (
    KeysError,
    Tenant,
    hashed,
    keys_from_file,
    keys_from_text,
    presented_key,
)

_LOOK_EVERY = 1.0
"""Seconds between two looks at the file's time stamp."""


class Callers:
    """Resolves and limits callers. Raises ``KeysError`` at the start if the keys are unusable."""

    def __init__(
        self, settings: Settings, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._path = Path(settings.api_keys_file) if settings.api_keys_file else None
        self._stamp: tuple[int, int] | None = None
        self._looked = clock()
        self._given: dict[str, Tenant] = {}
        if settings.api_keys is not None:
            self._given = keys_from_text(settings.api_keys.get_secret_value())
        self._use(self._read(self._path) if self._path is not None else {})
        self._usage: dict[str, _Usage] = {}

    @property
    def required(self) -> bool:
        """Must a caller show a key?"""
        return self._path is not None or bool(self._given)

    def resolve(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller that ``headers`` (lower-case names) prove. Raises ``ClientError`` (401)."""
        if not self.required:
            return NOBODY
        self._refresh()
        key = presented_key(headers)
        tenant = self._keys.get(hashed(key)) if key is not None else None
        if tenant is None:
            self._metrics.refused_callers.labels("no_key" if key is None else "wrong_key").inc()
            raise ClientError(
                "No API key was given: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
                if key is None
                else "The API key is not valid.",
                status=401,
                code="invalid_api_key",
                type="authentication_error",
            )
        return Caller(tenant.name)

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[None]:
        """Around a request: within its tenant's limits. Raises ``ClientError`` (429)."""
        usage = self._usage.setdefault(caller.tenant, _Usage())
        tenant = self._tenants.get(caller.tenant)
        settings = self._settings
        in_flight = (tenant and tenant.max_in_flight) or settings.tenant_max_in_flight
        rate = (tenant and tenant.requests_per_minute) or settings.tenant_requests_per_minute
        if in_flight is not None and usage.in_flight >= in_flight:
            self._metrics.throttled_requests.labels("in_flight").inc()
            raise _throttled("Too many requests of this API key are under way.", 1)
        if rate is not None and (wait := usage.wait(rate, self._clock())) > 0:
            self._metrics.throttled_requests.labels("rate").inc()
            raise _throttled("Too many requests with this API key.", ceil(wait))
        usage.in_flight += 1
        try:
            yield
        finally:
            usage.in_flight -= 1

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        try:
            if _stamp(self._path) == self._stamp:
                return
            self._use(self._read(self._path))
        except KeysError as error:
            # The keys that were good stay good: a half-written file must not shut everyone out.
            log.event("api_keys_unusable", error=str(error))
            return
        log.event("api_keys_read", keys=len(self._keys))

    def _use(self, from_file: dict[str, Tenant]) -> None:
        self._keys = {**self._given, **from_file}
        self._tenants = {tenant.name: tenant for tenant in self._keys.values()}

    def _read(self, path: Path) -> dict[str, Tenant]:
        try:
            self._stamp = _stamp(path)
            return keys_from_file(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"api_keys_file {path} cannot be read: {error}") from None
        except KeysError as error:
            raise KeysError(f"api_keys_file {path} {error}") from None


class _Usage:
    """What one tenant is using: requests under way, and a bucket that fills with time."""

    __slots__ = ("_at", "_tokens", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._tokens: float | None = None
        self._at = 0.0

    def wait(self, per_minute: int, now: float) -> float:
        """0 and one request taken, or the seconds until one is there. Bursts of a minute's worth
        are allowed."""
        if self._tokens is None:
            self._tokens = float(per_minute)
        else:
            self._tokens += (now - self._at) * per_minute / 60
        self._tokens = min(self._tokens, float(per_minute))
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) * 60 / per_minute


def _throttled(message: str, retry_after: int) -> ClientError:
    return ClientError(
        message,
        status=429,
        code="rate_limit_exceeded",
        type="rate_limit_error",
        retry_after=retry_after,
    )


def _stamp(path: Path) -> tuple[int, int]:
    """Changes with the file, and with the symbolic link that Kubernetes swaps for a new Secret."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise KeysError(f"api_keys_file {path} cannot be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_ino
