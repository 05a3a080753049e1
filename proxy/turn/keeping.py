"""[io] What decode kept of a turn: into the table, or given back, or noted as absent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from proxy import log
from proxy.errors import TableUnavailable
from proxy.session.fingerprint import PromptTokens
from proxy.session.holding import Holding, held_tokens, usable_handle
from proxy.session.table import new_holding_id
from proxy.turn import wire
from proxy.turn.parts import Parts
from proxy.turn.reasons import Reason
from proxy.turn.record import Turn
from proxy.turn.retaining import MARK_SECONDS
from proxy.workers.pool import Worker


class Keeping:
    """Takes what decode says at the end of an answer."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def keep(
        self, turn: Turn, worker: Worker, prompt: PromptTokens | None, ending: wire.Ending
    ) -> None:
        """Store decode's handle, or note why there is none, or release what cannot be stored."""
        handle = usable_handle(ending.handle)
        if prompt is None:
            if handle is not None:
                self._parts.releases.later(turn.model, holding_of(worker, None, handle))
                turn.kept = "released"
            self._parts.metrics.commits.labels("not_kept").inc()
            return
        worker.plugin = ending.from_plugin
        fingerprint = None
        absent: Reason | None = None
        if handle is None:
            if ending.pin_refused:
                absent = Reason.PIN_REFUSED
            elif turn.streamed and not ending.from_plugin:
                absent = Reason.STREAM_WITHOUT_HANDLE
            else:
                absent = Reason.DECODE_KEPT_NOTHING
        else:
            fingerprint = held_tokens(
                prompt,
                ending.output_ids,
                handle["remote_num_tokens"],
                ids_complete=ending.from_plugin,
            )
            if fingerprint is None:
                absent = Reason.TOKENS_UNKNOWN
        if absent is not None:
            if handle is not None:
                self._parts.releases.later(turn.model, holding_of(worker, None, handle))
            tombstone = holding_of(worker, prompt.fingerprint, None)
            turn.kept = absent
            await self._store(turn, worker, replace(tombstone, absent=absent))
            return
        assert handle is not None
        worker.handle_seen(str(handle["remote_engine_id"]))
        holding = holding_of(worker, fingerprint, handle)
        stored = await self._store(turn, worker, holding)
        if stored is None:
            # The record may appear in the table yet: whoever claims it must find the blocks there.
            turn.kept = "unknown"
            return
        turn.kept = "stored" if stored else "released"
        if stored:
            turn.holding_left = holding.id
            turn.kept_tokens = holding.fingerprint.token_count
        else:
            self._parts.releases.later(turn.model, holding)

    async def _store(self, turn: Turn, worker: Worker, holding: Holding) -> bool | None:
        """Was it stored? None when nobody can tell."""
        settings, retention = self._parts.settings, self._parts.retention
        ttl, pinned = settings.session_ttl_seconds, settings.decode_kv_ttl_seconds
        granted = holding.handle.get("kvloop_lease_seconds") if holding.handle else None
        if isinstance(granted, (int, float)) and granted > 0:
            pinned = min(pinned, granted)
            ttl = min(ttl, pinned - settings.expiry_margin_seconds)
        turn.kept_seconds = ttl
        holding = replace(holding, kept_at=time.time(), group=retention.group(turn))
        retention.turn_kept(turn)
        stored: bool | None = False
        mark = 0.0
        entered = False
        if ttl > 0 and holding.handle is not None:
            mark = max(ttl, MARK_SECONDS)
            entered = True
            retention.ended(turn, worker, holding, usable_seconds=ttl, pinned_seconds=pinned)
        try:
            if ttl > 0:
                with turn.trace.span("commit"), self._parts.table_operation("commit"):
                    stored = await self._parts.table.commit(
                        turn.identity, holding, ttl_seconds=ttl, mark_seconds=mark
                    )
        except TableUnavailable as error:
            log.event("commit_failed", request=turn.request_id, error=str(error))
            stored = False if error.certain else None
        finally:
            if entered and stored:
                retention.stored(worker, holding)
            elif entered and stored is False:
                retention.not_stored(worker, holding)
        if holding.handle is not None:
            self._parts.metrics.commits.labels("stored" if stored else "not_stored").inc()
        else:
            self._parts.metrics.commits.labels(str(holding.absent)).inc()
        return stored

    async def unkeep(self, turn: Turn, worker: Worker, ending: wire.Ending) -> None:
        """Release what decode kept for a client that has left: its turn is not in the table."""
        handle = usable_handle(ending.handle)
        if handle is not None:
            await self._parts.releases.send(turn.model, holding_of(worker, None, handle))


def holding_of(worker: Worker, fingerprint: Any, handle: dict[str, Any] | None) -> Holding:
    """A new record of what ``worker`` holds."""
    return Holding(new_holding_id(), worker.name, worker.epoch, fingerprint, handle)
