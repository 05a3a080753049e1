"""[pure] What a turn must know of a generating route. Written for OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import orjson

from proxy.errors import ErrorParts, openai_error, openai_shape
from proxy.relay.sse import DONE, TURN_EVENT_PREFIX, stream_error, take_turn_event
from proxy.session.identity import Caller
from proxy.turn import wire
from proxy.turn.reasons import Reason

DONE_END = b"data: [DONE]\n\n"


class Dialect:
    """One generating route. Its methods decide and touch no socket.

    The defaults suit routes that stream ``data:`` chunks and end with ``[DONE]``.
    """

    name: ClassVar[str]
    """For logs and metrics; a closed list."""
    path: ClassVar[str]
    render_path: ClassVar[str] = ""
    """Route that gives this request's token ids; empty where there is none."""
    count_path: ClassVar[str] = ""
    """Route that counts a request's prompt tokens; only where a request has several renderings."""
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Fields that limit the answer's length, all set to 1 when prefill takes the client's body."""
    only_decode: ClassVar[tuple[str, ...]] = wire.ONLY_DECODE
    """Fields that prefill must not see when it takes the client's body."""
    prefill_adds: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields that it must see then."""
    returns_ids: ClassVar[bool] = True
    """Has the route a field that asks for the answer's token ids?"""

    last_events: ClassVar[tuple[bytes, ...]] = (TURN_EVENT_PREFIX, b"data: [DONE]")
    """Starts of the events that follow the answer's last piece."""

    # The request.

    def check(self, body: dict[str, Any]) -> None:
        """Raises ``ClientError`` naming the first field that is certainly wrong."""
        raise NotImplementedError

    def alone(self, body: Mapping[str, Any]) -> Reason | None:
        """Why one worker must do it all, or None when prefill and decode may share the request."""
        raise NotImplementedError

    def has_media(self, body: Mapping[str, Any]) -> bool:
        """May it hold anything but text? Equal ids would then not mean equal KV."""
        raise NotImplementedError

    def cuts_prompt(self, body: Mapping[str, Any]) -> bool:
        """May the worker leave a part of the prompt out? What is left can then depend on how long
        the answer may be, and prefill is asked for one token."""
        return any(
            body.get(field) is not None for field in ("truncate_prompt_tokens", "truncation_side")
        )

    def given_ids(self, body: Mapping[str, Any]) -> list[int] | None:
        """The prompt's token ids if the request itself has them."""
        return None

    def render_requests(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Bodies for ``render_path``. Several: a worker uses one of them, and which one is learnt
        from ``render_probe`` (``turn/renderings.py``)."""
        leg = wire.client_fields(body)
        leg.pop("stream", None)
        leg.pop("stream_options", None)  # alone it would be refused
        return [leg]

    def render_probe(self, model: str) -> dict[str, Any]:
        """A small request with all the renderings that any has, for both routes."""
        raise NotImplementedError

    def tokenize_request(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Body for ``/tokenize``, or None when it cannot express this request."""
        return None

    def bound_to(self, body: Mapping[str, Any], caller: Caller, decodes: list[str]) -> str:
        """The only decode worker that can serve this request; empty when any can.

        ``decodes``: names of the decode workers. Raises ``ClientError`` when no such worker exists.
        """
        return ""

    # The workers' request bodies.

    def shared_fields(self, caller: Caller, worker: str) -> dict[str, Any]:
        """Fields that both legs must have alike for vLLM to give them one request id, beside the
        header ``X-Request-Id``. ``worker``: decode's name."""
        return {}

    def prefill_body(
        self,
        body: dict[str, Any],
        transfer: Mapping[str, Any],
        shared: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Prefill leg on the client's own route, with the ids in ``transfer`` or, where they are
        unknown, such that prefill renders the client's own request."""
        leg = {k: v for k, v in wire.client_fields(body).items() if k not in self.only_decode}
        for field in self.length_fields:
            leg[field] = 1
        leg["stream"] = False
        leg["kv_transfer_params"] = transfer
        leg.update(self.prefill_adds)
        leg.update(shared or {})
        return orjson.dumps(leg)

    def decode_body(
        self,
        body: dict[str, Any],
        handle: Mapping[str, Any] | None,
        *,
        ids_json: bytes | None,
        lease_seconds: float,
        ask_ids: bool,
        append: bool,
        caller: Caller,
        worker: str,
        shared: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Decode leg, see ``wire.decode_leg``. ``shared``: ``shared_fields`` of a push turn."""
        leg = wire.decode_leg(
            body,
            handle,
            ids_json=ids_json,
            lease_seconds=lease_seconds,
            ask_ids=ask_ids and self.returns_ids,
            append=append,
        )
        self.adapt_decode_leg(leg, caller, worker)
        leg.update(shared or {})
        return orjson.dumps(leg)

    def adapt_decode_leg(self, leg: dict[str, Any], caller: Caller, worker: str) -> None:
        """Change decode's leg, in place, to what the route wants; ``worker`` will get it."""

    # A whole answer.

    def ending_of_answer(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> wire.Ending:
        """What decode said of its KV."""
        return wire.ending_of_answer(body, answer)

    def client_answer(self, body: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """The answer without what is ours."""
        return wire.client_answer(answer, client_asked_ids=bool(body.get("return_token_ids")))

    # A streamed answer, event by event.

    def stream_error(self, data: bytes) -> dict[str, Any] | None:
        """The error that an event's data reports, else None."""
        return stream_error(data)

    def carries_content(self, data: bytes) -> bool:
        """Does this event commit us to the answer? Before it a failed turn can be repeated."""
        raise NotImplementedError

    def may_end(self, block: bytes) -> bool:
        """Quick look at a block of whole events: worth a ``take_ending``?"""
        return TURN_EVENT_PREFIX in block or block.endswith(DONE_END)

    def take_ending(self, block: bytes) -> tuple[bytes, wire.Ending]:
        """The block without what is ours, and what decode said of its KV."""
        rest, event = take_turn_event(block)
        return rest, wire.ending_of_event(event)

    def reports_error(self, block: bytes) -> bool:
        """Quick look at a block in mid-stream: does it begin with an error event?"""
        return block.startswith(b'data: {"error"')

    def broken_stream(self) -> bytes:
        """The end of a stream whose worker stopped answering: status 200 is out already."""
        error = openai_error(
            "The model worker stopped answering.", type="api_error", code="worker_failed"
        )
        return b"data: " + error + b"\n\n" + DONE_END

    # Errors.

    def error_shape(self, parts: ErrorParts) -> bytes:
        """An error that ends a request, in the route's own shape."""
        return openai_shape(parts)

    def refusal(self, status: int, body: bytes) -> bytes:
        """A worker's own refusal, in the route's own shape."""
        if b'"error"' in body:
            return body
        # The web framework's own words, which follow no API: no such route, most likely.
        return self.error_shape(unserved(status))


def unserved(status: int) -> ErrorParts:
    """What a worker's answer means that is no API's error."""
    if status == 404:
        return ErrorParts(
            404, "The model's workers do not serve this route.", "not_found", "route_not_served"
        )
    return ErrorParts(status, "The model's worker refused the request.", "invalid_request_error")


def is_done(data: bytes) -> bool:
    return data == DONE


def parsed(data: bytes) -> dict[str, Any] | None:
    """An event's data as a JSON object, else None."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def only_choice(data: bytes) -> dict[str, Any] | None:
    """The single choice of a chunk, None when the chunk is anything else."""
    chunk = parsed(data)
    choices = chunk.get("choices") if chunk is not None else None
    if not isinstance(choices, list) or len(choices) != 1:
        return None
    return choices[0] if isinstance(choices[0], dict) else None


def dicts(value: object) -> Iterator[dict[str, Any]]:
    """The objects of a list; nothing for anything else."""
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))
