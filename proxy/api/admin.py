"""[io] The operators' surface, on a port of its own that is not for clients.

Loopback by default: whoever reaches this port may switch reuse off and see which sessions live
where. It never shows a prompt, an answer or a session id that a client chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from pydantic import BaseModel

from proxy import __version__
from proxy.api import live, operations, sessions, workers

if TYPE_CHECKING:
    from proxy.app import App


class ReuseState(BaseModel):
    """Is KV reused? ``fleet``: what the fleet-wide switch says; ``here``: what this proxy does."""

    fleet: bool
    here: bool


class ReuseWanted(BaseModel):
    on: bool


def build(app: App) -> FastAPI:
    """The surface of one proxy. ``/docs`` lists it."""
    admin = FastAPI(title="kvloop admin", version=__version__)
    operations.add_probes(admin, app)
    operations.in_openai_shape(admin)
    live.add_live_page(admin, app.live)

    @admin.get("/admin/reuse")
    async def reuse() -> ReuseState:
        """The switch. 503 when Redis does not answer."""
        off = await app.table.reuse_is_off()
        return ReuseState(fleet=not off, here=app.conductor.reuse_on)

    @admin.put("/admin/reuse")
    async def set_reuse(wanted: ReuseWanted) -> ReuseState:
        """Switch reuse off or on in every proxy on this Redis; all follow within a second."""
        await app.table.set_reuse(wanted.on)
        return ReuseState(fleet=wanted.on, here=app.conductor.reuse_on)

    workers.add_routes(admin, app)
    sessions.add_operator_routes(admin, app)
    return admin
