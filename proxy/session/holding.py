"""[pure] A holding: the KV blocks that a decode worker keeps for a conversation, as one record.

Who sets what: ``handle`` comes from decode and is passed back untouched but for the cut
(``turn/wire.py``); ``fingerprint`` says which tokens those blocks are known to hold; ``absent``
marks a tombstone, a turn after which decode kept nothing, so that the next turn can name why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from proxy.session.fingerprint import DIGEST_BYTES, Fingerprint, PromptTokens
from proxy.turn.reasons import Reason

_VERSION = 2

ABSENT_BYTES = 32
"""Length of the field with which a record begins: why there is nothing to pull, filled up with
blanks. Of fixed length, so that Redis can overwrite it in a mark without reading the rest."""


@dataclass(frozen=True, slots=True)
class Holding:
    """KV blocks kept on decode worker ``worker`` for ``fingerprint.token_count`` tokens.

    ``epoch`` identifies the process that holds them: it changes when the worker restarts.
    ``handle`` is the ``kv_transfer_params`` object decode returned; None for a tombstone.
    """

    id: str
    worker: str
    epoch: str
    fingerprint: Fingerprint
    handle: dict[str, Any] | None
    absent: Reason | None = None
    kept_at: float = 0.0
    """Unix time at which the turn ended; 0 in records of a proxy that did not note it."""
    group: str = ""
    """Whose habits of coming back it counts to (``proxy/retention.py``)."""

    @property
    def engine_id(self) -> str:
        return str(self.handle.get("remote_engine_id", "")) if self.handle else ""

    @property
    def block_count(self) -> int:
        if not self.handle:
            return 0
        return sum(len(group) for group in self.handle["remote_block_ids"])


MARK = "x"
"""Ends the id of a holding's mark."""


def mark_of(holding: Holding, why: Reason) -> Holding:
    """What outlives a holding that nobody came for in time: a tombstone that says ``why``.

    Without it a group that is given short leases would look as if it never came back later.
    It has no spans, so that it stays small: it can only be recognised as a whole.
    """
    tokens = replace(holding.fingerprint, spans=b"")
    return replace(holding, id=holding.id + MARK, fingerprint=tokens, handle=None, absent=why)


@dataclass(frozen=True, slots=True)
class Match:
    """A holding and how many of its leading tokens this prompt is proved to share."""

    holding: Holding
    common: int

    @property
    def complete(self) -> bool:
        """The prompt extends everything the holding covers."""
        return self.common == self.holding.fingerprint.token_count > 0


def best_match(prompt: PromptTokens, candidates: list[Holding]) -> Match | None:
    """The candidate that shares the most tokens; the first of equals (the newest) wins."""
    matches = [Match(each, prompt.common_prefix(each.fingerprint)) for each in candidates]
    return max(matches, key=lambda match: match.common, default=None)


def encode(holding: Holding) -> bytes:
    """Record as stored: why it is absent, 4 bytes header length, JSON header, digests."""
    header = orjson.dumps(
        {
            "v": _VERSION,
            "worker": holding.worker,
            "epoch": holding.epoch,
            "tokens": holding.fingerprint.token_count,
            "size": holding.fingerprint.size,
            "spans": holding.fingerprint.span_count,
            "handle": holding.handle,
            "at": holding.kept_at,
            "group": holding.group,
        }
    )
    return b"".join(
        (
            absent_field(holding.absent),
            len(header).to_bytes(4, "big"),
            header,
            holding.fingerprint.spans,
            holding.fingerprint.tail,
        )
    )


def absent_field(why: Reason | None) -> bytes:
    """The field with which a record begins."""
    return (why or "").encode().ljust(ABSENT_BYTES)


def decode(id: str, record: bytes) -> Holding | None:
    """The holding in a stored record; None when it was written by an unknown version."""
    try:
        start = ABSENT_BYTES + 4
        end = start + int.from_bytes(record[ABSENT_BYTES:start], "big")
        header = orjson.loads(record[start:end])
        if header["v"] != _VERSION:
            return None
        cut = end + header["spans"] * DIGEST_BYTES
        absent = record[:ABSENT_BYTES].decode().rstrip()
        return Holding(
            id=id,
            worker=header["worker"],
            epoch=header["epoch"],
            fingerprint=Fingerprint(
                header["tokens"], header["size"], record[end:cut], record[cut:]
            ),
            handle=header["handle"],
            absent=Reason(absent) if absent else None,
            kept_at=header.get("at", 0.0),
            group=header.get("group", ""),
        )
    except (ValueError, KeyError, TypeError):
        return None


_INTEGERS = frozenset({int})


def usable_handle(value: object) -> dict[str, Any] | None:
    """``value`` if it is a handle that prefill can pull from or release, else None.

    Workers answer null, lists, strings or empty objects when they keep nothing (bugs B5), and P
    silently ignores a handle that lacks one of its address fields, leaving the blocks pinned.
    """
    if not isinstance(value, dict) or value.get("do_remote_decode") is not True:
        return None
    blocks = value.get("remote_block_ids")
    if not isinstance(blocks, list) or not blocks:
        return None
    for group in blocks:
        if not isinstance(group, list) or not _INTEGERS.issuperset(map(type, group)):
            return None
    if not any(blocks):
        return None
    tokens = value.get("remote_num_tokens")
    if type(tokens) is not int or tokens <= 0:
        return None
    address = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    if any(value.get(field) in (None, "") for field in address):
        return None
    return value


def held_tokens(
    prompt: PromptTokens,
    output_ids: list[int] | None,
    remote_num_tokens: int,
    *,
    ids_complete: bool,
) -> Fingerprint | None:
    """Which tokens a handle's blocks are known to hold. None when the ids cannot account for them.

    Decode has computed every token but the last it sampled. With asynchronous or speculative
    scheduling its count may be higher, so only ``prompt + output - 1`` tokens are ever relied upon.

    ``ids_complete``: the ids come from our plugin, which sees every token. The worker's own
    ``token_ids`` leave out hidden reasoning, and one missing id looks like one token computed
    ahead: they count only when the sum is exact, else the prompt alone is certain.
    """
    computed = len(prompt) + len(output_ids or ()) - 1
    if output_ids and (ids_complete or computed == remote_num_tokens):
        known = min(computed, remote_num_tokens) - len(prompt)
        if known >= 0:
            return prompt.extended(output_ids[:known])
    if remote_num_tokens >= len(prompt):
        return prompt.fingerprint
    if remote_num_tokens == len(prompt) - 1:
        return prompt.shortened(remote_num_tokens)
    return None
