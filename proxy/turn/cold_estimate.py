"""[pure] What a prefill would have taken without reuse, from the cold prefills seen lately.

Prompt lengths are put into classes of doubling size; each remembers a mean time per token that
forgets. A length is estimated by its own class, else by the nearest one that has been seen. Longer
prompts cost more per token, so the estimate for a length beyond all that were seen is too low:
savings are rather told too small than too large.

Leg times include waiting on prefill's queue, cold and warm alike.
"""

from __future__ import annotations

_WEIGHT = 0.1
"""Of each new observation: some ten prefills are remembered, so a changed load shows."""
_SMALLEST = 16
"""Tokens. Below that a prefill's time is its fixed cost, which says nothing per token."""


class ColdEstimate:
    """``seen`` for every cold prefill, ``seconds`` for every other one."""

    def __init__(self) -> None:
        self._per_token: dict[int, float] = {}

    def seen(self, tokens: int, seconds: float) -> None:
        """A prefill computed ``tokens`` prompt tokens, all that there were, in ``seconds``."""
        if tokens < _SMALLEST:
            return
        size = tokens.bit_length()
        new = seconds / tokens
        old = self._per_token.get(size)
        self._per_token[size] = new if old is None else old + _WEIGHT * (new - old)

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds for ``tokens`` prompt tokens; None before any cold prefill."""
        if not self._per_token:
            return None
        size = tokens.bit_length()
        # Of two equally near classes the smaller: per token it is the cheaper one.
        nearest = min(self._per_token, key=lambda each: (abs(each - size), each))
        return self._per_token[nearest] * tokens
