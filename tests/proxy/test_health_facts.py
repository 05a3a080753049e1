"""What a worker's /metrics page says."""

from __future__ import annotations

from proxy.workers.health import read_facts


def test_the_pin_limit_is_summed_over_engines_and_absent_on_stock_workers() -> None:
    """Our connector reports a limit for each engine; a stock worker none."""
    page = (
        b'vllm:kvloop_pin_limit_blocks{engine="0",model_name="m"} 12.0\n'
        b'vllm:kvloop_pin_limit_blocks{engine="1",model_name="m"} 11.0\n'
    )
    assert read_facts(page).pin_limit_blocks == 23
    assert read_facts(b"").pin_limit_blocks is None


def test_pinned_blocks_are_summed_and_none_is_not_zero() -> None:
    """A worker that pins nothing says 0; a stock worker says nothing."""
    page = b'vllm:kvloop_pinned_blocks{engine="0"} 3.0\nvllm:kvloop_pinned_blocks{engine="1"} 0.0\n'
    assert read_facts(page).pinned_blocks == 3
    assert read_facts(b'vllm:kvloop_pinned_blocks{engine="0"} 0.0\n').pinned_blocks == 0
    assert read_facts(b"").pinned_blocks is None
