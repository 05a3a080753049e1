"""[pure] The workers as the proxy knows them, and which of them a turn is given.

State changes come in as observations (a probe, an answer, a failure) with the time they were made;
nothing here reads a clock or a socket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from proxy.turn.planner import HolderState

_RANK = re.compile(r"_dp\d+$")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Worker:
    """One vLLM server. ``name`` is its host:port; ``epoch`` changes when its process restarts."""

    url: str
    role: Role
    name: str
    healthy: bool = False
    epoch: str = ""
    engine_id: str = ""
    block_size: int | None = None
    kv_blocks: int | None = None
    pin_limit_blocks: int | None = None
    """Most blocks its connector pins; None without our connector."""
    pinned_blocks: int | None = None
    """Blocks that its connector pinned when it was last asked; None without our connector."""
    facts_read: int = 0
    """How often it has been asked."""
    outstanding: int = 0
    """Turns sent and not yet finished, by this proxy."""
    render: bool | None = None
    """Does it serve /v1/chat/completions/render? None: not asked yet."""
    plugin: bool | None = None
    """Does it say how a turn ended (our vLLM plugin)? None: not seen yet."""
    last_error: str = ""
    _failed_probes: int = field(default=0, repr=False)
    _failed_pulls: int = field(default=0, repr=False)
    _pulls_paused_until: float = field(default=0.0, repr=False)
    _failed_turns: int = field(default=0, repr=False)
    _left_out_until: float = field(default=0.0, repr=False)
    _pause: float = field(default=0.0, repr=False)
    _failed_transfers: int = field(default=0, repr=False)
    _transfers_paused_until: float = field(default=0.0, repr=False)

    def probe_succeeded(self) -> bool:
        """True when this brought the worker (back) into service."""
        came_back = not self.healthy
        self._failed_probes = 0
        self.healthy = True
        self.last_error = ""
        return came_back

    def probe_failed(self, error: str, *, refused: bool, limit: int) -> bool:
        """True when this took the worker out of service.

        A refused connection is certain (nobody listens) and counts at once; anything else may be a
        busy worker and counts only ``limit`` times in a row.
        """
        self._failed_probes += 1
        self.last_error = error
        if self.healthy and (refused or self._failed_probes >= limit):
            self.healthy = False
            return True
        return False

    def answered(self) -> None:
        """An answer to a turn proves life better than any probe."""
        self._failed_probes = 0
        self._failed_turns = 0
        self._left_out_until = 0.0

    def turn_failed(self, now: float, *, limit: int, pause: float) -> bool:
        """A turn's call failed. True when this opened the breaker: left out for ``pause``."""
        self._failed_turns += 1
        if self._failed_turns < limit:
            return False
        self._pause = pause
        self._left_out_until = now + pause
        return True

    def in_favour(self, now: float) -> bool:
        """Is the breaker closed, or is it time for a trial?"""
        return now >= self._left_out_until

    def chosen(self, now: float) -> None:
        """The worker was given a turn: of an open breaker one trial a pause, whatever it brings."""
        if self._left_out_until:
            self._left_out_until = now + self._pause

    def transfer_failed(self, now: float, *, limit: int, pause: float) -> None:
        """Decode failed on a turn that it should have read from prefill."""
        self._failed_transfers += 1
        if self._failed_transfers >= limit:
            self._transfers_paused_until = now + pause
            self._failed_transfers = limit - 1

    def transfer_succeeded(self) -> None:
        self._failed_transfers = 0

    def transfers_allowed(self, now: float) -> bool:
        return now >= self._transfers_paused_until

    def handle_seen(self, engine_id: str) -> None:
        """The engine id in a handle. A new one means a new process, known before any probe."""
        if engine_id:
            self.engine_id = _process_part(engine_id)

    def pull_succeeded(self) -> None:
        self._failed_pulls = 0

    def pull_failed(self, now: float, *, limit: int, pause: float) -> None:
        self._failed_pulls += 1
        if self._failed_pulls >= limit:
            # One trial after the pause decides anew.
            self._pulls_paused_until = now + pause
            self._failed_pulls = limit - 1

    def pulls_allowed(self, now: float) -> bool:
        return now >= self._pulls_paused_until


class Pool:
    """Prefill and decode workers, and the choice among them: the least busy healthy one."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = list(workers)
        self._by_name = {worker.name: worker for worker in self.workers}
        self._chosen = dict.fromkeys(Role, 0)

    def choose(
        self, role: Role, *, avoid: Iterable[str] = (), now: float | None = None
    ) -> Worker | None:
        """The healthy worker with the fewest outstanding turns; those in ``avoid`` only if alone.

        With ``now``, workers whose breaker is open are chosen only when there is no other: a
        breaker is a preference, only a probe takes a worker out of service. Equals take turns, so
        that a quiet pool is used evenly.
        """
        healthy = [each for each in self.workers if each.role is role and each.healthy]
        avoided = set(avoid)
        candidates = [each for each in healthy if each.name not in avoided] or healthy
        if now is not None:
            candidates = [each for each in candidates if each.in_favour(now)] or candidates
        if not candidates:
            return None
        self._chosen[role] += 1
        offset = self._chosen[role] % len(candidates)
        rotated = candidates[offset:] + candidates[:offset]
        best = min(rotated, key=lambda each: each.outstanding)
        if now is not None:
            best.chosen(now)
        return best

    def healthy(self, name: str) -> Worker | None:
        """The worker of this name, if it is healthy."""
        worker = self._by_name.get(name)
        return worker if worker is not None and worker.healthy else None

    def holder(self, name: str, engine_id: str) -> HolderState:
        """The state of the worker that a holding names, seen from the planner.

        A worker that is only unhealthy at the moment may still answer a NIXL read, but probably
        will not: it counts as absent.
        """
        worker = self._by_name.get(name)
        if worker is None or not worker.healthy:
            return HolderState(present=False)
        if worker.engine_id and engine_id and worker.engine_id != _process_part(engine_id):
            return HolderState(present=False)
        return HolderState(True, worker.epoch, worker.block_size)

    def has(self, role: Role) -> bool:
        return any(each.role is role and each.healthy for each in self.workers)


def _process_part(engine_id: str) -> str:
    """An engine id without its data-parallel rank: the ranks of one process alternate in handles.

    vLLM appends ``_dp<rank>`` (v1/engine/core.py).
    """
    return _RANK.sub("", engine_id)
