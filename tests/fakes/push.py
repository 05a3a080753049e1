"""What two fakes that push share: prefill's writes into decode's blocks, as vLLM 0.32.0 does them.

A request of decode's waits until prefill's engine has finished one with the same base id, before or
after. Aborted while it waits, its blocks stay until the write comes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(eq=False)
class Registration:
    """Blocks of one decode request that wait to be written."""

    engine_id: str
    base_id: str
    tokens: list[int]
    written: asyncio.Event = field(default_factory=asyncio.Event)


class PushBoard:
    """Registrations and finished prefills that have not met yet; what went wrong is a fault."""

    def __init__(self, faults: list[str]) -> None:
        self._faults = faults
        self.waiting: list[Registration] = []
        self.unclaimed: dict[tuple[str, str], list[int]] = {}
        self.writes = 0
        self.registered_first = 0
        """Writes for which decode had registered before prefill was done."""

    def register(self, engine_id: str, base_id: str, tokens: list[int]) -> Registration:
        """Decode's side."""
        registration = Registration(engine_id, base_id, tokens)
        found = self.unclaimed.pop((engine_id, base_id), None)
        if found is None:
            self.waiting.append(registration)
        else:
            self._write(registration, found)
        return registration

    def finished(self, engine_id: str, base_id: str, tokens: list[int]) -> None:
        """Prefill's side."""
        for registration in self.waiting:
            if (registration.engine_id, registration.base_id) == (engine_id, base_id):
                self.waiting.remove(registration)
                self.registered_first += 1
                self._write(registration, tokens)
                return
        self.unclaimed[engine_id, base_id] = tokens

    def _write(self, registration: Registration, tokens: list[int]) -> None:
        if tokens != registration.tokens:
            self._faults.append("prefill wrote KV of other tokens")
        self.writes += 1
        registration.written.set()


def base_id(request: web.Request, body: dict[str, Any]) -> str:
    """The id by which vLLM pairs requests: by route, from the header or, for responses, the body.
    Empty without one: vLLM then makes a random one."""
    if request.path == "/v1/responses":
        return str(body.get("request_id") or "")
    given = request.headers.get("X-Request-Id", "")
    return f"cmpl-{given}" if request.path == "/v1/completions" else f"chatcmpl-{given}"


def server_info(transfer_mode: str) -> dict[str, Any]:
    """The part of ``/server_info?config_format=json`` that is about transfers."""
    name = "NixlPushConnector" if transfer_mode == "push" else "NixlConnector"
    extra = {"bidirectional_kv_xfer": transfer_mode == "pull"}
    transfer = {
        "kv_connector": name,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }
    return {"vllm_config": {"kv_transfer_config": transfer}}
