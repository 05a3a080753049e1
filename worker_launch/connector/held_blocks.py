"""[pure] Which finished requests hold which KV blocks, and until when.

A block id may be held by several requests at once: two conversations that start with the same
system prompt share its blocks through the prefix cache. ``pinned`` counts it once, because memory
is what is limited. Reads no clock: times come in as ``time.perf_counter()`` seconds, the clock of
vLLM's deadlines. Decides nothing: see ``pin_decision``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """Why blocks stopped being held."""

    RELEASED = "released"
    """Prefill read them, or told us to drop them."""

    EXPIRED = "expired"
    """The lease ran out first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One request's blocks and its deadline in ``perf_counter`` seconds."""

    request_id: str
    block_ids: frozenset[int]
    deadline: float


class HeldBlocks:
    """The holds of one engine."""

    __slots__ = ("_holders", "_holds")

    def __init__(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._holders: Counter[int] = Counter()

    @property
    def pinned(self) -> int:
        """Distinct blocks held by at least one request."""
        return len(self._holders)

    @property
    def requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._holds)

    def pinned_with(self, block_ids: Iterable[int]) -> int:
        """What ``pinned`` would be if these blocks were held too."""
        return len(self._holders) + sum(block not in self._holders for block in set(block_ids))

    def hold(self, request_id: str, block_ids: Iterable[int], deadline: float) -> None:
        """Start holding. Raises ValueError if the request holds blocks already."""
        if request_id in self._holds:
            raise ValueError(f"request {request_id} holds blocks already")
        hold = Hold(request_id, frozenset(block_ids), deadline)
        self._holds[request_id] = hold
        self._holders.update(hold.block_ids)

    def end(self, request_id: str, now: float) -> Ending | None:
        """Stop holding; None if the request held nothing (a prefill request, an aborted one).

        vLLM reports both endings in the same way. It ends a lease only at or after the deadline,
        so the time tells which one it was; a read that completes at that very moment counts as
        expired.
        """
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return None
        for block in hold.block_ids:
            left = self._holders[block] - 1
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]
        return Ending.EXPIRED if now >= hold.deadline else Ending.RELEASED
