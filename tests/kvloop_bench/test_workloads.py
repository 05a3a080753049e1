"""Workloads: what their names promise, and the same every time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvloop.bench import export, recorded
from kvloop.bench.workloads import (
    Message,
    Script,
    Sizes,
    UnknownWorkload,
    make,
    names,
)

SIZES = Sizes(scale=0.1, count=2, lease_seconds=100, lengths=(100, 200))


def histories(script: Script) -> Iterator[tuple[list[Message], list[Message]]]:
    """(what the conversation held before, the next request's messages), answers filled in."""
    held: list[Message] = []
    for step in script.steps:
        messages = step.messages(held)
        yield held, messages
        held = [*messages, {"role": "assistant", "content": "one two three four five six"}]


@pytest.mark.parametrize("name", names())
def test_a_workload_depends_on_nothing_but_its_arguments(name: str) -> None:
    first = make(name, SIZES, words_per_token=1.0, seed=5)
    assert first == make(name, SIZES, words_per_token=1.0, seed=5)
    assert first != make(name, SIZES, words_per_token=1.0, seed=6)
    more = make(name, Sizes(**{**vars(SIZES), "count": 3}), words_per_token=1.0, seed=5)
    assert more.scripts[: len(first.scripts)] == first.scripts


@pytest.mark.parametrize("name", ["agent", "chat"])
def test_histories_of_agents_and_chats_only_grow(name: str) -> None:
    for script in make(name, SIZES, words_per_token=1.0, seed=1).scripts:
        for before, messages in histories(script):
            assert messages[: len(before)] == before


def test_the_coding_agent_edits_once_and_compacts_once() -> None:
    script = make("coding", SIZES, words_per_token=1.0, seed=1).scripts[0]
    pairs = list(histories(script))
    changed = [n for n, (before, now) in enumerate(pairs) if now[: len(before)] != before]
    assert len(changed) == 2
    edited, compacted = changed
    assert len(pairs[edited][1]) > len(pairs[edited][0])
    assert len(pairs[compacted][1]) < len(pairs[compacted][0])


def test_stripped_reasoning_changes_every_answer_and_no_question() -> None:
    script = make("reasoning", SIZES, words_per_token=1.0, seed=1).scripts[0]
    before, now = list(histories(script))[2]
    for old, new in zip(before, now, strict=False):
        assert (old == new) == (old["role"] == "user")


def test_late_turns_come_after_the_lease() -> None:
    for script in make("late", SIZES, words_per_token=1.0, seed=1).scripts:
        assert all(step.pause > SIZES.lease_seconds for step in script.steps[1:])


def test_conversations_share_no_beginning() -> None:
    """Or a prefix cache would help one conversation with another's prompt."""
    for name in names():
        scripts = make(name, SIZES, words_per_token=1.0, seed=1).scripts
        openings = {script.steps[0].add[-1]["content"][:30] for script in scripts}
        assert len(openings) == len(scripts), name


def test_lengths_are_those_that_were_asked_for() -> None:
    scripts = make("lengths", SIZES, words_per_token=1.0, seed=1).scripts
    words = [len(script.steps[0].add[0]["content"].split()) for script in scripts]
    assert all(abs(got - want) < 10 for got, want in zip(words, (100, 200, 100, 200), strict=True))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownWorkload, match="known: lengths, agent"):
        make("nothing", SIZES, words_per_token=1.0, seed=1)


def line(*messages: dict[str, object], **fields: object) -> str:
    return json.dumps({"messages": list(messages), **fields})


def test_recorded_conversations_keep_questions_pauses_and_answer_lengths() -> None:
    lines = [
        line(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "First?", "timestamp": 10},
            {"role": "assistant", "content": "x" * 400, "timestamp": 12},
            {"role": "tool", "content": [{"type": "text", "text": "found"}], "timestamp": 15},
            {"role": "assistant", "content": "Done."},
        )
    ]
    (script,) = recorded.workload_of(lines, name="mine", clients=1).scripts
    first, second = script.steps
    assert [m["role"] for m in first.add] == ["system", "user"]
    assert (first.max_tokens, second.pause) == (100, 3.0)
    assert second.add == ({"role": "user", "content": "found"},)


def test_requests_of_one_conversation_are_one_script() -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    lines = [line(user, id=1), line(user, answer, user, id=1), line(user, id=2)]
    scripts = recorded.workload_of(lines, name="mine", clients=1).scripts
    assert [len(script.steps) for script in scripts] == [2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1 is not JSON"), ("{}", "line 1 has no 'messages'"), ("", "no conversation")],
)
def test_a_bad_recording_is_named(text: str, message: str) -> None:
    with pytest.raises(recorded.NotAConversation, match=message):
        recorded.workload_of([text], name="mine", clients=1)


def test_an_export_holds_the_same_questions_and_pauses() -> None:
    workload = make("agent", SIZES, words_per_token=1.0, seed=1)
    lines = [json.loads(text) for text in export.aiperf_lines(workload)]
    assert [each["session_id"] for each in lines] == ["agent-1", "agent-2"]
    turn, step = lines[0]["turns"][1], workload.scripts[0].steps[1]
    assert turn == {"text": step.add[0]["content"], "delay": round(step.pause * 1000)}


@pytest.mark.parametrize("name", ["coding", "branches"])
def test_what_a_format_cannot_say_is_not_exported(name: str) -> None:
    with pytest.raises(export.CannotExport):
        list(export.aiperf_lines(make(name, SIZES, words_per_token=1.0, seed=1)))
