"""[io] A tiny conversation on the pair itself, past the proxy: what no configuration can prove.

Three requests, as the proxy makes them: prefill, decode, and the next turn's prefill, which pulls
decode's blocks. The prompt is random, so that no cache has it. Prefill's last handle is not used
and lapses with its lease (30 s).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from math import ceil
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvloop.doctor.facts import Leg, ProbeFacts, Transfer, WorkerFacts, metric_total
from kvloop.doctor.gather import is_local

_ANSWER_TOKENS = 8
_NEW_TOKENS = 4
_LARGEST_ID = 200
"""Every tokenizer has these ids; the first few, which may be special, are left out."""

_METRICS_PATIENCE_SECONDS = 3
_BYTES = "vllm:nixl_bytes_transferred_sum"
_SECONDS = "vllm:nixl_xfer_time_seconds_sum"


async def converse(
    session: aiohttp.ClientSession,
    prefill: WorkerFacts,
    decode: WorkerFacts,
    *,
    tokens: int,
    timeout: float,
) -> ProbeFacts:
    """The probe, as far as it gets."""
    room = min(w.max_model_len or tokens for w in (prefill, decode))
    count = max(16, min(tokens, room - _ANSWER_TOKENS - _NEW_TOKENS - 1))
    prompt = [random.randint(20, _LARGEST_ID) for _ in range(count)]
    pair = _Pair(session, prefill, decode, decode.models[0] if decode.models else "", timeout)

    leg, answer = await pair.prefill_leg(prompt, {"do_remote_decode": True})
    facts = ProbeFacts(prefill=leg)
    handle = answer.get("kv_transfer_params")
    if leg.error is None and not (isinstance(handle, dict) and handle.get("do_remote_prefill")):
        return replace(facts, prefill=replace(leg, error="answered without a handle"))
    if leg.error is not None or not isinstance(handle, dict):
        return facts
    facts = replace(facts, prefill_side_channel=_side_channel(handle))

    leg, event = await pair.decode_leg(prompt, handle)
    facts = replace(facts, decode=leg)
    if leg.error is not None:
        return facts
    facts = replace(facts, plugin=event is not None)
    if event is None:
        # Without the plugin only a whole answer has the handle; it takes a new pair of legs.
        event = await pair.whole_answer(prompt)
    kept, output = event.get("kv_transfer_params"), event.get("token_ids") or []
    if not (isinstance(kept, dict) and kept.get("do_remote_decode")):
        return replace(facts, handle=False, pin_refused=event.get("pin_refused"))
    facts = replace(
        facts,
        handle=True,
        decode_side_channel=_side_channel(kept),
        ttl_seconds=_seconds_left(kept, decode.url),
    )

    known = (prompt + list(output))[:-1] if output else prompt
    n = min(int(kept.get("remote_num_tokens") or 0), len(known))
    size = decode.block_size
    if size is None or not n:
        return facts
    lists = [group[: ceil(n / size)] for group in kept["remote_block_ids"]]
    pull = {**kept, "remote_num_tokens": n, "remote_block_ids": lists}
    new = [random.randint(20, _LARGEST_ID) for _ in range(_NEW_TOKENS)]
    leg, answer = await pair.prefill_leg(known[:n] + new, pull, measure=True)
    told = answer.get("kv_transfer_params") or {}
    pulled = told.get("kvloop_pulled_tokens", told.get("remote_prefill_cached_tokens"))
    return replace(facts, pull=leg, asked_tokens=n, pulled_tokens=pulled)


class _Pair:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill: WorkerFacts,
        decode: WorkerFacts,
        model: str,
        timeout: float,
    ) -> None:
        self._session = session
        self._prefill = prefill
        self._decode = decode
        self._model = model
        self._timeout = timeout

    async def prefill_leg(
        self, ids: list[int], transfer: dict[str, Any], *, measure: bool = False
    ) -> tuple[Leg, dict[str, Any]]:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        before = await self._counters(self._prefill.url) if measure else None
        leg, answer = await self._post(
            self._prefill.url + "/v1/completions", {**body, "kv_transfer_params": transfer}
        )
        if before is not None and leg.error is None:
            leg = replace(leg, transfer=await self._grown(self._prefill.url, before))
        return leg, answer

    async def decode_leg(
        self, ids: list[int], handle: dict[str, Any]
    ) -> tuple[Leg, dict[str, Any] | None]:
        """Streamed. The second part is the plugin's event, if there was one."""
        body = {**self._turn(ids, handle), "stream": True}
        began = time.perf_counter()
        event = None
        failed = None
        try:
            async with asyncio.timeout(self._timeout):
                url = self._decode.url + "/v1/chat/completions"
                async with self._session.post(url, json=body) as response:
                    if response.status != 200:
                        return Leg(error=await _said(response)), None
                    async for line in response.content:
                        if line.startswith(b": kvloop "):
                            event = json.loads(line[9:])
                        elif line.startswith(b'data: {"error"'):
                            failed = line[6:].decode("utf-8", "replace").strip()[:300]
        except TimeoutError:
            return Leg(error=f"no answer in {self._timeout:.0f} s", timed_out=True), None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Leg(error=str(error) or type(error).__name__), None
        return Leg(error=failed, seconds=time.perf_counter() - began), event

    async def whole_answer(self, ids: list[int]) -> dict[str, Any]:
        """What a stock decode says at the end of a turn that is not streamed."""
        _, first = await self.prefill_leg(ids, {"do_remote_decode": True})
        handle = first.get("kv_transfer_params")
        if not isinstance(handle, dict):
            return {}
        body = {**self._turn(ids, handle), "return_token_ids": True}
        _, answer = await self._post(self._decode.url + "/v1/chat/completions", body)
        choices = answer.get("choices") or [{}]
        return {
            "kv_transfer_params": answer.get("kv_transfer_params"),
            "token_ids": choices[0].get("token_ids"),
        }

    def _turn(self, ids: list[int], handle: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": "kvloop doctor"}],
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "kv_transfer_params": {**handle, "kvloop": 1, "prompt_token_ids": ids},
        }

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[Leg, dict[str, Any]]:
        began = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.post(url, json=body) as response,
            ):
                if response.status != 200:
                    return Leg(error=await _said(response)), {}
                answer = await response.json(content_type=None)
        except TimeoutError:
            waited = time.perf_counter() - began
            return Leg(error="no answer in time", timed_out=True, seconds=waited), {}
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Leg(error=str(error) or type(error).__name__), {}
        return Leg(seconds=time.perf_counter() - began), answer if isinstance(answer, dict) else {}

    async def _counters(self, url: str) -> tuple[float, float] | None:
        async with self._session.get(url + "/metrics") as response:
            page = await response.text()
        moved, took = metric_total(page, _BYTES), metric_total(page, _SECONDS)
        return None if moved is None or took is None else (moved, took)

    async def _grown(self, url: str, before: tuple[float, float]) -> Transfer | None:
        """vLLM adds a transfer to its metrics an engine step or more after the answer."""
        until = time.monotonic() + _METRICS_PATIENCE_SECONDS
        while True:
            after = await self._counters(url)
            if after is not None and after[0] > before[0]:
                return Transfer(after[0] - before[0], after[1] - before[1])
            if time.monotonic() > until:
                return None
            await asyncio.sleep(0.2)


async def _said(response: aiohttp.ClientResponse) -> str:
    return f"HTTP {response.status}: {(await response.text())[:300]}"


def _side_channel(handle: dict[str, Any]) -> tuple[str, int] | None:
    host, port = handle.get("remote_host"), handle.get("remote_port")
    return (str(host), int(port)) if host and port else None


def _seconds_left(handle: dict[str, Any], url: str) -> float | None:
    """Decode's expiry is on its monotonic clock, which is ours too if it runs on this machine."""
    expiry = handle.get("remote_blocks_expiry_time")
    if not isinstance(expiry, int | float) or not is_local(urlsplit(url).hostname or ""):
        return None
    left = expiry - time.perf_counter()
    return left if 0 < left < 7 * 86400 else None
