"""[pure] One worker as the proxy knows it: what it is, how it fares, how busy it is.

State changes come in as observations (a probe, an answer, a failure) with the time they were made;
nothing here reads a clock or a socket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from proxy.workers.costs import LegCosts
from proxy.workers.prefixes import PrefixGuess

_RANK = re.compile(r"_dp(\d+)$")
_TOKENS_A_TURN = 1000
"""What another proxy's turn weighs on a prefill worker, in tokens, before any was seen."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Worker:
    """One vLLM server. ``name`` is its host:port; ``epoch`` changes when its process restarts."""

    url: str
    role: Role
    name: str
    source: str = "settings"
    """Who named it: settings, file, dns or admin."""
    healthy: bool = False
    draining: bool = False
    """Gets no new turns. What it keeps may still be pulled and released."""
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
    prefix_caching: bool | None = None
    cache_dtype: str = ""
    version: str = ""
    """vLLM's version; workers of different ones refuse each other's blocks."""
    models: frozenset[str] = frozenset()
    bidirectional: bool | None = None
    """Does it keep blocks for prefill (decode), or read them (prefill)? None: not known."""
    transfer_mode: str = ""
    """``pull`` or ``push``; empty: not known."""
    push_place: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of a prefill worker that pushes: what decode must know of its engine; empty: not known."""
    load_failure_policy: str = ""
    engines: int | None = None
    """Data-parallel engines behind this address."""
    outstanding: int = 0
    """Turns sent and not yet finished, by this proxy."""
    outstanding_tokens: int = 0
    """Prompt tokens that these turns have it compute."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """By its own account, a few seconds old: requests of all proxies, share of KV blocks in use."""
    own_then: int = 0
    """``outstanding`` when that account was read."""
    tokens_a_turn: float = _TOKENS_A_TURN
    prefixes: PrefixGuess = field(default_factory=PrefixGuess, repr=False)
    costs: LegCosts = field(default_factory=LegCosts, repr=False)
    render: bool | None = None
    """Does it serve /v1/chat/completions/render? None: not asked yet."""
    rendering: int | None = None
    """Which of a request's renderings it uses, where a route has several (``turn/renderings.py``).
    None: not asked yet."""
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
            self.engine_id = process_part(engine_id)

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

    @property
    def retains(self) -> bool:
        """Does it run our connector? Then a turn without prefill can be kept, with a lease."""
        return self.role is Role.DECODE and self.pin_limit_blocks is not None

    @property
    def elsewhere(self) -> int:
        """Requests that it had from other proxies, as of its last account."""
        return max(0, self.running + self.waiting - self.own_then)

    @property
    def load(self) -> int:
        """Requests on it: ours exactly, those of other proxies as last seen."""
        return self.outstanding + self.elsewhere

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that a new turn would find before it."""
        return self.outstanding_tokens + round(self.elsewhere * self.tokens_a_turn)

    def load_seen(self, running: int, waiting: int, kv_usage: float) -> None:
        self.running, self.waiting, self.kv_usage = running, waiting, kv_usage
        self.own_then = self.outstanding

    def given(self, tokens: int) -> None:
        """A turn with so many tokens to compute is sent."""
        self.outstanding += 1
        self.outstanding_tokens += tokens
        if tokens:
            self.tokens_a_turn += 0.1 * (tokens - self.tokens_a_turn)

    def done(self, tokens: int) -> None:
        self.outstanding -= 1
        self.outstanding_tokens -= tokens

    def restarted(self) -> None:
        """A new process: nothing that the old one held, or showed, is left."""
        self.engine_id = ""
        self.render = self.rendering = self.plugin = None
        self.push_place = {}
        if self.role is Role.DECODE:
            self.transfer_mode = ""  # prefill says it again with its next handle
        self.prefixes.clear()

    def serves(self, model: str) -> bool:
        return not model or not self.models or model in self.models


def process_part(engine_id: str) -> str:
    """An engine id without its data-parallel rank: the ranks of one process alternate in handles.

    vLLM appends ``_dp<rank>`` (v1/engine/core.py).
    """
    return _RANK.sub("", engine_id)


def rank_of(engine_id: str) -> int | None:
    """The data-parallel rank in an engine id, or None where there is only one engine."""
    found = _RANK.search(engine_id)
    return int(found.group(1)) if found else None
