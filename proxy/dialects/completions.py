"""[pure] ``POST /v1/completions``: the prompt is text or token ids, and no template is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.dialects import checks
from proxy.dialects.base import Dialect, is_done, only_choice
from proxy.session.identity import Caller
from proxy.turn.planner import may_split
from proxy.turn.reasons import Reason

_PROMPT = "must be a string, an array of strings, an array of token ids, or an array of such arrays"
_FIELDS: dict[str, checks.Rule] = {
    **checks.OPENAI_SAMPLING,
    "n": checks.POSITIVE,
    "best_of": checks.POSITIVE,
    "max_tokens": checks.COUNT,
    "min_tokens": checks.COUNT,
    "logprobs": (checks.integer(-1), "must be an integer"),
    "echo": checks.BOOLEAN,
    "suffix": checks.TEXT,
    "return_token_ids": checks.BOOLEAN,
}


class Completions(Dialect):
    """OpenAI's text completions. Decode gets the ids as its prompt."""

    name: ClassVar[str] = "completions"
    path: ClassVar[str] = "/v1/completions"

    def check(self, body: dict[str, Any]) -> None:
        checks.check_model(body)
        if body.get("prompt_embeds") is None:
            checks.require(body, "prompt")
            if not _is_prompt(body["prompt"]):
                raise checks.wrong("prompt", _PROMPT)
        checks.check_fields(body, _FIELDS)

    def alone(self, body: Mapping[str, Any]) -> Reason | None:
        if body.get("prompt_embeds") is not None:
            return Reason.MEDIA
        prompt = body["prompt"]
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            # One handle names one prompt's blocks; the others would stay pinned. An array of one
            # is answered with the same shape as a plain prompt, but is too rare to unpack.
            return Reason.MULTIPLE_PROMPTS
        if body.get("max_tokens") == 0:
            return Reason.PROMPT_LOGPROBS  # nothing is generated: the prompt is what is asked about
        return may_split(body)

    def has_media(self, body: Mapping[str, Any]) -> bool:
        return False

    def given_ids(self, body: Mapping[str, Any]) -> list[int] | None:
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) and not self._remade(body) else None

    def tokenize_request(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        if self._remade(body) or not isinstance(body["prompt"], str):
            return None
        leg = {"model": body["model"], "prompt": body["prompt"]}
        if body.get("add_special_tokens") is not None:
            leg["add_special_tokens"] = body["add_special_tokens"]
        return leg

    def _remade(self, body: Mapping[str, Any]) -> bool:
        """Does the worker make another prompt of the given one? It is cut, or put around a suffix
        with the marks of a model that fills in the middle; ids of the given text are then wrong."""
        return body.get("suffix") is not None or self.cuts_prompt(body)

    def adapt_decode_leg(self, leg: dict[str, Any], caller: Caller, worker: str) -> None:
        """The route ignores ids among the transfer parameters and takes them as its prompt."""
        ids = leg.get("kv_transfer_params", {}).pop("prompt_token_ids", None)
        if ids is not None:
            leg["prompt"] = ids

    def carries_content(self, data: bytes) -> bool:
        if is_done(data):
            return True
        choice = only_choice(data)
        return choice is None or bool(choice.get("text") or choice.get("finish_reason"))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    if type(value[0]) is int:
        return checks.token_ids(value)
    return all(isinstance(each, str) for each in value) or all(map(checks.token_ids, value))


COMPLETIONS = Completions()
