"""Which worker is chosen, and what counts as the process that held the blocks."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from proxy.workers.health import read_facts
from proxy.workers.pairs import why_no_handover, why_no_pull
from proxy.workers.pool import Pool, Role, Worker, ranked


def worker(name: str, role: Role = Role.DECODE, *, healthy: bool = True) -> Worker:
    return Worker(url=f"http://{name}", role=role, name=name, healthy=healthy)


def test_the_least_busy_healthy_worker_is_chosen() -> None:
    """Fewest outstanding turns; unhealthy ones never; avoided ones only if alone."""
    a, b, sick = worker("a"), worker("b"), worker("c", healthy=False)
    pool = Pool([a, b, sick])
    a.outstanding = 2
    assert pool.choose(Role.DECODE) is b
    assert pool.choose(Role.DECODE, avoid=["b"]) is a
    a.healthy = False
    assert pool.choose(Role.DECODE, avoid=["b"]) is b
    b.healthy = False
    assert pool.choose(Role.DECODE) is None


def test_equals_share_the_turns() -> None:
    """A quiet pool is used evenly, at random: several proxies must not take the same worker."""
    pool = Pool([worker(name) for name in "abc"], dice=Random(1))
    chosen = Counter(each.name for _ in range(900) if (each := pool.choose(Role.DECODE)))
    assert set(chosen) == {"a", "b", "c"}
    assert min(chosen.values()) > 250


def test_several_proxies_with_one_stale_view_do_not_herd() -> None:
    """Of six hundred choices on the same account no worker gets a quarter; greedy, one gets all."""
    names = [str(number) for number in range(8)]
    seen = {name: number % 3 for number, name in enumerate(names)}
    chosen: Counter[str] = Counter()
    for replica in range(600):
        pool = Pool([worker(name) for name in names], dice=Random(replica))
        for each in pool.workers:
            each.load_seen(seen[each.name], 0, 0.0)
        choice = pool.choose(Role.DECODE)
        assert choice is not None
        chosen[choice.name] += 1
    assert max(chosen.values()) < 150


def decode_for(pool: Pool, key: bytes, holder: str = "") -> str:
    chosen = pool.choose_decode(model="", key=key, holder=holder, now=0.0)
    assert chosen is not None
    return chosen.name


def test_a_conversation_stays_where_its_history_is_unless_that_is_much_busier() -> None:
    """A few turns more are no reason to move; twice the load and more is, and so is a queue."""
    pool = Pool([worker(name) for name in "abcd"])
    a = pool.workers[0]
    a.outstanding = 4
    assert decode_for(pool, b"key", "a") == "a"
    a.outstanding = 5
    assert decode_for(pool, b"key", "a") != "a"
    a.outstanding, a.waiting, a.kv_usage = 1, 3, 0.99
    assert decode_for(pool, b"key", "a") != "a"
    a.waiting, a.draining = 0, True
    assert decode_for(pool, b"key", "a") != "a"


def test_what_other_proxies_sent_counts_as_load() -> None:
    """The worker's own account minus what we had there when it was read."""
    a = worker("a")
    a.outstanding = 3
    a.load_seen(running=5, waiting=1, kv_usage=0.5)
    a.outstanding = 1
    assert (a.elsewhere, a.load) == (3, 4)


def test_keys_move_as_little_as_they_can() -> None:
    """A worker that leaves moves only its own conversations; one that comes takes its share."""
    keys = [str(number).encode() for number in range(400)]
    workers = [worker(name) for name in "abcd"]
    before = {key: ranked(key, workers)[0].name for key in keys}
    assert min(Counter(before.values()).values()) > 60
    without = {key: ranked(key, workers[1:])[0].name for key in keys}
    assert all(without[key] == before[key] for key in keys if before[key] != "a")
    more = {key: ranked(key, [*workers, worker("e")])[0].name for key in keys}
    moved = [key for key in keys if more[key] != before[key]]
    assert all(more[key] == "e" for key in moved)
    assert 40 < len(moved) < 120


def test_prefill_is_chosen_by_what_the_turn_costs_there() -> None:
    """The one with most of the prompt is always looked at, and taken unless it is too busy."""
    pool = Pool([worker(str(n), Role.PREFILL) for n in range(10)], dice=Random(2))
    cached = {each.name: 900 if each.name == "7" else 0 for each in pool.workers}

    def choice() -> str:
        found = pool.choose_prefill(
            pool.workers,
            lambda each: 1000 - cached[each.name] + each.tokens_ahead,
            key=b"",
            cached=lambda each: cached[each.name],
            now=0.0,
        )
        assert found is not None
        return found.name

    assert {choice() for _ in range(20)} == {"7"}
    pool.workers[7].outstanding_tokens = 5000
    assert "7" not in {choice() for _ in range(20)}


def test_pairs_that_cannot_exchange_say_why() -> None:
    """Known differences count, unknown facts do not."""
    p, d = worker("p", Role.PREFILL), worker("d")
    assert why_no_pull(p, d) is None
    for field, one, other, words in (
        ("block_size", 32, 64, "block sizes differ"),
        ("version", "0.32.0", "0.31.0", "vLLM versions differ"),
        ("models", frozenset({"a"}), frozenset({"b"}), "no model in common"),
        ("cache_dtype", "fp8", "auto", "KV cache types differ"),
        ("bidirectional", True, False, "without bidirectional_kv_xfer"),
        ("transfer_mode", "push", "push", "NixlPushConnector"),
    ):
        p, d = worker("p", Role.PREFILL), worker("d")
        setattr(p, field, one)
        assert why_no_pull(p, d) is None or field == "transfer_mode"
        setattr(d, field, other)
        assert words in (why_no_pull(p, d) or "")
    p.transfer_mode = "push"
    assert why_no_handover(p, d) is None
    d.transfer_mode = "push"
    assert why_no_handover(p, d) is None
    d.transfer_mode = "pull"
    assert "transfer modes differ" in (why_no_handover(p, d) or "")
    p, d = worker("p", Role.PREFILL), worker("d")
    p.block_size, d.block_size = 32, 64
    assert why_no_handover(p, d) is None
    p.block_size, d.block_size = 64, 32
    assert "no multiple" in (why_no_handover(p, d) or "")
    assert Pool([p, d]).candidates(Role.PREFILL, beside=d) == []


def test_workers_come_and_go() -> None:
    pool = Pool([worker("a")])
    with pytest.raises(ValueError, match="already"):
        pool.add(worker("a"))
    pool.add(worker("b"))
    assert pool.remove("a") is not None
    assert pool.remove("a") is None
    assert not pool.holder("a", "").present
    assert pool.get("b") is not None


def test_data_parallel_ranks_are_one_process() -> None:
    """Handles of another rank do not look like a restart; another engine does."""
    held = worker("a")
    pool = Pool([held])
    held.handle_seen("abc_dp0")
    assert pool.holder("a", "abc_dp1").present
    held.handle_seen("def_dp0")
    assert not pool.holder("a", "abc_dp1").present


def test_a_worker_that_left_holds_nothing() -> None:
    """Unknown or unhealthy: absent."""
    pool = Pool([worker("a", healthy=False)])
    assert not pool.holder("a", "").present
    assert not pool.holder("b", "").present


def test_pulls_pause_after_failures_and_get_one_trial() -> None:
    """After the pause one pull decides anew."""
    prefill = worker("p", Role.PREFILL)
    for _ in range(3):
        assert prefill.pulls_allowed(0)
        prefill.pull_failed(0, limit=3, pause=10)
    assert not prefill.pulls_allowed(9)
    assert prefill.pulls_allowed(10)
    prefill.pull_failed(10, limit=3, pause=10)
    assert not prefill.pulls_allowed(19)
    prefill.pull_succeeded()
    prefill.pull_failed(30, limit=3, pause=10)
    assert prefill.pulls_allowed(30)


def test_facts_are_read_from_a_real_metrics_page() -> None:
    """Lines as vLLM 0.32.0 prints them."""
    page = (
        b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79597716091e+09\n"
        b'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",'
        b'num_gpu_blocks="1424",sliding_window="None"} 1.0\n'
    )
    facts = read_facts(page)
    assert (facts.epoch, facts.block_size, facts.kv_blocks) == ("1.79597716091e+09", 32, 1424)
    nothing = read_facts(b"")
    assert (nothing.epoch, nothing.block_size, nothing.kv_blocks) == ("", None, None)


def test_an_open_breaker_lets_one_turn_at_a_time_try_the_worker() -> None:
    """While the trial is on its way, further turns stay away for another pause."""
    broken, other = worker("a"), worker("b")
    pool = Pool([broken, other], dice=Random(1))
    assert not broken.turn_failed(0.0, limit=2, pause=10.0)
    assert broken.turn_failed(0.0, limit=2, pause=10.0)
    assert [pool.choose(Role.DECODE, now=5.0) for _ in range(4)] == [other] * 4
    after = [pool.choose(Role.DECODE, now=11.0) for _ in range(40)]
    assert after.count(broken) == 1
    broken.answered()
    assert [pool.choose(Role.DECODE, now=12.0) for _ in range(40)].count(broken) > 10


def test_a_question_is_no_trial_of_an_open_breaker() -> None:
    """Asking for token ids must not use up the one turn that may try the worker."""
    broken = worker("a")
    pool = Pool([broken])
    assert broken.turn_failed(0.0, limit=1, pause=10.0)
    assert pool.to_ask(Role.DECODE, model="", now=11.0) is broken
    assert broken.in_favour(11.0)


def test_an_open_breaker_does_not_leave_turns_without_a_worker() -> None:
    """It is a preference: the only worker is chosen all the same."""
    alone = worker("a")
    alone.turn_failed(0.0, limit=1, pause=10.0)
    assert Pool([alone]).choose(Role.DECODE, now=1.0) is alone
