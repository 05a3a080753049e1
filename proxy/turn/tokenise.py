"""[pure] Which request asks a worker for a prompt's token ids, and how its answer is read.

A generating route's own ``/render`` runs the worker's request path up to the engine, so its ids are
by construction those the worker would run, and bad requests are refused before any prefill. It
needs ``--enable-scale-out``; a worker without it answers 403. ``/tokenize`` is always there but
takes fewer fields: it is used only for requests that it can express.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

TOKENIZE_PATH = "/tokenize"

_SAME = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
)
_NOT_EXPRESSIBLE = ("truncate_prompt_tokens", "truncation_side", "mm_processor_kwargs")
"""Fields that change the prompt and that ``/tokenize`` ignores."""


def tokenize_request(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Body for ``/tokenize``, or None when it cannot describe this request.

    Template arguments are put together as vLLM's ``ChatCompletionRequest.build_chat_params`` does:
    top-level fields override ``chat_template_kwargs``; None and "auto" count as unset.
    """
    if any(body.get(field) is not None for field in _NOT_EXPRESSIBLE):
        return None
    if body.get("tools") and body.get("tool_choice") not in (None, "auto"):
        return None  # some templates render the choice, and some servers drop the tools for "none"
    leg = {field: body[field] for field in _SAME if body.get(field) is not None}
    leg["messages"] = [_reasoning_renamed(message) for message in body["messages"]]
    template = dict(body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in template:
        template["enable_thinking"] = effort != "none"
    for field in ("documents", "reasoning_effort"):
        if body.get(field) not in (None, "auto"):
            template[field] = body[field]
    if template:
        leg["chat_template_kwargs"] = template
    return leg


def _reasoning_renamed(message: Any) -> Any:
    """The chat route accepts the old name ``reasoning_content``; ``/tokenize`` does not."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def render_is_off(status: int, answer: Mapping[str, Any] | None) -> bool:
    """Does this refusal mean that the route is missing, rather than that the request is bad?"""
    return status in (403, 405) or (status == 404 and not (answer and "error" in answer))


_CUT_OUT = "\0ids"
_BLANKS = (b" ", b"\n", b"\r", b"\t")


def token_ids(answer: bytes) -> bytes | None:
    """The ids in a ``/render`` or ``/tokenize`` answer as a JSON array, None when there are none or
    they do not stand for the KV. Raises ValueError for what is no JSON object.

    ``features`` describes media, whose placeholders have equal ids for different content. The array
    is cut out of the answer before that is read: to make numbers of the ids of a long prompt costs
    more than all that is done with them.
    """
    for name in (b'"token_ids":', b'"tokens":'):
        start = answer.find(name + b"[") + len(name)
        if start >= len(name):
            end = answer.find(b"]", start) + 1
            rest = _object(b'%b"\\u0000ids"%b' % (answer[:start], answer[end:]))
            if rest is not None and _ids(rest) == _CUT_OUT:
                found = answer[start:end]
                if any(blank in found for blank in _BLANKS):
                    break  # the ids are compared as text: it must have one form
                return found if len(found) > 2 else None
    whole = _object(answer)
    if whole is None:
        raise ValueError("no JSON object")
    ids = _ids(whole)
    return orjson.dumps(ids) if isinstance(ids, list) and ids else None


def _ids(answer: Mapping[str, Any]) -> Any:
    return None if answer.get("features") else answer.get("token_ids", answer.get("tokens"))


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def agreed_ids(answers: Sequence[bytes]) -> bytes | None:
    """The ids that all answers give, None when one gives none or another's."""
    first = token_ids(answers[0])
    return first if all(token_ids(each) == first for each in answers[1:]) else None


UNKNOWN = -1
"""In place of a rendering's index: it cannot be told."""


def rendering_used(answers: Sequence[bytes | None], counted: Mapping[str, Any] | None) -> int:
    """Which of several renderings of one request a worker uses (its index), by its own count of the
    request's tokens; ``UNKNOWN`` when none has that length, or others have it with other ids.
    Raises ValueError as ``token_ids``."""
    length = counted.get("input_tokens") if counted else None
    found = {
        index: ids
        for index, each in enumerate(answers)
        if each and (ids := token_ids(each)) and ids.count(b",") + 1 == length
    }
    first = next(iter(found), UNKNOWN)
    return first if all(ids == found[first] for ids in found.values()) else UNKNOWN
