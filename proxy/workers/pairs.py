"""[pure] Can two workers exchange KV blocks, and if not, why not.

A fact that is not known is no obstacle: a transfer that fails all the same is counted, retried cold
and, after a few, paused (``verdicts``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.workers.worker import Worker


def why_no_handover(prefill: Worker, decode: Worker) -> str | None:
    """Why decode cannot have this prefill's blocks, or None."""
    if reason := _different(prefill, decode):
        return reason
    if not _divides(prefill.block_size, decode.block_size):
        return (
            f"block size {decode.block_size} of decode is no multiple of prefill's "
            f"{prefill.block_size}"
        )
    return None


def why_no_pull(prefill: Worker, decode: Worker) -> str | None:
    """Why prefill cannot read blocks that decode kept, or None.

    Stricter than the way there: the token count and the block list are cut together, in blocks of
    one size.
    """
    for worker in (prefill, decode):
        if worker.transfer_mode == "push":
            return f"{worker.role} runs NixlPushConnector, which vLLM refuses to make bidirectional"
    if reason := _different(prefill, decode):
        return reason
    if prefill.block_size and decode.block_size and prefill.block_size != decode.block_size:
        return f"block sizes differ: prefill {prefill.block_size}, decode {decode.block_size}"
    for worker in (prefill, decode):
        if worker.bidirectional is False:
            return f"{worker.role} was started without bidirectional_kv_xfer"
        if worker.load_failure_policy == "recompute" and worker is prefill:
            return "prefill's kv_load_failure_policy is 'recompute': a failed read would never end"
    return None


def _different(prefill: Worker, decode: Worker) -> str | None:
    if prefill.models and decode.models and not prefill.models & decode.models:
        return f"no model in common: {_names(prefill.models)} and {_names(decode.models)}"
    for what, one, other in (
        ("vLLM versions", prefill.version, decode.version),
        ("KV cache types", prefill.cache_dtype, decode.cache_dtype),
        ("transfer modes", prefill.transfer_mode, decode.transfer_mode),
    ):
        if one and other and one != other:
            return f"{what} differ: prefill {one}, decode {other}"
    return None


def _divides(small: int | None, large: int | None) -> bool:
    return small is None or large is None or large % small == 0


def _names(models: Iterable[str]) -> str:
    return ", ".join(sorted(models)[:3])
