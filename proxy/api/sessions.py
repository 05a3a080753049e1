"""[io] What decode keeps for a tenant's conversations: listed, shown, released at once.

Clients see their own tenant's, operators all. A conversation goes by the id that its client gave
it, or by the id in the list, which also exists for those that are found by their tokens alone. Ids
of clients are stored as digests only, so a list cannot show them.

A conversation whose turn is being answered holds nothing: its blocks are claimed, or not kept yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel

from proxy.errors import ClientError
from proxy.retention import Entry
from proxy.session.identity import MAX_ID_LENGTH, identity_of, tenant_digest
from proxy.session.ledger import Ledger, Place
from proxy.workers.pool import Role

if TYPE_CHECKING:
    from proxy.app import App

TenantOf = Callable[[Request], str | None]
"""Whose sessions a request may see; None: everybody's."""

ID_PREFIX = "kv_"
"""Begins the ids in lists."""


class KeptSession(BaseModel):
    """KV that a decode worker keeps for one conversation, or for one branch of it."""

    object: Literal["session"] = "session"
    id: str
    """Good for ``GET`` and ``DELETE`` until the conversation's next turn."""
    label: str
    """As in the log: the digest of the client's id, or ``by-prefix``."""
    model: str
    worker: str
    tokens: int
    blocks: int
    kept_at: float
    """Unix time, seconds."""
    usable_until: float
    """A turn that comes later finds nothing."""
    pinned_until: float
    """When decode frees the blocks if nobody comes."""


class SessionPage(BaseModel):
    """Newest first."""

    object: Literal["list"] = "list"
    data: list[KeptSession]
    has_more: bool
    next: str | None
    """The next page's ``after``: a place in time, good even when the last session seen is gone."""


class ReleasedSession(BaseModel):
    object: Literal["session.deleted"] = "session.deleted"
    id: str
    deleted: Literal[True] = True
    released_blocks: int


@dataclass(frozen=True, slots=True)
class _Found:
    worker: str
    now: float
    entry: Entry

    @property
    def place(self) -> tuple[int, str]:
        """In the list: by milliseconds, then by id."""
        return round(self.entry.since * 1000), self.entry.id


Limit = Annotated[int, Query(ge=1, le=500, description="Sessions on a page.")]
After = Annotated[str | None, Query(description="The last page's next.")]
Model = Annotated[str | None, Query(description="Only this model's. Unset: every model's.")]
Salt = Annotated[str, Query(description="The cache_salt of the conversation's turns.")]


def add_client_routes(surface: FastAPI, app: App, tenant_of: TenantOf) -> None:
    """``/v1/sessions``, for the tenant that ``tenant_of`` names."""
    _add(surface, app, "/v1/sessions", tenant_of)


def add_operator_routes(surface: FastAPI, app: App) -> None:
    """``/admin/sessions``: every tenant's, by their ids in the list."""
    _add(surface, app, "/admin/sessions", lambda request: None)


def _add(surface: FastAPI, app: App, path: str, tenant_of: TenantOf) -> None:
    @surface.get(path)
    async def list_sessions(
        request: Request, limit: Limit = 100, after: After = None, model: Model = None
    ) -> SessionPage:
        """What is kept, newest first. 503 when Redis does not answer."""
        found = await _kept(app, tenant_of(request))
        if model is not None:
            found = [each for each in found if each.entry.model == model]
        if after is not None:
            behind = _place(after)
            found = [each for each in found if each.place < behind]
        page = found[:limit]
        more = len(found) > limit
        return SessionPage(
            data=[_shown(each) for each in page],
            has_more=more,
            next=_cursor(page[-1].place) if more else None,
        )

    @surface.get(path + "/{id:path}")
    async def show_session(
        request: Request, id: str, model: Model = None, cache_salt: Salt = ""
    ) -> SessionPage:
        """All that is kept of one conversation: several entries if it has parallel branches."""
        found = await _named(app, tenant_of(request), id, model, cache_salt)
        return SessionPage(data=[_shown(each) for each in found], has_more=False, next=None)

    @surface.delete(path + "/{id:path}")
    async def release_session(
        request: Request, id: str, model: Model = None, cache_salt: Salt = ""
    ) -> ReleasedSession:
        """Have decode free the blocks now. The conversation's next turn starts cold."""
        found = await _named(app, tenant_of(request), id, model, cache_salt)
        blocks = 0
        for each in found:
            entry = each.entry
            blocks += await app.conductor.retention.give_up(entry.scope, entry.id, entry.model)
        return ReleasedSession(id=id, released_blocks=blocks)


async def _kept(app: App, tenant: str | None) -> list[_Found]:
    """What may still be claimed, newest first. Raises ``TableUnavailable``."""
    digest = None if tenant is None else tenant_digest(tenant).hex()
    ledger: Ledger = app.ledger
    found = []
    await app.conductor.retention.told()  # a turn that has just ended here is to be seen
    for worker in app.pool.workers:
        if worker.role is not Role.DECODE or not worker.epoch:
            continue
        now, entries = await ledger.entries(Place(worker.name, worker.epoch))
        found += [
            _Found(worker.name, now, entry)
            for entry in entries
            if not entry.reserved
            and now < entry.since + entry.usable_seconds
            and digest in (None, entry.tenant)
        ]
    return sorted(found, key=lambda each: each.place, reverse=True)


async def _named(
    app: App, tenant: str | None, id: str, model: str | None, cache_salt: str
) -> list[_Found]:
    """What is kept under a client's id or a listed one. Raises ``ClientError`` (404) for nothing.

    ``id`` of a client means one conversation for each model that has seen it.
    """
    if len(id) > MAX_ID_LENGTH:
        raise ClientError(f"'id' is longer than {MAX_ID_LENGTH} characters.", param="id")
    kept = await _kept(app, tenant)
    if model is not None:
        kept = [each for each in kept if each.entry.model == model]
    found: Sequence[_Found] = []
    if tenant is not None:
        models = {each.entry.model for each in kept}
        wanted = {
            identity_of(name, tenant=tenant, cache_salt=cache_salt, conversation=id).conversation
            for name in models
        }
        digests = {digest.hex() for digest in wanted}
        found = [each for each in kept if each.entry.conversation in digests]
    found = found or [each for each in kept if _id(each) == id]
    if not found:
        raise ClientError(
            "Nothing is kept for this session.",
            status=404,
            param="id",
            code="session_not_found",
        )
    return list(found)


def _cursor(place: tuple[int, str]) -> str:
    return f"{place[0]}-{place[1]}"


def _place(cursor: str) -> tuple[int, str]:
    time, _, id = cursor.partition("-")
    if not time.isdecimal() or not id:
        raise ClientError("'after' must be the 'next' of an earlier page.", param="after")
    return int(time), id


def _id(found: _Found) -> str:
    return ID_PREFIX + found.entry.id


def _shown(found: _Found) -> KeptSession:
    entry = found.entry
    return KeptSession(
        id=_id(found),
        label=entry.conversation[:12] or "by-prefix",
        model=entry.model,
        worker=found.worker,
        tokens=entry.tokens,
        blocks=entry.blocks,
        kept_at=entry.since,
        usable_until=entry.since + entry.usable_seconds,
        pinned_until=entry.deadline,
    )
