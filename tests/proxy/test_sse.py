"""The event stream parser, at every possible cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from proxy.relay.sse import (
    EventSplitter,
    carries_content,
    event_data,
    split_events,
    stream_error,
    take_turn_event,
)

EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    'data: {"choices":[{"delta":{"content":"a\u2028b 🌊 é"}}]}\n\n'.encode(),
    b": keep-alive\n\n",
    b'data: {"x":\ndata: 1}\n\n',
    b'data: {"crlf":1}\r\n\r\n',
    b'data: {"cr":1}\r\r',
    b": kvloop {}\n\n",
    b"data: [DONE]\n\n",
]


def fed(pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    splitter = EventSplitter()
    blocks = [block for piece in pieces if (block := splitter.feed(piece))]
    rest = splitter.flush()
    return b"".join(blocks) + rest, blocks


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=8), st.data())
def test_any_cut_gives_the_same_bytes_in_whole_events(
    events: list[bytes], data: st.DataObject
) -> None:
    """Bytes come out unchanged and in order, and no block ends inside an event."""
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    whole, blocks = fed(pieces)
    assert whole == stream
    boundaries = {0}
    position = 0
    for event in events:
        position += len(event)
        boundaries.add(position)
    position = 0
    for block in blocks:
        position += len(block)
        assert position in boundaries


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=8))
def test_byte_by_byte_gives_every_event(events: list[bytes]) -> None:
    """Fed one byte at a time the same events come out."""
    stream = b"".join(events)
    whole, blocks = fed([bytes([byte]) for byte in stream])
    assert whole == stream
    found = [event for block in blocks for event in split_events(block)]
    assert found == events[: len(found)]
    assert len(found) >= len(events) - 1  # a final CR CR waits for a possible LF


def test_line_separators_inside_json_do_not_end_an_event() -> None:
    """U+2028 is text, not a line end; data lines are joined by LF."""
    assert event_data(EVENTS[1]) == EVENTS[1][6:-2]
    assert event_data(EVENTS[3]) == b'{"x":\n1}'
    assert event_data(b": comment\n\n") is None


def test_the_plugin_event_is_taken_out_wherever_it_stands() -> None:
    """First, last or alone in a block: removed, and nothing else is touched."""
    event = b': kvloop {"v":1,"token_ids":[1]}\n\n'
    done = b"data: [DONE]\n\n"
    for before in (b"", EVENTS[0]):
        for after in (b"", done):
            rest, found = take_turn_event(before + event + after)
            assert rest == before + after
            assert found == {"v": 1, "token_ids": [1]}
    assert take_turn_event(EVENTS[0] + done) == (EVENTS[0] + done, None)


def test_generated_text_cannot_forge_the_plugin_event() -> None:
    """Text that spells the event stays inside its JSON string."""
    block = b'data: {"choices":[{"delta":{"content":"\\n: kvloop {\\"v\\":1}\\n\\n"}}]}\n\n'
    assert take_turn_event(block) == (block, None)


def test_only_the_role_chunk_is_no_content() -> None:
    """Role alone holds back; text, tool calls, finish, usage, DONE and the unknown commit."""
    role = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    assert not carries_content(role)
    for data in (
        b"[DONE]",
        b"not json",
        b'{"choices":[]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{}]}}]}',
        b'{"choices":[{"delta":{"reasoning":"hm"}}]}',
        b'{"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}',
    ):
        assert carries_content(data)


def test_error_events_are_told_from_text_about_errors() -> None:
    """Only an event that is an error object counts."""
    assert stream_error(b'{"error":{"message":"m","code":500}}') == {"message": "m", "code": 500}
    assert stream_error(b'{"choices":[{"delta":{"content":"{\\"error\\""}}]}') is None
    assert stream_error(b'{"error"') is None
