"""[pure] Plan -> worker request bodies. The only home of ``kv_transfer_params`` keys.

Field meanings were read in vLLM 0.32.0 (``distributed/kv_transfer/kv_connector/v1/nixl/``) and
measured on real workers; ``kvloop*`` keys are ours and are ignored by stock workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from proxy.session.holding import Holding
from proxy.turn.plan import PrefillWithPull

COMPLETIONS_PATH = "/v1/completions"

STRIPPED_FROM_CLIENTS = ("kv_transfer_params", "ec_transfer_params", "conversation_id")
"""Never forwarded from a client: the first two would let it read any worker's KV (they carry
engine ids, hosts, block ids and token ids), the last is ours and unknown to strict servers."""

ONLY_DECODE = (
    "stream",
    "stream_options",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "return_token_ids",
    "thinking_token_budget",
)
"""Removed when prefill must render the messages itself. It samples one token that is thrown away:
``max_completion_tokens`` beats ``max_tokens``, ``min_tokens`` above it is a 400, a stop string at
token one loses the handle. ``tool_choice`` and the like stay: they can change the rendered prompt,
and decode must find in prefill's blocks the prompt that it renders itself."""


_SHOWS_PROMPT = ("return_prompt_text", "enable_response_messages")
"""Fields that put the prompt's text into the answer: decode must render it, ids have no text."""


def _shows_prompt(body: Mapping[str, Any]) -> bool:
    return any(body.get(field) for field in _SHOWS_PROMPT)


def client_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The client's body without what a client may not set."""
    clean = {key: value for key, value in body.items() if key not in STRIPPED_FROM_CLIENTS}
    xargs = clean.get("vllm_xargs")
    if isinstance(xargs, dict) and any(key in STRIPPED_FROM_CLIENTS for key in xargs):
        # vLLM merges vllm_xargs into the same dict that carries kv_transfer_params.
        clean["vllm_xargs"] = {k: v for k, v in xargs.items() if k not in STRIPPED_FROM_CLIENTS}
    return clean


def transfer_for_prefill(
    plan: PrefillWithPull | None, release: Holding | None = None
) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill leg: pull, release, or neither."""
    if plan is not None:
        assert plan.holding.handle is not None
        groups = plan.holding.handle["remote_block_ids"]
        return {
            **plan.holding.handle,
            "remote_num_tokens": plan.tokens,
            "remote_block_ids": [group[: plan.blocks] for group in groups],
        }
    if release is not None and release.handle is not None:
        return {**release.handle, "remote_num_tokens": 0}
    return {"do_remote_decode": True, "do_remote_prefill": False}


_PLACE = (
    "remote_engine_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size",
)  # fmt: skip


def push_place(prefill_handle: Mapping[str, Any]) -> dict[str, Any]:
    """Of a handle of prefill's: what stays the same from turn to turn, its engine's coordinates."""
    return {field: prefill_handle[field] for field in _PLACE if field in prefill_handle}


def push_handle(place: Mapping[str, Any], pair_id: str) -> dict[str, Any]:
    """A handle for decode before prefill has answered, if prefill pushes.

    Decode then waits for writes; the request and block ids in it are read by nobody. How much of
    the prompt prefill had cached is not known either: left out, decode would count all of it as
    cached in the client's usage.
    """
    return {
        **place,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": pair_id,
        "remote_block_ids": [],
        "remote_prefill_cached_tokens": 0,
        "transfer_mode": "push",
    }


def transfer_for_push(body: Mapping[str, Any], ids_json: bytes | None) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill leg on decode's endpoint, with the ids for both."""
    transfer = transfer_for_prefill(None)
    if ids_json is not None and not _shows_prompt(body):
        transfer["prompt_token_ids"] = orjson.Fragment(ids_json)
    return transfer


def prefill_body(
    body: Mapping[str, Any],
    ids_json: bytes,
    transfer: Mapping[str, Any],
    *,
    ask_ids: bool = False,
) -> bytes:
    """Prefill leg over known token ids: a one-token text completion.

    Only what changes the KV goes along (model or adapter, cache salt), plus scheduling priority:
    templates, tools and sampling mean nothing to a prompt that is already token ids.
    """
    leg: dict[str, Any] = {
        "model": body["model"],
        "prompt": orjson.Fragment(ids_json),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": transfer,
    }
    for field in ("cache_salt", "priority"):
        if body.get(field) is not None:
            leg[field] = body[field]
    if ask_ids:
        leg["return_token_ids"] = True
    return orjson.dumps(leg)


def cold_replay_body(body: Mapping[str, Any], ids_json: bytes) -> bytes:
    """The same prefill computed from nothing: no transfer, and a salt that no cached block has."""
    leg = {
        "model": body["model"],
        "prompt": orjson.Fragment(ids_json),
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": uuid4().hex,
        "return_token_ids": True,
    }
    return orjson.dumps(leg)


def first_token(answer: Mapping[str, Any]) -> int | None:
    """Id of the one token that a prefill leg sampled, if it was asked for."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    ids = choices[0].get("token_ids")
    return ids[0] if isinstance(ids, list) and ids and type(ids[0]) is int else None


def release_body(model: str, holding: Holding) -> bytes:
    """A prefill request whose only purpose is that decode frees ``holding``.

    With a count of zero prefill reads nothing and sends the notification that decode waits for.
    It is the one release call the protocol has.
    """
    return prefill_body({"model": model}, b"[0]", transfer_for_prefill(None, holding))


def decode_leg(
    body: dict[str, Any],
    prefill_handle: Mapping[str, Any] | None,
    *,
    ids_json: bytes | None,
    lease_seconds: float,
    ask_ids: bool = True,
    append: bool = False,
) -> dict[str, Any]:
    """Decode leg: the client's request with prefill's handle.

    ``prefill_handle`` is passed on whole (0.32.0 corrects ``cached_tokens`` from an unknown-looking
    field in it). None: decode does everything, and the field is left out, because on a
    bidirectional worker an object with neither flag set pins its blocks for ever.
    ``lease_seconds`` tells a worker with our connector how long to retain the blocks; 0 asks it to
    retain nothing. ``ask_ids``: have the worker put token ids into a non-streamed answer; a worker
    with our plugin reports them anyway. ``append``: no handle and none needed, and the worker has
    our connector, which gives such a turn a lease as well.
    """
    leg = client_fields(body)
    if prefill_handle is not None or append:
        transfer: dict[str, Any] = {**(prefill_handle or {}), "kvloop": 1}
        if ids_json is not None and not _shows_prompt(leg):
            transfer["prompt_token_ids"] = orjson.Fragment(ids_json)
        transfer["kvloop_lease_seconds"] = lease_seconds
        if lease_seconds and ask_ids and not leg.get("stream"):
            leg["return_token_ids"] = True
        leg["kv_transfer_params"] = transfer
    return leg


def usable_prefill_handle(value: object) -> dict[str, Any] | None:
    """Prefill's answer if decode can pull with it, else None (older workers answer null on EOS)."""
    if not isinstance(value, dict) or value.get("do_remote_prefill") is not True:
        return None
    return value if value.get("remote_block_ids") and value.get("remote_engine_id") else None


def reported_reuse(prefill_handle: Mapping[str, Any]) -> tuple[int, int | None, int | None]:
    """What prefill says it did not compute: (total, pulled from decode, its own cache), in tokens.

    The split is reported by our connector only; stock workers report the total.
    """
    total = prefill_handle.get("remote_prefill_cached_tokens")
    pulled = prefill_handle.get("kvloop_pulled_tokens")
    local = prefill_handle.get("kvloop_local_tokens")
    return (
        total if type(total) is int else 0,
        pulled if type(pulled) is int else None,
        local if type(local) is int else None,
    )


TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")


def client_answer(answer: dict[str, Any], *, client_asked_ids: bool) -> dict[str, Any]:
    """A non-streamed answer without what is ours."""
    clean = without_transfer(answer)
    if not client_asked_ids:
        if "prompt_token_ids" in clean:
            clean["prompt_token_ids"] = None
        for choice in clean.get("choices") or ():
            for field in ("token_ids", "prompt_token_ids"):
                if field in choice:
                    choice[field] = None
    return clean


def without_transfer(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as a worker gives it that transfers nothing: the fields are there and null."""
    return {k: None if k in TRANSFER_FIELDS else v for k, v in answer.items()}


@dataclass(frozen=True, slots=True)
class Ending:
    """What decode said about its KV when it finished.

    ``handle``: whatever stood in the place of a handle, unchecked. ``output_ids`` are certainly all
    of them only if ``from_plugin``. ``pin_refused``: why our connector kept nothing.
    """

    handle: Any = None
    output_ids: list[int] | None = None
    from_plugin: bool = False
    pin_refused: str | None = None


def ending_of_event(event: Mapping[str, Any] | None) -> Ending:
    """The end of a stream, from the plugin's event; None when there was no such event."""
    if event is None:
        return Ending()
    ids = event.get("token_ids")
    return Ending(
        handle=event.get("kv_transfer_params"),
        output_ids=ids if isinstance(ids, list) else None,
        from_plugin=True,
        pin_refused=event.get("pin_refused"),
    )


def ending_of_answer(body: Mapping[str, Any], answer: Mapping[str, Any]) -> Ending:
    """The end of a non-streamed answer.

    The plugin puts its object beside the handle's fields. Without it the answer's own ids serve,
    unless the client hid the reasoning, whose ids they then leave out.
    """
    params = answer.get("kv_transfer_params")
    if isinstance(params, dict) and isinstance(ours := params.get("kvloop"), dict):
        handle = {key: field for key, field in params.items() if key != "kvloop"}
        return ending_of_event({**ours, "kv_transfer_params": handle})
    ids = None
    choices = answer.get("choices")
    hidden = body.get("include_reasoning") is False
    if not hidden and isinstance(choices, list) and len(choices) == 1:
        ids = choices[0].get("token_ids") if isinstance(choices[0], dict) else None
    return Ending(handle=params, output_ids=ids if isinstance(ids, list) else None)
