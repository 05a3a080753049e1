"""[pure] Keys of ours inside ``kv_transfer_params``, and of vLLM's that we look at.

vLLM 0.32.0 ignores keys it does not know, on both workers. The proxy has the same keys in
``proxy/turn/wire.py``; a contract test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ASK = "kvloop"
"""In a request: 1 asks the plugin for the turn event. In a non-streamed answer: its object."""

LEASE_SECONDS = "kvloop_lease_seconds"
"""In a decode request: how long to keep the blocks, in seconds; 0 keeps nothing. In the handle
that answers it: how long they are kept, counted from the end of the answer."""

PIN_REFUSED = "kvloop_pin_refused"
"""In what decode's engine returns: why nothing was kept. It comes alone, without a handle."""

LOCAL_TOKENS = "kvloop_local_tokens"
"""In a handle: prompt tokens that were found in the worker's own prefix cache."""

PULLED_TOKENS = "kvloop_pulled_tokens"
"""In a handle: prompt tokens that were read from the other worker's blocks."""

DO_REMOTE_DECODE = "do_remote_decode"
REMOTE_EXPIRY = "remote_blocks_expiry_time"
"""Deadline in the ``time.perf_counter()`` seconds of the engine that holds the blocks."""


def asks_for_event(params: object) -> bool:
    """Does a request's ``kv_transfer_params`` ask for the turn event?"""
    return isinstance(params, Mapping) and params.get(ASK) == 1


def split_handle(params: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, str | None]:
    """What the engine returned -> (handle or None, why a pin was refused or None)."""
    if not params:
        return None, None
    refused = params.get(PIN_REFUSED)
    if refused is not None:
        return None, str(refused)
    return {key: value for key, value in params.items() if key != ASK}, None
