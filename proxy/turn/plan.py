"""[pure] The plans a turn can have. One frozen type each, matched exhaustively.

``release`` is a holding that was claimed and will not be pulled: performing the plan includes
telling decode to free it, so that no pin outlives its use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from proxy.session.holding import Holding
from proxy.turn.reasons import Reason


@dataclass(frozen=True, slots=True)
class ColdPrefill:
    """Prefill computes the whole prompt (or finds it in its own cache). Always right."""

    route: ClassVar[str] = "cold-prefill"
    reason: Reason
    release: Holding | None = None


@dataclass(frozen=True, slots=True)
class PrefillWithPull:
    """Prefill pulls the first ``tokens`` tokens from decode and computes the rest.

    ``blocks`` is how many ids of each group's block list go along.
    """

    route: ClassVar[str] = "prefill-with-pull"
    reason: Reason
    holding: Holding
    tokens: int
    blocks: int


@dataclass(frozen=True, slots=True)
class DecodeLocalAppend:
    """Decode computes the last ``tokens`` tokens behind the history in its own prefix cache.

    ``holding`` is released when decode has ended: until then it keeps the history in place.
    """

    route: ClassVar[str] = "decode-local-append"
    reason: Reason
    holding: Holding
    tokens: int


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """One worker does it all: nothing is transferred and nothing is kept."""

    route: ClassVar[str] = "decode-only"
    reason: Reason


@dataclass(frozen=True, slots=True)
class Push:
    """Prefill computes the whole prompt and writes it into decode's blocks.

    ``together``: both legs are sent at once, else decode's when prefill has answered.
    """

    route: ClassVar[str] = "push"
    reason: Reason
    together: bool


TurnPlan = ColdPrefill | PrefillWithPull | DecodeLocalAppend | Push | DecodeOnly
