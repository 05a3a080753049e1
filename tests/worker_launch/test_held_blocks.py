"""Which blocks are pinned, by whom and until when."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker_launch.connector.held_blocks import Ending, HeldBlocks

pytestmark = pytest.mark.slow


def test_shared_blocks_count_once() -> None:
    """Two holders of a common prefix pin its blocks once, until both have ended."""
    held = HeldBlocks()
    held.hold("a", [1, 2, 3], deadline=10)
    assert held.pinned_with([1, 2, 9, 9]) == 4
    held.hold("b", [1, 2, 9], deadline=10)
    assert (held.pinned, held.requests) == (4, 2)
    held.end("a", now=5)
    assert held.pinned == 3
    held.end("b", now=5)
    assert (held.pinned, held.requests) == (0, 0)


@pytest.mark.parametrize(
    ("now", "ending"), [(9.99, Ending.RELEASED), (10.0, Ending.EXPIRED), (11.0, Ending.EXPIRED)]
)
def test_the_deadline_tells_release_from_expiry(now: float, ending: Ending) -> None:
    """Before the deadline somebody read or released it; from then on it expired."""
    held = HeldBlocks()
    held.hold("a", [1], deadline=10)
    assert held.end("a", now) is ending


def test_the_end_of_an_unknown_request_is_ignored() -> None:
    """vLLM reports prefill's and refused requests too; they held nothing."""
    assert HeldBlocks().end("never", now=0) is None


def test_holding_twice_is_an_error() -> None:
    """A request id finishes once; a second hold would lose the first one's blocks."""
    held = HeldBlocks()
    held.hold("a", [1], deadline=1)
    with pytest.raises(ValueError, match="a holds blocks already"):
        held.hold("a", [2], deadline=1)


class AgainstPlainSets(RuleBasedStateMachine):
    """The counts equal those of a model that recounts from scratch every time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldBlocks()
        self.model: dict[str, set[int]] = {}

    @rule(name=st.sampled_from("abcdef"), blocks=st.lists(st.integers(1, 12), max_size=8))
    def hold(self, name: str, blocks: list[int]) -> None:
        if name not in self.model:
            before = self.held.pinned_with(blocks)
            self.held.hold(name, blocks, deadline=1)
            self.model[name] = set(blocks)
            assert self.held.pinned == before

    @rule(name=st.sampled_from("abcdef"), now=st.sampled_from([0, 2]))
    def end(self, name: str, now: int) -> None:
        expected = None
        if self.model.pop(name, None) is not None:
            expected = Ending.EXPIRED if now >= 1 else Ending.RELEASED
        assert self.held.end(name, now) is expected

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.held.pinned == len(set().union(*self.model.values()))
        assert self.held.requests == len(self.model)


TestAgainstPlainSets = AgainstPlainSets.TestCase
TestAgainstPlainSets.__doc__ = AgainstPlainSets.__doc__
