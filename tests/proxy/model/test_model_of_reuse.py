"""Never wrong, as a model: whatever clients do and whatever dies, no read is ever of other KV.

The real conductor, planner, fingerprints and wire format run against ``world``, which knows what
each block holds. ``test_model_can_fail`` shows that the model finds faults put in on purpose.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.proxy.model.machine import Budgeted, Reuse
from tests.proxy.model.player import play

QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    # Shrinking takes minutes; the soak test shrinks.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def test_no_interleaving_reads_wrong_kv_or_forgets_a_pin() -> None:
    """No block is read whose tokens differ, twice or expired; no pin is without an owner."""
    run_state_machine_as_test(Reuse, settings=QUICK)


@pytest.mark.slow
def test_likely_histories_read_no_wrong_kv_and_do_pull() -> None:
    """The same with steps weighted as clients behave; a failing seed is one history."""
    worlds = [play(seed).world for seed in range(100)]
    assert sum(world.pulled for world in worlds) > 5_000
    assert sum(world.appends for world in worlds) > 20


@pytest.mark.slow
def test_likely_histories_keep_the_budget_and_the_books() -> None:
    """With little room: what is given up is never pulled nor released twice, the budget holds when
    nothing is under way, and the ledger says what is held, whatever died on the way."""
    worlds = [play(seed, kind=Budgeted).world for seed in range(40)]
    assert sum(len(world.evicted) for world in worlds) > 30
    assert sum(world.pulled for world in worlds) > 1_000


@pytest.mark.soak
def test_likely_histories_in_a_long_search() -> None:
    """Many more seeds than every change can wait for."""
    for seed in range(1000, 4000):
        play(seed)
        play(seed, kind=Budgeted)


@pytest.mark.soak
def test_no_interleaving_found_in_a_long_search() -> None:
    """The same with a hundred times as many histories."""
    run_state_machine_as_test(
        Reuse, settings=settings(QUICK, max_examples=4000, phases=tuple(Phase))
    )
