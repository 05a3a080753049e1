"""[pure] The workers behind the proxy, and which of them a turn is given.

Nobody tells several proxies what the others are about to do, and what a worker says of its load is
seconds old: if each proxy took the least loaded worker, all would take the same. So a choice is
made among two at random (or two that the conversation's name points to), not among all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from random import Random

from proxy.turn.planner import HolderState
from proxy.workers.costs import LegCosts, Work
from proxy.workers.pairs import why_no_handover, why_no_pull
from proxy.workers.worker import Role as Role
from proxy.workers.worker import Worker as Worker
from proxy.workers.worker import process_part

_STICKY_SLACK = 4
"""Turns by which a conversation's own decode worker may be busier than the least busy one, beside
twice its load: below that a queue that others already see is cheaper than moving the history."""
_FULL = 0.95
"""Share of KV blocks in use from which a worker with a queue preempts rather than runs."""
_HOME_BONUS = 0.98
"""A conversation's home wins against a prefill worker that seems better by less."""


class Pool:
    """Prefill and decode workers. Workers come and go (``roster``)."""

    def __init__(self, workers: Iterable[Worker] = (), *, dice: Random | None = None) -> None:
        self._by_name: dict[str, Worker] = {}
        self._dice = dice or Random()
        self._role_costs = {role: LegCosts() for role in Role}
        for worker in workers:
            self.add(worker)

    # Who is there.

    @property
    def workers(self) -> list[Worker]:
        return list(self._by_name.values())

    def add(self, worker: Worker) -> None:
        """Raises ValueError for a name that is taken."""
        if worker.name in self._by_name:
            raise ValueError(f"worker {worker.name} is in the pool already")
        self._by_name[worker.name] = worker

    def remove(self, name: str) -> Worker | None:
        """Turns that run on it go on; what it holds counts as gone."""
        return self._by_name.pop(name, None)

    def get(self, name: str) -> Worker | None:
        return self._by_name.get(name)

    def has(self, role: Role) -> bool:
        return any(each.role is role and _serving(each) for each in self.workers)

    def healthy(self, name: str) -> Worker | None:
        """The worker of this name, if it is healthy."""
        worker = self._by_name.get(name)
        return worker if worker is not None and worker.healthy else None

    def holder(self, name: str, engine_id: str) -> HolderState:
        """The state of the worker that a holding names, seen from the planner.

        A worker that is only unhealthy at the moment may still answer a NIXL read, but probably
        will not: it counts as absent.
        """
        worker = self._by_name.get(name)
        if worker is None or not worker.healthy:
            return HolderState(present=False)
        if worker.engine_id and engine_id and worker.engine_id != process_part(engine_id):
            return HolderState(present=False)
        return HolderState(True, worker.epoch, worker.block_size)

    def pullable(self, decode: Worker) -> bool:
        """Is there a prefill worker that can read what this decode worker keeps?"""
        return any(
            each.role is Role.PREFILL and why_no_pull(each, decode) is None
            for each in self._by_name.values()
        )

    # Who is chosen.

    def candidates(
        self,
        role: Role,
        *,
        avoid: Iterable[str] = (),
        now: float | None = None,
        model: str = "",
        beside: Worker | None = None,
    ) -> list[Worker]:
        """Workers that may be given a turn.

        Those in ``avoid`` only if there is no other; with ``now`` the same goes for workers whose
        breaker is open: a breaker is a preference, only a probe takes a worker out of service.
        ``beside``: only workers that can exchange blocks with that one.
        """
        found = [
            each
            for each in self._by_name.values()
            if each.role is role
            and each.healthy
            and not each.draining
            and each.serves(model)
            and (beside is None or _hands_over(each, beside))
        ]
        if avoid:
            avoided = set(avoid)
            found = [each for each in found if each.name not in avoided] or found
        if now is not None:
            found = [each for each in found if each.in_favour(now)] or found
        return found

    def choose(
        self,
        role: Role,
        *,
        avoid: Iterable[str] = (),
        now: float | None = None,
        model: str = "",
        beside: Worker | None = None,
    ) -> Worker | None:
        """The less loaded of two at random."""
        found = self.candidates(role, avoid=avoid, now=now, model=model, beside=beside)
        return self.given(self._lighter(found), now)

    def to_ask(self, role: Role, *, model: str, now: float) -> Worker | None:
        """A worker for a question beside the turn: it is no trial for an open breaker."""
        return self._lighter(self.candidates(role, now=now, model=model))

    def choose_decode(
        self, *, model: str, key: bytes, holder: str, now: float, avoid: Iterable[str] = ()
    ) -> Worker | None:
        """The worker that has the conversation's history, unless it is much busier than others.

        ``holder`` names it. Without one: the less loaded of the two that ``key`` (the
        conversation's) points to, which change as little as can be when workers come and go.
        """
        found = self.candidates(Role.DECODE, avoid=avoid, now=now, model=model)
        able = [each for each in found if each.transfers_allowed(now)] or found
        if not able:
            return None
        own = next((each for each in able if each.name == holder), None)
        if own is not None:
            least = min(each.load for each in able)
            queued = own.waiting > 0 and own.kv_usage >= _FULL
            if own.load <= 2 * least + _STICKY_SLACK and not (queued and len(able) > 1):
                return self.given(own, now)
            able = [each for each in able if each is not own]
        if key:
            able = ranked(key, able)[:2]
        return self.given(self._lighter(able), now)

    def choose_prefill(
        self,
        found: Sequence[Worker],
        cost: Callable[[Worker], float],
        *,
        key: bytes,
        cached: Callable[[Worker], int],
        now: float,
    ) -> Worker | None:
        """The cheapest of: two at random, the one that has most of the prompt, the key's own.

        ``found``: the ``candidates``; ``cost``: what the turn costs there, in any unit.
        """
        if len(found) < 2:
            return self.given(found[0], now) if found else None
        asked = self._dice.sample(found, min(2, len(found)))
        asked.append(max(found, key=cached))
        home = ranked(key, found)[0] if key else None
        if home is not None:
            asked.append(home)
        best = min(asked, key=lambda each: cost(each) * (_HOME_BONUS if each is home else 1))
        return self.given(best, now)

    def _lighter(self, found: Sequence[Worker]) -> Worker | None:
        if len(found) < 2:
            return found[0] if found else None
        return min(self._dice.sample(found, min(2, len(found))), key=lambda each: each.load)

    def given(self, worker: Worker | None, now: float | None) -> Worker | None:
        if worker is not None and now is not None:
            worker.chosen(now)
        return worker

    # What it costs.

    def expect(self, worker: Worker, work: Work, now: float) -> float | None:
        """Seconds; by what is known of the worker, else of workers of its role."""
        own = worker.costs.expect(work, now)
        return own if own is not None else self._role_costs[worker.role].expect(work, now)

    def compute_seconds(self, worker: Worker, work: Work, now: float) -> float | None:
        own = worker.costs.compute_seconds(work, now)
        return own if own is not None else self._role_costs[worker.role].compute_seconds(work, now)

    def observe(self, worker: Worker, work: Work, seconds: float, now: float) -> None:
        worker.costs.observe(work, seconds, now)
        self._role_costs[worker.role].observe(work, seconds, now)


def ranked(key: bytes, workers: Iterable[Worker]) -> list[Worker]:
    """Rendezvous hashing: the order in which ``key`` prefers workers.

    A worker that leaves changes the first choice only of the keys that had it there, and one that
    comes takes an equal share from all.
    """
    return sorted(
        workers,
        key=lambda each: blake2b(each.name.encode(), key=key[:64], digest_size=8).digest(),
    )


def _serving(worker: Worker) -> bool:
    return worker.healthy and not worker.draining


def _hands_over(one: Worker, other: Worker) -> bool:
    prefill, decode = (one, other) if one.role is Role.PREFILL else (other, one)
    return why_no_handover(prefill, decode) is None
