"""Traffic from every kind of log: the same conversation gives the same turns."""

from __future__ import annotations

import json

import pytest

from kvloop.advise import logs
from kvloop.advise.logs import UnreadableTraffic


def test_our_turn_log() -> None:
    def event(second: int, **fields: object) -> str:
        return json.dumps(
            {
                "time": f"2026-11-29T10:00:{second:02}.000+00:00",
                "event": "turn",
                "session": "abc",
                "route": "cold-prefill",
                "reason": "new_session",
                "prompt_tokens": 100,
                "planned_pull": 0,
                "total_ms": 1000.0,
                **fields,
            }
        )

    lines = [
        '{"event":"started"}',
        event(1),
        event(11, prompt_tokens=150, planned_pull=109, reason="history_grew"),
        event(20, prompt_tokens=160, reason="history_diverged"),
        event(21, session="by-prefix"),
    ]
    traffic = logs.read(lines)
    # What turn 2 was to pull is turn 1's prompt and its answer of 10 tokens, less the last.
    assert [(t.start, t.end, t.prompt, t.output, t.shared) for t in traffic.turns] == [
        (0.0, 1.0, 100, 10, None),
        (10.0, 11.0, 150, 0, 109),
        (19.0, 20.0, 160, 0, 0),
    ]
    assert [f.gap for f in traffic.follows()] == [None, 9.0, 8.0]
    assert traffic.skipped == {"turn of an unnamed conversation": 1}


# With role and separators 404 characters each: 101 tokens of four.
USER = {"role": "user", "content": "u" * 398}
ANSWER = {"role": "assistant", "content": "a" * 393}


def test_openai_requests_find_their_conversation_by_its_beginning() -> None:
    lines = [
        json.dumps({"timestamp": 0, "messages": [USER]}),
        json.dumps({"timestamp": 5, "messages": [{"role": "user", "content": "another"}]}),
        json.dumps({"timestamp": 9, "messages": [USER, ANSWER, USER]}),
    ]
    first, other, second = logs.read(lines).turns
    assert first.session == second.session != other.session
    # The log has no answers: what prefill saw is all that is known to repeat.
    assert (second.prompt, second.shared) == (303, 101)


def test_an_answer_in_the_log_counts_as_held() -> None:
    response = {"choices": [{"message": ANSWER}], "usage": {"completion_tokens": 99}}
    lines = [
        json.dumps({"timestamp": 0, "session_id": "s", "messages": [USER], "response": response}),
        json.dumps({"timestamp": 9, "session_id": "s", "messages": [USER, ANSWER, USER]}),
    ]
    first, second = logs.read(lines).turns
    assert first.output == 99
    assert second.shared == 202


def test_an_edited_message_ends_what_is_shared() -> None:
    edited = {**USER, "content": "e" * 398}
    lines = [
        json.dumps({"session_id": "s", "timestamp": 0, "messages": [USER, ANSWER, USER]}),
        json.dumps({"session_id": "s", "timestamp": 1, "messages": [USER, edited, USER]}),
    ]
    assert logs.read(lines).turns[1].shared == 101


def test_usage_teaches_how_long_tokens_are() -> None:
    body = {"messages": [USER], "usage": {"prompt_tokens": 199}}
    traffic = logs.read([json.dumps({"timestamp": 0, **body})])
    assert traffic.turns[0].prompt == 199
    assert any("2.0 characters" in text for text in traffic.assumed)


def test_a_whole_conversation_in_one_line_is_a_request_for_each_answer() -> None:
    lines = [json.dumps({"id": 1, "messages": [USER, ANSWER, USER, ANSWER]})]
    traffic = logs.read(lines)
    assert [turn.prompt for turn in traffic.turns] == [101, 303]
    assert traffic.turns[1].shared == 202
    assert not traffic.timed


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output}


def test_counts_as_json_and_as_csv_are_the_same() -> None:
    rows = [("2026-01-01T00:00:00Z", "s", 100, 20), ("2026-01-01T00:00:30Z", "s", 150, 10)]
    as_json = [
        json.dumps({"time": t, "http_x_session_id": s, "usage": usage(p, o)}) for t, s, p, o in rows
    ]
    as_csv = ["time,session,prompt_tokens,completion_tokens"]
    as_csv += [f"{t},{s},{p},{o}" for t, s, p, o in rows]
    one, two = logs.read(as_json), logs.read(as_csv)
    assert one.turns == two.turns
    _, follow = one.follows()
    assert (follow.gap, follow.shared, follow.shared_with_prefill) == (30.0, 119, 100)


def test_a_shorter_prompt_repeats_nothing_that_one_could_count_on() -> None:
    rows = [{"time": 0, "session": "s", "prompt_tokens": 100}]
    rows.append({"time": 1, "session": "s", "prompt_tokens": 60})
    _, follow = logs.read([json.dumps(row) for row in rows]).follows()
    assert follow.shared == 0


def test_lines_without_a_session_are_counted_not_guessed() -> None:
    rows = [{"time": 0, "prompt_tokens": 9}, {"time": 0, "prompt_tokens": 9, "session": "s"}]
    traffic = logs.read([json.dumps(row) for row in rows])
    assert len(traffic.turns) == 1
    assert traffic.skipped == {"no session": 1}


def test_block_hashes_name_the_conversation_and_what_is_shared() -> None:
    """A system prompt that others begin with as well makes no conversation of them."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 700, "output_length": 9, "hash_ids": [1, 9]},
        {"timestamp": 4000, "input_length": 2000, "output_length": 9, "hash_ids": [1, 2, 5, 6]},
    ]
    traffic = logs.read([json.dumps(row) for row in rows])
    first, other, second = traffic.turns
    assert first.session == second.session
    assert second.shared == 1024
    assert second.start == 4.0
    assert other.session != first.session
    assert other.shared == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "empty"),
        (["hello", "world"], "no line is a JSON object"),
        (['{"a": 1}'], "not recognised"),
        (['{"prompt_tokens": 5}'], "no turn in the file, read as counts; 1 lines: no time"),
    ],
)
def test_what_cannot_be_read_is_explained(lines: list[str], message: str) -> None:
    with pytest.raises(UnreadableTraffic, match=message):
        logs.read(lines)
