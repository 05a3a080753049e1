"""[io] ``/admin/workers``: who is in the pool, who can exchange KV with whom, and changes to it.

A change holds for all proxies on this Redis and outlives them; the others follow within their
``discovery_interval_seconds``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import BaseModel, field_validator

from proxy.errors import ClientError
from proxy.workers.pairs import why_no_handover, why_no_pull
from proxy.workers.pool import Pool, Role, Worker
from proxy.workers.sources import check_url, is_dns

if TYPE_CHECKING:
    from proxy.app import App


class NewWorker(BaseModel):
    """``url``: http://host:port; ``role``: prefill or decode."""

    url: str
    role: Role

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        url = check_url(url)
        if is_dns(url):
            raise ValueError("names with several addresses belong into the settings or the file")
        return url


class Wanted(BaseModel):
    """``draining``: no new turns; what the worker keeps can still be pulled."""

    draining: bool


def add_routes(admin: FastAPI, app: App) -> None:
    @admin.get("/admin/workers")
    async def list_workers() -> dict[str, Any]:
        """All workers with what was probed, and every pair that cannot exchange KV, with why."""
        return {
            "workers": describe(app.pool),
            "pairs": blocked_pairs(app.pool),
            "source_errors": app.roster.source_errors,
        }

    @admin.post("/admin/workers", status_code=201)
    async def add_worker(new: NewWorker) -> dict[str, Any]:
        """Add a worker. It is given turns once it answers its health probe."""
        present = app.pool.get(await app.roster.add(new.url, new.role))
        if present is not None and present.role is not new.role:
            raise ClientError(
                f"'role': {present.name} is a {present.role} worker already; remove it first.",
                param="role",
                status=409,
            )
        return _one(app.pool, present)

    @admin.put("/admin/workers/{name}")
    async def drain_worker(name: str, wanted: Wanted) -> dict[str, Any]:
        """Drain a worker, or have it serve again."""
        if not await app.roster.drain(name, wanted.draining):
            raise _unknown(name)
        return _one(app.pool, app.pool.get(name))

    @admin.delete("/admin/workers/{name}")
    async def remove_worker(name: str) -> dict[str, Any]:
        """Remove a worker at once. ``outstanding``: turns that still run on it."""
        worker = app.pool.get(name)
        if worker is None or not await app.roster.remove(name):
            raise _unknown(name)
        return {"removed": name, "outstanding": worker.outstanding}


def describe(pool: Pool) -> list[dict[str, Any]]:
    """The workers as operators see them; None where a fact is not known."""
    return [_described(worker) for worker in pool.workers]


def _one(pool: Pool, worker: Worker | None) -> dict[str, Any]:
    return _described(worker) if worker is not None else {}


def _described(worker: Worker) -> dict[str, Any]:
    return {
        "name": worker.name,
        "role": worker.role,
        "source": worker.source,
        "healthy": worker.healthy,
        "draining": worker.draining,
        "models": sorted(worker.models) or None,
        "version": worker.version or None,
        "engine_id": worker.engine_id or None,
        "engines": worker.engines,
        "block_size": worker.block_size,
        "kv_blocks": worker.kv_blocks,
        "pin_limit_blocks": worker.pin_limit_blocks,
        "prefix_caching": worker.prefix_caching,
        "bidirectional": worker.bidirectional,
        "transfer_mode": worker.transfer_mode or None,
        "plugin": worker.plugin,
        "outstanding": worker.outstanding,
        "outstanding_tokens": worker.outstanding_tokens,
        "running": worker.running,
        "waiting": worker.waiting,
        "kv_usage": round(worker.kv_usage, 3),
        "cost_error": round(worker.costs.error, 3),
        "error": worker.last_error or None,
    }


def blocked_pairs(pool: Pool) -> list[dict[str, str | None]]:
    """Pairs that cannot exchange KV in one direction or both, and why."""
    found: list[dict[str, str | None]] = []
    for prefill in pool.workers:
        for decode in pool.workers:
            if prefill.role is not Role.PREFILL or decode.role is not Role.DECODE:
                continue
            handover, pull = why_no_handover(prefill, decode), why_no_pull(prefill, decode)
            if handover or pull:
                found.append(
                    {
                        "prefill": prefill.name,
                        "decode": decode.name,
                        "no_handover": handover,
                        "no_pull": pull,
                    }
                )
    return found


def _unknown(name: str) -> ClientError:
    return ClientError(f"There is no worker '{name[:200]}'.", status=404, param="name")
