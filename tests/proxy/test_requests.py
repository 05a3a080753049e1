"""What is read from a request and what is written to workers, from values alone."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat import CHAT
from proxy.session.holding import Holding
from proxy.session.identity import MAX_ID_LENGTH, IdentityError, identify
from proxy.turn.tokenise import (
    UNKNOWN,
    agreed_ids,
    render_is_off,
    rendering_used,
    token_ids,
    tokenize_request,
)
from proxy.turn.wire import (
    Ending,
    client_answer,
    client_fields,
    decode_leg,
    ending_of_answer,
    ending_of_event,
    prefill_body,
    release_body,
    reported_reuse,
    usable_prefill_handle,
)

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 30,
    "max_tokens": 30,
    "min_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "cache_salt": "s",
    "conversation_id": "c",
    "kv_transfer_params": {"remote_host": "evil"},
    "unknown": 1,
}


def written(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """A decode leg as it goes over the wire."""
    leg: dict[str, Any] = orjson.loads(orjson.dumps(decode_leg(*args, **kwargs)))
    return leg


def test_prefill_over_ids_gets_what_changes_the_kv_and_nothing_else() -> None:
    """One token, not streamed, the ids, model, salt: templates and sampling stay away."""
    leg = orjson.loads(prefill_body(BODY, b"[1,2,3]", {"do_remote_decode": True}))
    assert leg == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": "s",
        "kv_transfer_params": {"do_remote_decode": True},
    }


def test_prefill_over_messages_loses_what_harms_a_one_token_call() -> None:
    """Both limits 1; min_tokens, stream options, stops, logprobs gone (C1-C14)."""
    leg = orjson.loads(CHAT.prefill_body(BODY, {"do_remote_decode": True}))
    assert leg["max_tokens"] == leg["max_completion_tokens"] == 1
    assert leg["stream"] is False
    for field in ("min_tokens", "stream_options", "stop", "logprobs", "top_logprobs"):
        assert field not in leg
    for field in ("tools", "tool_choice", "unknown"):  # what decode's prompt may depend on
        assert leg[field] == BODY[field]
    assert "conversation_id" not in leg


def test_decode_gets_the_clients_request_and_prefills_handle_whole() -> None:
    """Everything the client asked, prefill's unknown fields included, the ids once."""
    handle = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 7, "new": [1]}
    leg = written(BODY, handle, ids_json=b"[1,2]", lease_seconds=90)
    assert leg["max_completion_tokens"] == 30
    assert leg["min_tokens"] == 5
    ours = {"kvloop": 1, "kvloop_lease_seconds": 90, "prompt_token_ids": [1, 2]}
    assert leg["kv_transfer_params"] == {**handle, **ours}
    assert "return_token_ids" not in leg
    plain = written({**BODY, "stream": False}, handle, ids_json=None, lease_seconds=90)
    assert plain["return_token_ids"] is True
    dropped = written(BODY, handle, ids_json=None, lease_seconds=0)
    assert dropped["kv_transfer_params"]["kvloop_lease_seconds"] == 0


@pytest.mark.parametrize("field", ["return_prompt_text", "enable_response_messages"])
def test_decode_renders_what_the_client_wants_to_read(field: str) -> None:
    """With ids alone it could not show the prompt's text."""
    handle = {"do_remote_prefill": True}
    leg = written({**BODY, field: True}, handle, ids_json=b"[1,2]", lease_seconds=90)
    assert "prompt_token_ids" not in leg["kv_transfer_params"]


def test_decode_alone_gets_no_transfer_parameters() -> None:
    """An object with neither flag would pin blocks for ever (facts 10): the field is left out."""
    assert "kv_transfer_params" not in decode_leg(BODY, None, ids_json=None, lease_seconds=0)


def test_release_reads_nothing_and_names_the_holding() -> None:
    """The release form: the handle with a count of zero (facts 7)."""
    handle = {"remote_block_ids": [[1]], "remote_num_tokens": 9, "remote_request_id": "r"}
    leg = orjson.loads(release_body("m", Holding("i", "d", "", None, handle)))  # type: ignore[arg-type]
    assert leg["kv_transfer_params"] == {**handle, "remote_num_tokens": 0}
    assert leg["max_tokens"] == 1


@pytest.mark.parametrize("value", [None, {}, [], "x", {"do_remote_prefill": True}, {"a": 1}])
def test_a_prefill_answer_without_a_handle_is_recognised(value: Any) -> None:
    """Some versions answer null when prefill stops on EOS (C9)."""
    assert usable_prefill_handle(value) is None


def test_reuse_is_what_prefill_reports() -> None:
    """Total from vLLM's own field; the split only from our connector."""
    assert reported_reuse({"remote_prefill_cached_tokens": 9}) == (9, None, None)
    split = {"remote_prefill_cached_tokens": 9, "kvloop_pulled_tokens": 6, "kvloop_local_tokens": 3}
    assert reported_reuse(split) == (9, 6, 3)
    assert reported_reuse({}) == (0, None, None)


def test_output_ids_come_from_the_plugin_first_and_never_from_hidden_reasoning() -> None:
    """Complete from the plugin; the answer's own otherwise; none when reasoning is hidden."""
    choice = {"index": 0, "token_ids": [1]}
    handle = {"remote_num_tokens": 5}
    answer = {"choices": [choice], "kv_transfer_params": handle}
    assert ending_of_answer({}, answer) == Ending(handle, [1])
    assert ending_of_answer({"include_reasoning": False}, answer) == Ending(handle)
    ours = {**handle, "kvloop": {"token_ids": [1, 2]}}
    assert ending_of_answer({}, {**answer, "kv_transfer_params": ours}) == (
        Ending(handle, [1, 2], from_plugin=True)
    )
    assert ending_of_answer({}, {"choices": [choice, choice]}) == Ending()
    assert ending_of_event(None) == Ending()


def test_clients_get_back_only_what_is_theirs() -> None:
    """What is not theirs is null, as a worker answers that transfers nothing."""
    answer = {
        "prompt_token_ids": [1],
        "kv_transfer_params": {},
        "choices": [{"index": 0, "token_ids": [1]}],
    }
    asked = client_answer(orjson.loads(orjson.dumps(answer)), client_asked_ids=True)
    ids = {"index": 0, "token_ids": [1]}
    assert asked == {"prompt_token_ids": [1], "kv_transfer_params": None, "choices": [ids]}
    assert client_answer(answer, client_asked_ids=False) == {
        "prompt_token_ids": None,
        "kv_transfer_params": None,
        "choices": [{"index": 0, "token_ids": None}],
    }


def test_render_gets_the_request_unstreamed() -> None:
    """stream_options without stream would be refused."""
    (leg,) = CHAT.render_requests(BODY)
    assert "stream" not in leg
    assert "stream_options" not in leg
    assert leg["tools"] == BODY["tools"]


def test_tokenize_is_told_template_arguments_as_the_chat_route_sees_them() -> None:
    """reasoning_effort, documents and the old reasoning field reach the template."""
    leg = tokenize_request(
        {
            "model": "m",
            "messages": [{"role": "assistant", "content": "a", "reasoning_content": "r"}],
            "chat_template_kwargs": {"k": 1},
            "reasoning_effort": "low",
            "documents": [{"a": "b"}],
            "temperature": 1,
        }
    )
    assert leg == {
        "model": "m",
        "messages": [{"role": "assistant", "content": "a", "reasoning": "r"}],
        "chat_template_kwargs": {
            "k": 1,
            "enable_thinking": True,
            "reasoning_effort": "low",
            "documents": [{"a": "b"}],
        },
    }


def test_tokenize_is_not_used_for_what_it_cannot_express() -> None:
    """Better no reuse than ids of another prompt."""
    assert tokenize_request({**BODY, "tool_choice": "none"}) is None
    assert tokenize_request({**BODY, "tool_choice": "auto", "truncate_prompt_tokens": 5}) is None
    assert tokenize_request({**BODY, "tool_choice": "auto"}) is not None


def test_missing_render_is_told_from_a_refused_request() -> None:
    """403 and a bare 404 mean no such route; an error object means a bad request."""
    assert render_is_off(403, {"error": {}})
    assert render_is_off(404, {"detail": "Not Found"})
    assert not render_is_off(404, {"error": {}})
    assert not render_is_off(400, {"error": {}})


def test_ids_with_media_features_are_not_used() -> None:
    """Placeholders prove nothing."""
    assert token_ids(b'{"token_ids":[1],"features":null}') == b"[1]"
    assert token_ids(b'{"tokens":[1]}') == b"[1]"
    assert token_ids(b'{"token_ids":[1],"features":{"mm":1}}') is None
    assert token_ids(b"{}") is None
    one, other = b'{"token_ids":[1]}', b'{"token_ids":[2]}'
    assert agreed_ids([one, one]) == b"[1]"
    assert agreed_ids([one, other]) is None
    assert agreed_ids([b"{}", other]) is None


JSON = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(alphabet='"token_ids:[1,2]\\ ', max_size=30),
    lambda part: (
        st.lists(part, max_size=3)
        | st.dictionaries(
            st.sampled_from(["token_ids", "tokens", "features", "x"]), part, max_size=4
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["a", "token_ids", "tokens", "features", "z"]),
        JSON | st.lists(st.integers(0, 200_000), max_size=5),
    ),
    st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_ids_are_cut_out_as_reading_the_whole_answer_would_give_them(
    answer: dict[str, Any], separators: tuple[str, str]
) -> None:
    """Whatever else the answer holds, the words that are looked for among it; blanks or none."""
    read = answer.get("token_ids", answer.get("tokens"))
    usable = not answer.get("features") and isinstance(read, list) and read
    found = token_ids(json.dumps(answer, separators=separators).encode())
    assert found == (orjson.dumps(read) if usable else None)


@pytest.mark.parametrize("answer", [b"", b"[1]", b'{"token_ids":[1', b'"token_ids":[1]'])
def test_an_answer_that_is_no_object_is_a_failure(answer: bytes) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        token_ids(answer)


def test_a_rendering_is_known_by_its_length_if_no_other_has_it() -> None:
    """Equal ids count as one; a refused rendering and a missing count tell nothing."""
    one, two, three = (b'{"token_ids":[%b]}' % ids for ids in (b"1,2", b"1,2,3", b"1,2,4"))
    assert rendering_used([one, two], {"input_tokens": 3}) == 1
    assert rendering_used([None, two, two], {"input_tokens": 3}) == 1
    assert rendering_used([one, two, three], {"input_tokens": 3}) == UNKNOWN
    assert rendering_used([one, two], {"input_tokens": 4}) == UNKNOWN
    assert rendering_used([one, b"{}"], None) == UNKNOWN


def test_identity_precedence_and_separation() -> None:
    """Body id, then headers; cache key only narrows; scope separates model and salt."""
    headers = {b"x-conversation-id": b"h", b"x-session-id": b"s"}
    body = {"model": "m", "conversation_id": "b", "prompt_cache_key": "k"}
    by_body = identify(body, headers)
    assert by_body.conversation == identify({"model": "m", "conversation_id": "b"}, {}).conversation
    by_header = identify({"model": "m"}, headers)
    assert (
        by_header.conversation == identify({"model": "m", "conversation_id": "h"}, {}).conversation
    )
    by_key = identify({"model": "m", "prompt_cache_key": "k"}, {})
    assert by_key.conversation == b""
    assert by_key.namespace != identify({"model": "m"}, {}).namespace
    scopes = {
        identify({"model": m, "cache_salt": s}, {}, tenant=t).scope
        for m in ("a", "b")
        for s in (None, "x")
        for t in ("", "t")
    }
    assert len(scopes) == 8


def test_unreasonable_ids_are_refused() -> None:
    """Wrong type or length, with the place named."""
    for body, field in (
        ({"model": "m", "conversation_id": ["x"]}, "conversation_id"),
        ({"model": "m", "prompt_cache_key": "x" * (MAX_ID_LENGTH + 1)}, "prompt_cache_key"),
    ):
        with pytest.raises(IdentityError) as caught:
            identify(body, {})
        assert caught.value.field == field


def test_client_fields_drop_only_what_clients_may_not_set() -> None:
    """Transfer parameters also hide in vllm_xargs; other arguments there stay."""
    clean = client_fields({"a": 1, "vllm_xargs": {"kv_transfer_params": 1, "b": 2}})
    assert clean == {"a": 1, "vllm_xargs": {"b": 2}}
