"""Answers of the four routes in a form that can be compared: streams put together, ids and times
left out, cached tokens apart."""

from __future__ import annotations

import json
from typing import Any

_PASSING = frozenset(
    {
        "id", "created", "created_at", "system_fingerprint", "item_id", "call_id", "response_id",
        "previous_response_id", "sequence_number", "signature", "obfuscation", "metrics",
        "request_id",
    }
)  # fmt: skip
"""Ids, times and fingerprints: different in every answer of one and the same worker."""


def events(text: str) -> list[dict[str, Any]]:
    """The objects in a stream's data lines."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def assembled(route: str, text: str, *, streamed: bool) -> Any:
    """A whole answer, or a stream's content as one."""
    if not streamed:
        return json.loads(text)
    put_together = {"/v1/messages": _messages, "/v1/responses": _response}.get(route, _choices)
    return _without(put_together(events(text)), "reasoning_tokens")


def _without(value: Any, key: str) -> Any:
    """vLLM counts reasoning tokens in a stream by its pieces, and how many tokens come in one
    depends on the machine's load: one and the same worker says 39 or 40."""
    if isinstance(value, list):
        return [_without(each, key) for each in value]
    if isinstance(value, dict):
        return {name: _without(each, key) for name, each in value.items() if name != key}
    return value


def _choices(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"choices": {}, "usage": None, "errors": [], "objects": set()}
    for chunk in chunks:
        if "error" in chunk:
            found["errors"].append(chunk["error"])
            continue
        found["objects"].add((chunk["object"], chunk["model"]))
        found["usage"] = chunk.get("usage") or found["usage"]
        for choice in chunk["choices"]:
            into = found["choices"].setdefault(choice["index"], {"logprobs": [], "calls": {}})
            for field in ("finish_reason", "stop_reason"):
                into[field] = choice.get(field) or into.get(field)
            if choice.get("logprobs"):
                into["logprobs"].append(choice["logprobs"])
            for field in ("token_ids", "prompt_token_ids"):
                into[field] = (into.get(field) or []) + (choice.get(field) or [])
            for field, piece in {"text": choice.get("text"), **choice.get("delta", {})}.items():
                if field == "tool_calls":
                    for call in piece or ():
                        made = into["calls"].setdefault(
                            call["index"], {"name": "", "arguments": ""}
                        )
                        for part in ("name", "arguments"):
                            made[part] += call.get("function", {}).get(part) or ""
                elif isinstance(piece, str) and field != "role":
                    into[field] = into.get(field, "") + piece
                elif piece is not None:
                    into[field] = piece
    for choice in found["choices"].values():
        choice["logprobs"] = _joined(choice["logprobs"])
    return {**found, "objects": sorted(found["objects"])}


def _joined(parts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Log-probability lists of chunks, one after the other."""
    made: dict[str, list[Any]] = {}
    for part in parts:
        for field, values in part.items():
            made[field] = made.get(field, []) + (values or [])
    return made


def _messages(stream: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {"content": []}
    for event in stream:
        match event["type"]:
            case "message_start":
                made |= {k: v for k, v in event["message"].items() if k != "content"}
            case "content_block_start":
                made["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                for field, piece in event["delta"].items():
                    if field not in ("type", "signature"):
                        block = made["content"][event["index"]]
                        block[field] = block.get(field, "") + piece
            case "message_delta":
                made |= event["delta"]
                made["usage"] = event["usage"]
            case "error":
                made["error"] = event["error"]
    made["kinds"] = [e["type"] for e in stream if e["type"] != "content_block_delta"]
    return made


def _response(stream: list[dict[str, Any]]) -> dict[str, Any]:
    last = stream[-1]
    text = "".join(e["delta"] for e in stream if e["type"].endswith("text.delta"))
    kinds = [e["type"] for e in stream if not e["type"].endswith(".delta")]
    return {"last": last, "said": text, "kinds": kinds}


def cached_tokens(answer: Any) -> int | None:
    """Prompt tokens that the answer's usage says were not computed; None when it does not say."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if usage is None and isinstance(answer, dict):
        usage = answer.get("last", {}).get("response", {}).get("usage")
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] or 0) if details else None


def comparable(value: Any) -> Any:
    """Without what differs in every answer, and with prompt tokens counted whole."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "cache_read_input_tokens" in value:  # Anthropic counts cached tokens apart
        total = value["input_tokens"] + (value["cache_read_input_tokens"] or 0)
        value = {**value, "input_tokens": total}
    passing = _PASSING | {
        "cached_tokens", "created_cache_tokens", "cache_read_input_tokens", "cache_write_tokens",
        "cache_creation_input_tokens",
    }  # fmt: skip
    return {key: comparable(each) for key, each in value.items() if key not in passing}


def differences(one: Any, other: Any, *, tolerance: float, place: str = "") -> list[str]:
    """Where two comparable answers differ; numbers with a fraction may by ``tolerance``."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in sorted(set(one) | set(other), key=str):
            if key not in one or key not in other:
                found.append(f"{place}.{key}: only in one")
            else:
                found += differences(
                    one[key], other[key], tolerance=tolerance, place=f"{place}.{key}"
                )
        return found
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return [f"{place}: {len(one)} and {len(other)} entries"]
        return [
            found
            for index, (a, b) in enumerate(zip(one, other, strict=True))
            for found in differences(a, b, tolerance=tolerance, place=f"{place}[{index}]")
        ]
    if isinstance(one, float) and isinstance(other, float) and abs(one - other) <= tolerance:
        return []
    return [] if one == other else [f"{place}: {one!r} and {other!r}"]
