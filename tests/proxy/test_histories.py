"""Kinds of history and of client that must never lead to a wrong read, on the running proxy."""

from __future__ import annotations

import asyncio

import pytest

from proxy.session.identity import identify
from tests.fakes.worker import END, ROLE_IDS
from tests.proxy.conftest import Serving
from tests.proxy.test_turns import LONG, assistant, user

NEXT = [user(LONG), assistant("Fine."), user("And then?")]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


async def test_changed_tools_or_system_prompt_share_no_token_from_there(serving: Serving) -> None:
    """Both stand before the history: nothing after them is equal KV, and nothing is read."""
    await serving.chat([user(LONG)], conversation_id="c")
    with_tools = await serving.chat(NEXT, conversation_id="c", tools=[TOOL])
    assert with_tools.reason == "history_diverged"
    system = {"role": "system", "content": "Be brief."}
    with_system = await serving.chat([system, *NEXT], conversation_id="c", tools=[TOOL])
    assert with_system.reused < 128
    assert serving.cluster.faults == []
    assert serving.decode.pinned() == 1


async def test_tool_calls_and_results_grow_a_history(serving: Serving) -> None:
    """A tool's result after the answer is growth like any other."""
    await serving.chat([user(LONG)], conversation_id="c", tools=[TOOL])
    result = {"role": "tool", "tool_call_id": "a", "content": "42"}
    messages = [user(LONG), assistant("Fine."), result]
    answer = await serving.chat(messages, conversation_id="c", tools=[TOOL])
    assert answer.reason == "history_grew"
    assert serving.cluster.faults == []


async def test_a_retried_turn_pulls_at_most_once(serving: Serving) -> None:
    """A client that sends the same turn again while it runs: one has the handle, both answers."""
    await serving.chat([user(LONG)], conversation_id="c")
    assert serving.prefill is not None
    serving.prefill.knobs.prefill_delay = 0.1
    answers = await asyncio.gather(*(serving.chat(NEXT, conversation_id="c") for _ in range(2)))
    assert [answer.status for answer in answers] == [200, 200]
    assert sorted(answer.route for answer in answers) == ["cold-prefill", "prefill-with-pull"]
    assert serving.cluster.faults == []


async def test_late_completion_of_an_older_turn_hides_no_newer_one(serving: Serving) -> None:
    """The older turn ends last and is the newest entry; the longer history is still the match."""
    await serving.chat([user(LONG)], conversation_id="c")
    serving.decode.knobs.chunk_delay = 0.3
    late = asyncio.create_task(serving.chat([user(LONG)], conversation_id="c"))
    await asyncio.sleep(0.1)
    serving.decode.knobs.chunk_delay = 0
    newer = await serving.chat(NEXT, conversation_id="c")
    await late
    grown = [*NEXT, assistant("Fine."), user("More?")]
    answer = await serving.chat(grown, conversation_id="c")
    assert answer.reason == "history_grew"
    assert answer.reused > int(newer.headers["X-KVLoop-Prompt-Tokens"])
    assert serving.cluster.faults == []


@pytest.mark.parametrize("length", [1, 14, 15, 16, 17, 62, 63, 64, 65])
async def test_prompts_around_a_block_are_answered_and_leak_nothing(
    serving: Serving, length: int
) -> None:
    """Shorter than a block, exactly on one, one more: answered, and at most one pin remains."""
    for conversation in ("c", None):
        fields = {"conversation_id": conversation} if conversation else {}
        messages = [user("x" * length)]
        for _ in range(3):
            answer = await serving.chat(messages, **fields)
            assert (answer.status, answer.text) == (200, "Fine.")
            messages += [assistant("Fine."), user("y")]
    while serving.app.conductor.background_tasks:
        await asyncio.sleep(0.01)
    assert serving.decode.pinned() <= 2
    assert serving.cluster.faults == []


async def test_continuing_the_last_message_is_no_growth_beyond_it(serving: Serving) -> None:
    """Without a generation prompt the end differs: only what is equal is pulled."""
    await serving.chat([user(LONG)], conversation_id="c")
    answer = await serving.chat(
        [user(LONG), assistant("Fi")], conversation_id="c", add_generation_prompt=False
    )
    assert answer.reason == "history_cut"
    assert answer.reused <= 1 + len(LONG) + 2 + len("Fi")
    assert serving.cluster.faults == []
    assert ROLE_IDS["assistant"] != END


def test_adapter_salt_and_tenant_are_part_of_the_scope() -> None:
    """An adapter is a model name; each of the three separates equal conversations and tokens."""
    base = {"model": "m", "conversation_id": "c"}
    found = {
        identify(body, {}, tenant=tenant).conversation
        for body in (base, {**base, "model": "m-lora"}, {**base, "cache_salt": "s"})
        for tenant in ("", "t")
    }
    assert len(found) == 6


async def test_many_conversations_with_one_opening_are_all_pulled(serving: Serving) -> None:
    """Twenty users, one long system prompt, short questions, no ids: none loses its reuse."""
    system = {"role": "system", "content": LONG}
    for number in range(20):
        await serving.chat([system, user(f"Q{number}")])
    for number in range(20):
        answer = await serving.chat([system, user(f"Q{number}"), assistant("Fine."), user("And?")])
        assert answer.route == "prefill-with-pull", number
    assert serving.cluster.faults == []
