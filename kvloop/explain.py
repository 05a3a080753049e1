"""``kvloop explain``: the story of one turn, told from the proxy's log.

The log is one JSON object a line (``proxy/log.py``); what stands before the object is ignored, so
output of ``docker compose logs`` or ``kubectl logs`` does as well. The turn's own line says most,
others with its request id say what went wrong on the way, and the ids of holdings connect it to the
turn before and the one after.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any

Line = dict[str, Any]

_QUIET = {"turn"}
"""Events that the story itself tells."""


class Unexplained(Exception):
    """The log does not tell which turn is meant; the message says why."""


@dataclass
class Case:
    """All lines about one request, and its neighbours."""

    turn: Line
    """Its line when it was over."""
    events: list[Line] = field(default_factory=list)
    before: Line | None = None
    """The turn that left the holding which this one claimed."""
    after: Line | None = None
    """The turn that claimed the holding which this one left."""


def parse(lines: Iterable[str]) -> list[Line]:
    """The log's objects, in order. Whatever is none is left out."""
    found = []
    for line in lines:
        start = line.find("{")
        if start < 0:
            continue
        try:
            value = json.loads(line[start:])
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "event" in value:
            found.append(value)
    return found


def find(lines: list[Line], request: str) -> Case:
    """The case of a request id, or of the only one that begins so. Raises ``Unexplained``."""
    known = {str(line["request"]) for line in lines if line.get("request")}
    wanted = [request] if request in known else sorted(i for i in known if i.startswith(request))
    if not wanted:
        raise Unexplained(f"No line of this log is about request {request}.")
    if len(wanted) > 1:
        some = ", ".join(wanted[:5])
        raise Unexplained(f"{len(wanted)} requests begin with {request}: {some} ...")
    own = [line for line in lines if line.get("request") == wanted[0]]
    turns = [line for line in own if line["event"] == "turn"]
    if not turns:
        events = ", ".join(str(line["event"]) for line in own)
        raise Unexplained(
            f"Request {wanted[0]} is not over, or its end is not in this log. So far: {events}."
        )
    case = Case(turns[-1], [line for line in own if line["event"] not in _QUIET])
    for line in lines:
        if line["event"] != "turn":
            continue
        if case.turn.get("holding_used") and line.get("holding_left") == case.turn["holding_used"]:
            case.before = line
        if case.turn.get("holding_left") and line.get("holding_used") == case.turn["holding_left"]:
            case.after = line
    return case


def tell(case: Case) -> list[str]:
    """The story, one sentence or two a line."""
    turn = case.turn
    return [
        line
        for line in (
            _opening(turn),
            _reason(turn),
            _lookup(case),
            *(_event(event, turn) for event in case.events),
            _prefill(turn),
            _decode(turn),
            _ending(turn),
            _kept(turn),
            _next(case),
        )
        if line
    ]


def meanings() -> dict[str, str]:
    """Reason -> what it means: the text below each in ``proxy/turn/reasons.py``."""
    source = (resources.files("proxy") / "turn" / "reasons.py").read_text()
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for value, text in zip(node.body, node.body[1:], strict=False):
            match value, text:
                case (
                    ast.Assign(value=ast.Constant(value=str(reason))),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[reason] = " ".join(words.split())
    return found


def _opening(turn: Line) -> str:
    session = turn.get("session", "")
    named = f"session {session}" if session != "by-prefix" else "a session without an id"
    how = "streamed" if turn.get("streamed") else "not streamed"
    tokens = f"{turn['prompt_tokens']:,} prompt tokens" if turn.get("prompt_tokens") else ""
    trace = f" Trace {turn['trace']}." if turn.get("trace") else ""
    parts = ", ".join(filter(None, (named, how, tokens)))
    return f"Request {turn['request']}, over at {_clock(turn)}: {parts}.{trace}"


def _reason(turn: Line) -> str:
    if not turn.get("route"):
        return "It got no route: it was refused or given up before it was planned."
    reason = str(turn["reason"])
    text = meanings().get(reason, "")
    return f"Route {turn['route']}, reason {reason}. {text}".rstrip()


def _lookup(case: Case) -> str:
    turn, before = case.turn, case.before
    tokenised = turn["legs_ms"].get("tokenise")
    said = f"Tokenised in {_ms(tokenised)}." if tokenised is not None else ""
    if not turn.get("holding_used"):
        return said
    left = f"holding {turn['holding_used'][:8]}"
    if before is not None:
        ago = (_time(turn) - _time(before)).total_seconds() - turn["total_ms"] / 1000
        left += f", left by request {before['request']} {max(0.0, ago):.1f} s before"
    lost = turn.get("mismatched_tokens") or 0
    rest = f"; {lost:,} of its tokens are not in this prompt" if lost else ""
    return f"{said} Claimed {left}{rest}.".strip()


def _event(event: Line, turn: Line) -> str:
    told = {k: v for k, v in event.items() if k not in ("time", "level", "event", "request")}
    details = ", ".join(f"{key} {value}" for key, value in told.items() if key != "traceback")
    return f"  {_clock(event)} {event['event']}: {details}".rstrip(": ")


def _prefill(turn: Line) -> str:
    took = turn["legs_ms"].get("prefill")
    if took is None:
        return ""
    pulled, cached = turn.get("pulled_tokens"), turn.get("prefill_cached_tokens")
    computed = turn["prompt_tokens"] - turn["reused_tokens"]
    if pulled is None:
        did = f"reused {turn['reused_tokens']:,} tokens and computed {computed:,}"
    else:
        did = f"pulled {pulled:,} tokens from decode, found {cached or 0:,} in its own cache and "
        did += f"computed {computed:,}"
    if not turn["prompt_tokens"]:
        did = "computed the prompt"
    planned = turn.get("planned_pull") or 0
    short = f" (planned to pull {planned:,})" if planned and planned != pulled else ""
    cold = turn.get("cold_prefill_ms")
    than = f"; cold about {_ms(cold)} (estimated)" if cold is not None else ""
    return f"Prefill {turn['prefill']} {did}{short}, in {_ms(took)}{than}."


def _decode(turn: Line) -> str:
    if not turn.get("decode"):
        return ""
    again = f" on attempt {turn['attempts']}" if turn.get("attempts", 1) > 1 else ""
    took = turn["legs_ms"].get("decode")
    if took is None:
        return f"Decode {turn['decode']} sent no content{again}."
    what = "first content" if turn.get("streamed") else "the whole answer"
    return f"Decode {turn['decode']} sent {what} after {_ms(took)}{again}."


def _ending(turn: Line) -> str:
    first = f"first content after {_ms(turn['ttft_ms'])}, " if turn.get("ttft_ms") else ""
    pace = ""
    if turn.get("itl_ms") is not None:
        pace = f"a piece every {_ms(turn['itl_ms'])}, longest pause {_ms(turn['longest_gap_ms'])}, "
    outcome = {
        "ok": "complete",
        "error": "answered with an error",
        "stream_error": "broken off with an error",
        "client_left": "given up by the client",
        "client_stalled": "cut off, because the client took nothing",
    }.get(turn["outcome"], turn["outcome"])
    return f"The client saw: {first}{pace}{outcome} after {_ms(turn['total_ms'])}."


def _kept(turn: Line) -> str:
    if turn.get("holding_left"):
        until = f" for {turn['kept_seconds']:.0f} s" if turn.get("kept_seconds") else ""
        return (
            f"Decode keeps {turn['kept_tokens']:,} tokens{until}, as holding "
            f"{turn['holding_left'][:8]}."
        )
    return f"Nothing is kept for a next turn: {turn.get('kept') or turn['outcome']}."


def _next(case: Case) -> str:
    if case.after is None:
        return ""
    return f"Request {case.after['request']} at {_clock(case.after)} claimed that."


def _time(line: Line) -> datetime:
    return datetime.fromisoformat(line["time"])


def _clock(line: Line) -> str:
    return _time(line).strftime("%H:%M:%S.%f")[:-3]


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"
