"""[pure] What can be compared, and what each needs.

A user asks for legs; an arm is one way of serving that is measured. Two legs of the published kind
and of the production kind are pairs, reuse off and on, with everything else equal; the off side of
``published`` is what the leg ``cold`` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class UnknownLeg(ValueError):
    """No leg of this name; the message lists those that there are."""


@dataclass(frozen=True)
class Arm:
    """One way of serving. ``prefix_cache``: of the prefill workers; None without any."""

    name: str
    what: str
    prefix_cache: bool | None = None
    reuse: bool = False
    decode_local: bool = False

    @property
    def needs_proxy(self) -> bool:
        return self.prefix_cache is not None


COLD = Arm("cold", "P/D, prefill without prefix cache, nothing reused", prefix_cache=False)
AGAIN = Arm(
    "cold-again",
    "the same as cold a second time: what differs between the two is the machine's noise",
    prefix_cache=False,
)
PUBLISHED = Arm(
    "published", "P/D, prefill without prefix cache, KV pulled from decode", False, reuse=True
)
PREFIX_CACHE = Arm(
    "prefix-cache", "P/D, prefill's own prefix cache, nothing pulled", prefix_cache=True
)
PRODUCTION = Arm(
    "production", "P/D, prefill's own prefix cache, the rest pulled from decode", True, reuse=True
)
DECODE_LOCAL = Arm(
    "decode-local",
    "as production, and short additions are computed on decode",
    True,
    reuse=True,
    decode_local=True,
)
SINGLE = Arm("single", "one aggregated vLLM with its prefix cache, no P/D")

LEGS: Mapping[str, tuple[Arm, ...]] = {
    "cold": (COLD,),
    "noise": (COLD, AGAIN),
    "published": (COLD, PUBLISHED),
    "production": (PREFIX_CACHE, PRODUCTION),
    "decode-local": (PREFIX_CACHE, DECODE_LOCAL),
    "single": (SINGLE,),
}

BASELINES: Mapping[str, tuple[str, ...]] = {
    AGAIN.name: (COLD.name,),
    PUBLISHED.name: (COLD.name,),
    PREFIX_CACHE.name: (COLD.name,),
    PRODUCTION.name: (PREFIX_CACHE.name, SINGLE.name),
    DECODE_LOCAL.name: (PREFIX_CACHE.name, SINGLE.name),
}
"""Arm -> what it is compared with: the arm that differs in one thing only, and the one that a user
would run instead."""

KNOWN_ARMS: Mapping[str, Arm] = {arm.name: arm for arms in LEGS.values() for arm in arms}


MARGIN_SECONDS = 5.0
"""Sessions end this much before decode's lease, where a run sets both: its queues are short."""


def expiry_margin(lease: float) -> float:
    """The proxies' ``expiry_margin_seconds`` for decode's lease in a run."""
    return min(MARGIN_SECONDS, lease / 4)


def arms_of(legs: Iterable[str]) -> tuple[Arm, ...]:
    """The arms of these legs, each once, in the order asked. Raises ``UnknownLeg``."""
    found: dict[str, Arm] = {}
    for leg in legs:
        if leg not in LEGS:
            raise UnknownLeg(f"unknown leg {leg!r}; known: {', '.join(LEGS)}")
        found.update({arm.name: arm for arm in LEGS[leg]})
    return tuple(found.values())


def reference_of(arms: Iterable[str]) -> str | None:
    """The arm whose answers the others' are compared with: the one that reuses least."""
    names = set(arms)
    for name in (COLD.name, SINGLE.name, PREFIX_CACHE.name):
        if name in names:
            return name
    return None
