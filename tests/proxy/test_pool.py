"""Which worker is chosen, and what counts as the process that held the blocks."""

from __future__ import annotations

from proxy.workers.health import read_facts
from proxy.workers.pool import Pool, Role, Worker


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


def test_equals_take_turns() -> None:
    """A quiet pool is used evenly."""
    pool = Pool([worker(name) for name in "abc"])
    chosen = [pool.choose(Role.DECODE) for _ in range(9)]
    assert {each.name: chosen.count(each) for each in chosen if each} == {"a": 3, "b": 3, "c": 3}


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


def test_a_quiet_pool_is_used_evenly_when_both_roles_are_chosen_each_turn() -> None:
    """A turn chooses a decode and a prefill worker: neither choice may shift the other's order."""
    pool = Pool(
        Worker(url="", role=role, name=f"{role}-{number}", healthy=True)
        for role in Role
        for number in range(2)
    )
    found = [(pool.choose(Role.DECODE), pool.choose(Role.PREFILL)) for _ in range(4)]
    for chosen in zip(*found, strict=True):
        names = [each.name for each in chosen if each]
        assert {names.count(name) for name in names} == {2}


def test_an_open_breaker_lets_one_turn_at_a_time_try_the_worker() -> None:
    """While the trial is on its way, further turns stay away for another pause."""
    broken, other = worker("a"), worker("b")
    pool = Pool([broken, other])
    assert not broken.turn_failed(0.0, limit=2, pause=10.0)
    assert broken.turn_failed(0.0, limit=2, pause=10.0)
    assert [pool.choose(Role.DECODE, now=5.0) for _ in range(4)] == [other] * 4
    after = [pool.choose(Role.DECODE, now=11.0) for _ in range(6)]
    assert after.count(broken) == 1
    broken.answered()
    assert [pool.choose(Role.DECODE, now=12.0) for _ in range(6)].count(broken) == 3


def test_an_open_breaker_does_not_leave_turns_without_a_worker() -> None:
    """It is a preference: the only worker is chosen all the same."""
    alone = worker("a")
    alone.turn_failed(0.0, limit=1, pause=10.0)
    assert Pool([alone]).choose(Role.DECODE, now=1.0) is alone
