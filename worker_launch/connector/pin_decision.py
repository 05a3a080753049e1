"""[pure] May a finished decode request keep its blocks, and for how long?

Nothing in vLLM evicts a pin: the scheduler queues or preempts live requests instead. Measured on a
stock bidirectional decode worker with 24 blocks of 32 tokens: 11 short unrelated requests were
answered, the 12th got no answer within 60 s, with nothing running and nothing waiting. So pins may
take only a share of the blocks, and the rest is always left for requests that run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

DEFAULT_MAX_PINNED_FRACTION = 0.5
"""Higher: fewer running requests fit beside the pins, and a request longer than the rest of the
memory can wait for a whole lease. Lower: conversations lose their history sooner."""


class Refusal(Enum):
    """Why nothing is kept. The values are on the wire and in metric labels."""

    LEASE_ZERO = "lease_zero"
    """The request asked for it."""

    OVER_SHARE = "over_share"
    """Pinned blocks would take more than their share."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the blocks for ``lease_seconds``."""

    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Free the blocks at once and return no handle."""

    reason: Refusal


def pin_limit(usable_blocks: int, max_pinned_fraction: float) -> int:
    """Most blocks that may be pinned. Raises ValueError for a fraction outside (0, 1]."""
    if not 0 < max_pinned_fraction <= 1:
        raise ValueError(
            f"kvloop_max_pinned_fraction must be above 0 and at most 1, not {max_pinned_fraction}"
        )
    return math.floor(usable_blocks * max_pinned_fraction)


def lease_seconds(requested: object, longest: float) -> float:
    """A request's lease in seconds: what it asked for, at most ``longest``.

    Anything that is not a number of 0 or more means that nothing was asked for: a lease is a wish
    of the caller, and a request must not fail over it after its answer has been computed.
    """
    if isinstance(requested, bool) or not isinstance(requested, int | float):
        return longest
    if math.isnan(requested) or requested < 0:
        return longest
    return min(float(requested), longest)


def decide_pin(
    *, requested_lease: object, longest_lease: float, pinned_with_request: int, limit: int
) -> Pin | Refuse:
    """``pinned_with_request`` is the number of pinned blocks if this request's were kept too."""
    lease = lease_seconds(requested_lease, longest_lease)
    if lease == 0:
        return Refuse(Refusal.LEASE_ZERO)
    if pinned_with_request > limit:
        return Refuse(Refusal.OVER_SHARE)
    return Pin(lease)
