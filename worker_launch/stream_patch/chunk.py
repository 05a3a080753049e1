"""[pure] The one extra event of a turn: its bytes in a stream, its object in a whole answer.

In a stream it is a server-sent event *comment* (a line that starts with a colon), because every SSE
parser must ignore comments (WHATWG HTML, 9.2.6): a client that talks to the worker directly sees a
plain OpenAI stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TURN_EVENT_PREFIX = ": kvloop "
TURN_EVENT_VERSION = 1


def turn_object(
    *,
    token_ids: Sequence[int],
    prompt_tokens: int,
    finish_reason: str | None,
    pin_refused: str | None = None,
) -> dict[str, Any]:
    """What describes a turn besides its handle; ``pin_refused`` appears only when there is one.

    ``token_ids`` are all output ids of choice 0, hidden reasoning included, because they name the
    KV that the handle leads to. ``prompt_tokens`` is how many came before them.
    """
    described: dict[str, Any] = {
        "v": TURN_EVENT_VERSION,
        "token_ids": list(token_ids),
        "prompt_tokens": prompt_tokens,
        "finish_reason": finish_reason,
    }
    if pin_refused is not None:
        described["pin_refused"] = pin_refused
    return described


def encode_turn_event(
    *,
    kv_transfer_params: Mapping[str, Any] | None,
    token_ids: Sequence[int],
    prompt_tokens: int,
    finish_reason: str | None,
    pin_refused: str | None = None,
) -> str:
    """The event as it goes into the stream, one line and a blank one.

    Raises TypeError when ``kv_transfer_params`` holds something JSON has no form for.
    """
    described = turn_object(
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
        finish_reason=finish_reason,
        pin_refused=pin_refused,
    )
    handle = None if kv_transfer_params is None else dict(kv_transfer_params)
    body = {"v": described.pop("v"), "kv_transfer_params": handle, **described}
    # ASCII only and no line breaks: whatever splits lines on the way finds exactly one.
    return f"{TURN_EVENT_PREFIX}{json.dumps(body, separators=(',', ':'), ensure_ascii=True)}\n\n"
