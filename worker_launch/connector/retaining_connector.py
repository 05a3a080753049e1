"""[io] vLLM's NIXL pull connector with a limit and a lease for what decode keeps.

Loaded through ``kv_connector_module_path`` under vLLM's own name, ``NixlConnector``: vLLM 0.32.0
asks for that name in several places (context-parallel checks, convolution state layout, routed
experts), which must answer for us too. The class to look for in logs is ``KvloopNixlConnector``.

Everything here runs on the scheduler side except ``get_kv_connector_stats``, which runs on both;
transfers, handshakes and leases of the worker side are vLLM's, unchanged. No policy lives here:
``pin_decision`` decides.

How a pin lives in vLLM 0.32.0, which this code relies on (paths below ``v1/nixl/``):

* ``update_state_after_alloc`` notes a request in ``_reqs_in_batch``; the workers then track it.
* ``request_finished`` returning True keeps the blocks and puts a deadline in ``_reqs_need_send``;
  the workers arm it only for requests that they track (``pull_worker.start_load_kv``). Stock vLLM
  does not note a request with neither flag set, hence its pin without end.
* A read, a release or the deadline makes the workers report ``finished_sending``;
  ``update_connector_output`` sees it just before the scheduler frees the blocks.
* ``_reqs_not_processed`` makes the workers forget a request that keeps nothing.
"""

from __future__ import annotations

import time
from typing import Any

from worker_launch import vllm_compat
from worker_launch.connector import connector_stats as stats
from worker_launch.connector.held_blocks import Ending, HeldBlocks
from worker_launch.connector.pin_decision import (
    DEFAULT_MAX_PINNED_FRACTION,
    Refuse,
    decide_pin,
    pin_limit,
)
from worker_launch.transfer_keys import (
    DO_REMOTE_DECODE,
    LEASE_SECONDS,
    LOCAL_TOKENS,
    PIN_REFUSED,
    PULLED_TOKENS,
    REMOTE_EXPIRY,
)

_nixl = vllm_compat.nixl_parts()
_NixlPullConnector: Any = _nixl.connector

Finished = tuple[bool, dict[str, Any] | None]


class KvloopNixlConnector(_NixlPullConnector):  # type: ignore[misc]  # vLLM's class, known at run time
    """See the module's docstring. ``kv_connector_extra_config`` takes
    ``kvloop_max_pinned_fraction``, the share of an engine's blocks that pins may take."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held = HeldBlocks()
        self._pin_limit = 0
        self._block_pool: Any = None
        self._prefill_sources: dict[str, tuple[int, int]] = {}
        self._pending_stats: stats.KvloopConnectorStats | None = None
        self._max_pinned_fraction = float(
            self.kv_transfer_config.get_from_extra_config(
                "kvloop_max_pinned_fraction", DEFAULT_MAX_PINNED_FRACTION
            )
        )
        pin_limit(0, self._max_pinned_fraction)  # a bad fraction stops the start, not a request
        if role == _nixl.scheduler_role:
            vllm_compat.check_scheduler(self.connector_scheduler)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._block_pool = gpu_block_pool
        usable = gpu_block_pool.num_gpu_blocks - 1  # one is the null block, never handed out
        self._pin_limit = pin_limit(usable, self._max_pinned_fraction)
        numbers = self._stats()
        numbers.set(stats.USABLE_BLOCKS, usable)
        numbers.set(stats.PIN_LIMIT_BLOCKS, self._pin_limit)
        self._report_pinned()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params
        if not params:
            return
        # The scheduler set these just before, and they are what its own metrics report. It calls
        # once more after a pull has arrived, with the same numbers still there.
        prefill = request.prefill_stats
        if prefill is not None:
            self._prefill_sources[request.request_id] = (
                prefill.num_local_cached_tokens,
                prefill.num_external_cached_tokens,
            )
        if (
            not params.get(DO_REMOTE_DECODE)
            and self.connector_scheduler.is_bidirectional_kv_xfer_enabled
        ):
            self.connector_scheduler._reqs_in_batch.add(request.request_id)

    def request_finished(self, request: Any, block_ids: list[int]) -> Finished:
        return self._settle(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> Finished:
        return self._settle(request, super().request_finished_all_groups(request, block_ids))

    def _settle(self, request: Any, finished: Finished) -> Finished:
        request_id = request.request_id
        sources = self._prefill_sources.pop(request_id, None)
        kept, handle = finished
        if not kept or handle is None:
            return finished
        if sources is not None:
            handle[LOCAL_TOKENS], handle[PULLED_TOKENS] = sources
        params = request.kv_transfer_params
        if params.get(DO_REMOTE_DECODE):
            return kept, handle
        return self._settle_pin(request_id, params.get(LEASE_SECONDS), handle)

    def _settle_pin(self, request_id: str, requested_lease: object, handle: Any) -> Finished:
        scheduler = self.connector_scheduler
        blocks = self._blocks_of(request_id)
        decision = decide_pin(
            requested_lease=requested_lease,
            longest_lease=float(scheduler.decoder_kv_blocks_ttl),
            pinned_with_request=self._held.pinned_with(blocks),
            limit=self._pin_limit,
        )
        numbers = self._stats()
        if isinstance(decision, Refuse):
            scheduler._reqs_need_send.pop(request_id, None)
            scheduler._reqs_not_processed.add(request_id)
            numbers.add(stats.REFUSED[decision.reason])
            return False, {PIN_REFUSED: decision.reason.value}
        deadline = time.perf_counter() + decision.lease_seconds
        scheduler._reqs_need_send[request_id] = deadline
        handle[REMOTE_EXPIRY] = deadline
        if requested_lease is not None:
            handle[LEASE_SECONDS] = decision.lease_seconds
        self._held.hold(request_id, blocks, deadline)
        numbers.add(stats.PINS)
        self._report_pinned()
        return True, handle

    def _blocks_of(self, request_id: str) -> set[int]:
        """All blocks that stay taken while the request is kept, in every cache group.

        More than the handle lists: that one is cut to the computed tokens and, in sliding-window
        groups, to the window.
        """
        groups = self._kv_cache_manager.get_block_ids(request_id)
        blocks = {block for group in groups for block in group}
        blocks.discard(self._block_pool.null_block.block_id)
        return blocks

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        now = time.perf_counter()
        for request_id in connector_output.finished_sending or ():
            ending = self._held.end(request_id, now)
            if ending is not None:
                expired = ending is Ending.EXPIRED
                self._stats().add(stats.PINS_EXPIRED if expired else stats.PINS_RELEASED)
                self._report_pinned()

    def _stats(self) -> stats.KvloopConnectorStats:
        if self._pending_stats is None:
            self._pending_stats = stats.KvloopConnectorStats()
        return self._pending_stats

    def _report_pinned(self) -> None:
        numbers = self._stats()
        numbers.set(stats.PINNED_BLOCKS, self._held.pinned)
        numbers.set(stats.PINNED_REQUESTS, self._held.requests)

    def get_kv_connector_stats(self) -> Any:
        if self.connector_worker is None:
            pending, self._pending_stats = self._pending_stats, None
            return pending
        worker = super().get_kv_connector_stats()
        return None if worker is None else stats.KvloopConnectorStats.around(worker)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return stats.KvloopConnectorStats() if data is None else stats.KvloopConnectorStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        return stats.KvloopPromMetrics(*args, **kwargs)


NixlConnector = KvloopNixlConnector
