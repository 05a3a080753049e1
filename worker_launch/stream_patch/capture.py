"""[pure] Watching the engine's results of one request go by.

Looks at result objects by attribute, so it needs no vLLM; it never changes what it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from worker_launch.stream_patch.chunk import encode_turn_event, turn_object
from worker_launch.transfer_keys import split_handle

ENGINE_ERROR = "error"
"""vLLM's finish reason of a request that failed inside the engine, e.g. a failed KV pull."""


class Output(Protocol):
    """The part of ``vllm.outputs.CompletionOutput`` that is read."""

    index: int
    token_ids: Sequence[int]
    finish_reason: str | None


class Result(Protocol):
    """The part of ``vllm.outputs.RequestOutput`` that is read."""

    prompt_token_ids: Sequence[int] | None
    outputs: Sequence[Output]
    finished: bool
    kv_transfer_params: dict[str, Any] | None


class TurnCapture:
    """Collects ids, count, finish reason and handle of one request with one choice.

    ``delta`` says what each result's ``token_ids`` are: the new ones (streamed requests) or all of
    them (the others). It follows the request's ``stream`` flag: ``to_sampling_params`` sets
    ``output_kind`` to DELTA or FINAL_ONLY from it and never to CUMULATIVE (vLLM 0.32.0).
    """

    __slots__ = ("_delta", "_finish_reason", "_finished", "_params", "_prompt_tokens", "_token_ids")

    def __init__(self, *, delta: bool) -> None:
        self._delta = delta
        self._token_ids: list[int] = []
        self._prompt_tokens = 0
        self._finish_reason: str | None = None
        self._finished = False
        self._params: dict[str, Any] | None = None

    def observe(self, result: Result) -> None:
        if result.prompt_token_ids is not None:
            self._prompt_tokens = len(result.prompt_token_ids)
        for output in result.outputs:
            if output.index != 0:
                continue
            if not self._delta:
                self._token_ids.clear()
            self._token_ids.extend(output.token_ids)
            if output.finish_reason is not None:
                self._finish_reason = str(output.finish_reason)
        if result.kv_transfer_params is not None:
            self._params = result.kv_transfer_params
        self._finished = self._finished or result.finished

    @property
    def complete(self) -> bool:
        """Did the engine finish the request without an error? Only then is there an event."""
        return self._finished and self._finish_reason != ENGINE_ERROR

    def event(self) -> str:
        """The event for a stream. Raises TypeError as ``encode_turn_event`` does."""
        handle, refused = split_handle(self._params)
        return encode_turn_event(
            kv_transfer_params=handle,
            token_ids=self._token_ids,
            prompt_tokens=self._prompt_tokens,
            finish_reason=self._finish_reason,
            pin_refused=refused,
        )

    def described(self) -> dict[str, Any]:
        """The object for a whole answer, whose handle is around it."""
        _, refused = split_handle(self._params)
        return turn_object(
            token_ids=self._token_ids,
            prompt_tokens=self._prompt_tokens,
            finish_reason=self._finish_reason,
            pin_refused=refused,
        )
