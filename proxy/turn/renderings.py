"""[io] Which of a request's renderings a worker uses: learnt once from a small request.

A route may render a request in a way that its render route does not show (``/v1/messages`` with
thinking switched off). The counting route does as the generating one, so the rendering that is as
long as its count is the one, unless others are as long.
"""

from __future__ import annotations

from typing import Any

import orjson

from proxy import log
from proxy.dialects.base import Dialect, parsed
from proxy.errors import WorkerFailed, WorkerRefused
from proxy.turn import tokenise
from proxy.workers.client import WorkerClient
from proxy.workers.worker import Worker

_MIGHT_AGREE = 2
"""Renderings to compare for every request when the used one is not known: those that vLLM chooses
between by itself."""


async def renderings(
    client: WorkerClient, worker: Worker, dialect: Dialect, body: dict[str, Any], timeout: float
) -> list[dict[str, Any]]:
    """Bodies for the dialect's render route: the one that ``worker`` uses if that is known, else
    some whose ids count only if all are equal. Raises ``WorkerError``."""
    legs = dialect.render_requests(body)
    if len(legs) == 1:
        return legs
    if worker.rendering is None:
        worker.rendering = await _learn(client, worker, dialect, body["model"], timeout)
        log.event("rendering_learnt", worker=worker.name, rendering=worker.rendering)
    if worker.rendering == tokenise.UNKNOWN:
        return legs[:_MIGHT_AGREE]
    return [legs[worker.rendering]]


async def _learn(
    client: WorkerClient, worker: Worker, dialect: Dialect, model: str, timeout: float
) -> int:
    async def ask(path: str, leg: dict[str, Any]) -> bytes | None:
        try:
            return await client.post(
                worker, path, orjson.dumps(leg), timeout=timeout, repeatable=True
            )
        except WorkerRefused as refusal:
            if tokenise.render_is_off(refusal.status, parsed(refusal.body)):
                raise
            return None  # a template may refuse an effort

    probe = dialect.render_probe(model)
    answers = [await ask(dialect.render_path, leg) for leg in dialect.render_requests(probe)]
    counted = await ask(dialect.count_path, probe)
    try:
        return tokenise.rendering_used(answers, parsed(counted) if counted else None)
    except ValueError as error:
        raise WorkerFailed(worker.name, 200, f"answered {error}") from None
