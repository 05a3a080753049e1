"""[pure] Lines of a log -> traffic.

Read are: our own turn log; OpenAI-format JSONL (one request or one conversation a line); logs of
token counts as JSON lines or CSV (vLLM's or a gateway's access log with ``usage``, nginx with a
JSON log format); block-hash traces as Mooncake's and Bailian's.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from kvloop.advise.traffic import Traffic, Turn, ordered


class Format(StrEnum):
    """What a file is."""

    TURN_LOG = "kvloop"
    OPENAI = "openai"
    COUNTS = "counts"
    HASHES = "hashes"


class UnreadableTraffic(ValueError):
    """No turn could be made of the file; the message says what was looked for."""


_TIME = ("time", "timestamp", "ts", "@timestamp", "time_iso8601", "msec", "created", "start")
_SESSION = (
    "session",
    "session_id",
    "conversation_id",
    "conversation",
    "http_x_session_id",
    "http_x_conversation_id",
    "x_session_id",
    "prompt_cache_key",
    "chat_id",
)
_PROMPT = ("prompt_tokens", "input_tokens", "input_length", "num_prompt_tokens")
_OUTPUT = ("completion_tokens", "output_tokens", "output_length", "num_generation_tokens")
_DURATION = ("duration", "request_time", "latency", "e2e_latency", "total", "duration_s")
_CHARACTERS = 4.0
"""Per token of English text with usual tokenizers, where a line has no ``usage`` to learn from."""

_MOONCAKE_BLOCK = 512
_BAILIAN_BLOCK = 16


def read(lines: Iterable[str], *, kind: Format | None = None, block: int | None = None) -> Traffic:
    """``kind`` None: found out from the first line. ``block``: tokens per hash of a hash trace.

    Raises ``UnreadableTraffic``.
    """
    kept = [line for line in lines if line.strip()]
    if not kept:
        raise UnreadableTraffic("the file is empty")
    rows, skipped = _rows(kept)
    if not rows:
        raise UnreadableTraffic("no line is a JSON object, and the file is no CSV with a header")
    kind = kind or _sniff(rows)
    match kind:
        case Format.TURN_LOG:
            traffic = _turn_log(rows, skipped)
        case Format.OPENAI:
            traffic = _openai(rows, skipped)
        case Format.HASHES:
            traffic = _hashes(rows, skipped, block)
        case Format.COUNTS:
            traffic = _counts(rows, skipped)
    if not traffic.turns:
        why = ", ".join(f"{count} lines: {reason}" for reason, count in traffic.skipped.items())
        raise UnreadableTraffic(f"no turn in the file, read as {kind}; {why}")
    return traffic


def _rows(lines: Sequence[str]) -> tuple[list[dict[str, Any]], Counter[str]]:
    skipped: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for line in lines:
        start = line.find("{")
        if start < 0:
            skipped["not JSON"] += 1
            continue
        try:
            value = json.loads(line[start:])
        except ValueError:
            skipped["not JSON"] += 1
            continue
        if isinstance(value, dict):
            rows.append(value)
    if rows:
        return rows, skipped
    reader = csv.DictReader(lines)
    names = {name.strip() for name in reader.fieldnames or ()}
    if not names & set(_PROMPT):
        return [], skipped
    return [{k.strip(): v for k, v in row.items() if k} for row in reader], Counter()


def _sniff(rows: Sequence[Mapping[str, Any]]) -> Format:
    for row in rows[:200]:
        if row.get("event") == "turn" and "route" in row:
            return Format.TURN_LOG
        if isinstance(row.get("hash_ids"), list):
            return Format.HASHES
        if isinstance(_body(row).get("messages"), list):
            return Format.OPENAI
        usage = row.get("usage")
        if _first(usage if isinstance(usage, dict) else row, _PROMPT) is not None:
            return Format.COUNTS
    raise UnreadableTraffic(
        "not recognised: looked for our turn events, 'messages', 'hash_ids' and a prompt length "
        f"({', '.join(_PROMPT)})"
    )


# Our own log.


def _turn_log(rows: Sequence[Mapping[str, Any]], skipped: Counter[str]) -> Traffic:
    turns: list[Turn] = []
    latest: dict[str, int] = {}
    for row in rows:
        if row.get("event") != "turn":
            continue
        end, prompt = _time(row.get("time")), _int(row.get("prompt_tokens"))
        if end is None or not prompt:
            skipped["turn without time or prompt length"] += 1
            continue
        session = str(row.get("session") or "")
        if session in ("", "by-prefix"):
            # The log names no conversation that its client did not name.
            skipped["turn of an unnamed conversation"] += 1
            continue
        start = end - (_number(row.get("total_ms")) or 0.0) / 1000
        shared = _int(row.get("planned_pull")) or None
        if row.get("reason") == "history_diverged":
            shared = 0
        if shared is not None and session in latest and row.get("reason") == "history_grew":
            # All that decode computed was to be pulled: its prompt and its answer but one token.
            last = turns[latest[session]]
            turns[latest[session]] = replace(last, output=max(0, shared - last.prompt + 1))
        latest[session] = len(turns)
        turns.append(Turn(session, start, end, prompt, 0, shared))
    assumed = (
        "a turn that was not pulled and whose prompt grew repeats all of the last one",
        "an answer's length is known where the next turn was to pull it, else it counts as empty",
    )
    return ordered(turns, "kvloop turn log", assumed=assumed, skipped=skipped)


# OpenAI-format requests.


@dataclass
class _Seen:
    """A conversation so far: digests of its messages with their sizes in tokens."""

    name: str
    digests: list[bytes] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def _openai(rows: Sequence[Mapping[str, Any]], skipped: Counter[str]) -> Traffic:
    requests = list(_requests(rows, skipped))
    rate, learnt = _characters_per_token(requests)
    timed = sum(r.start is not None for r in requests) * 2 > len(requests)
    by_name: dict[str, _Seen] = {}
    by_tail: dict[bytes, _Seen] = {}
    turns: list[Turn] = []
    for number, request in enumerate(requests):
        digests, sizes = _chain(request.messages, rate)
        seen = by_name.get(request.session) if request.session else None
        if seen is None and not request.session:
            # As the proxy finds a session without an id: by its longest known beginning.
            seen = next((by_tail[d] for d in reversed(digests) if d in by_tail), None)
        if seen is None:
            seen = _Seen(request.session or f"found-{number}")
        common = 0
        for mine, other in zip(digests, seen.digests, strict=False):
            if mine != other:
                break
            common += 1
        prompt = request.prompt or round(sum(sizes))
        share = sum(sizes[:common]) / max(1.0, sum(sizes))
        start = request.start if timed and request.start is not None else float(number)
        end = start + (request.seconds or 0.0)
        output = request.output or 0
        turns.append(Turn(seen.name, start, end, prompt, output, round(prompt * share)))
        answered = list(digests)
        if request.answer:
            # What the model said is in decode's KV as well, and comes back with the next request.
            more, _ = _chain(
                [*request.messages, {"role": "assistant", "content": request.answer}], rate
            )
            answered = list(more)
        seen.digests = answered
        by_name[seen.name] = seen
        by_tail.update(dict.fromkeys(answered, seen))
    assumed = [
        f"{rate:.1f} characters a token"
        + (", learnt from the lines that carry usage" if learnt else ", a usual value for English"),
        "messages are compared as text, whole messages at a time",
    ]
    if not any(request.answer for request in requests):
        assumed.append("the log holds no answers: an answer that comes back counts as new text")
    return ordered(turns, "OpenAI-format requests", assumed=assumed, skipped=skipped, timed=timed)


@dataclass(frozen=True)
class _Request:
    session: str
    messages: list[Any]
    start: float | None
    seconds: float | None
    prompt: int | None
    output: int | None
    answer: str


def _requests(rows: Iterable[Mapping[str, Any]], skipped: Counter[str]) -> Iterator[_Request]:
    for row in rows:
        body = _body(row)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            skipped["no 'messages'"] += 1
            continue
        if any(not isinstance(m, dict) for m in messages):
            skipped["a message that is no object"] += 1
            continue
        response = row.get("response")
        response = response.get("body", response) if isinstance(response, dict) else {}
        usage = row.get("usage") or response.get("usage") or {}
        answer = _answer(row, response)
        session = str(_first({**row, **body}, _SESSION) or "")
        if messages[-1].get("role") == "assistant" and not answer:
            yield from _conversation(row, session or f"line-{id(row)}", messages)
            continue
        yield _Request(
            session,
            messages,
            _time(_first(row, _TIME)),
            _number(_first(row, _DURATION)),
            _int(_first(usage, _PROMPT)),
            _int(_first(usage, _OUTPUT)),
            answer,
        )


def _conversation(
    row: Mapping[str, Any], session: str, messages: list[dict[str, Any]]
) -> Iterator[_Request]:
    """A whole conversation in one line: one request for each answer in it."""
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" or index == 0:
            continue
        asked = _time(messages[index - 1].get("timestamp"))
        answered = _time(message.get("timestamp"))
        seconds = answered - asked if asked is not None and answered is not None else None
        text = _text(message)
        yield _Request(
            session, messages[:index], asked, seconds, None, round(len(text) / _CHARACTERS), text
        )


def _answer(row: Mapping[str, Any], response: Mapping[str, Any]) -> str:
    for holder in (response, row):
        choices = holder.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            return _text(choices[0].get("message") or {})
    return str(row["answer"]) if isinstance(row.get("answer"), str) else ""


def _characters_per_token(requests: Sequence[_Request]) -> tuple[float, bool]:
    known = [r for r in requests if r.prompt]
    characters = sum(sum(len(_text(m)) for m in r.messages) for r in known)
    tokens = sum(r.prompt or 0 for r in known)
    if tokens and characters:
        return characters / tokens, True
    return _CHARACTERS, False


def _chain(messages: Sequence[Mapping[str, Any]], rate: float) -> tuple[list[bytes], list[float]]:
    """For each message: digest of all up to it, and its own size in tokens."""
    digests, sizes = [], []
    state = blake2b(digest_size=16)
    for message in messages:
        text = f"{message.get('role')}\0{_text(message)}\0"
        state.update(text.encode("utf-8", "surrogatepass"))
        digests.append(state.digest())
        sizes.append(len(text) / rate)
    return digests, sizes


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return str(content or "") + (json.dumps(calls, sort_keys=True) if calls else "")


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("body", "request", "request_body"):
        if isinstance(row.get(name), dict):
            return row[name]  # type: ignore[no-any-return]
    return row


# Token counts.


def _counts(rows: Sequence[Mapping[str, Any]], skipped: Counter[str]) -> Traffic:
    turns = []
    for row in rows:
        usage = row.get("usage")
        flat = {**row, **usage} if isinstance(usage, dict) else row
        prompt = _int(_first(flat, _PROMPT))
        start = _time(_first(flat, _TIME))
        session = _first(flat, _SESSION)
        if not prompt:
            skipped["no prompt length"] += 1
        elif start is None:
            skipped["no time"] += 1
        elif session in (None, "", "-"):
            skipped["no session"] += 1
        else:
            seconds = _number(_first(flat, _DURATION)) or 0.0
            output = _int(_first(flat, _OUTPUT)) or 0
            turns.append(Turn(str(session), start, start + seconds, prompt, output))
    assumed = (
        "a prompt that is not shorter than the last one repeats all of it with its answer; one "
        "that is shorter repeats nothing",
        "times are those at which requests came",
    )
    return ordered(turns, "token counts", assumed=assumed, skipped=skipped)


# Hash traces.


def _hashes(rows: Sequence[Mapping[str, Any]], skipped: Counter[str], block: int | None) -> Traffic:
    """Conversations are found by their blocks. An id stands for its block and all before it, so a
    request goes on from the one whose last whole block it holds. A second one that does so finds
    nothing, as a handle is good for one pull."""
    size = block or (_BAILIAN_BLOCK if any("chat_id" in row for row in rows) else _MOONCAKE_BLOCK)
    per_second = 1000 if size == _MOONCAKE_BLOCK else 1
    ends: dict[int, str] = {}
    held: dict[str, list[int]] = {}
    turns = []
    for number, row in enumerate(sorted(rows, key=lambda r: _number(r.get("timestamp")) or 0.0)):
        hashes, prompt = row.get("hash_ids"), _int(_first(row, _PROMPT))
        start = _number(row.get("timestamp"))
        if not isinstance(hashes, list) or not hashes or not prompt or start is None:
            skipped["no hash_ids, length or timestamp"] += 1
            continue
        session = next((ends[value] for value in reversed(hashes) if value in ends), None)
        common = 0
        if session is None:
            session = f"found-{number}"
        else:
            for mine, other in zip(hashes, held[session], strict=False):
                if mine != other:
                    break
                common += 1
            for value in held[session][-2:]:
                ends.pop(value, None)
        start /= per_second
        output = _int(_first(row, _OUTPUT)) or 0
        turns.append(Turn(session, start, start, prompt, output, min(prompt, common * size)))
        held[session] = list(hashes)
        # The last block is seldom full: once it grows it has another id.
        ends.update(dict.fromkeys(hashes[-2:], session))
    assumed = (
        f"blocks of {size} tokens; what a block shares in part counts as not shared",
        "the trace has no ends: a gap is counted from request to request",
    )
    return ordered(turns, "block-hash trace", assumed=assumed, skipped=skipped)


# Values.


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _int(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _time(value: Any) -> float | None:
    """Seconds from a number (milliseconds are recognised by their size) or an ISO date."""
    number = _number(value)
    if number is not None:
        return number / 1000 if number > 1e11 else number
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return None
    return None
