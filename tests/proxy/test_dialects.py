"""Every generating route through prefill and decode: reuse, repeats, and nothing internal shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from tests.fakes.worker import MODEL
from tests.proxy.conftest import Answer, Serve, Serving

LONG = "a story about a small dog that runs far away " * 20


@dataclass(frozen=True)
class Speaker:
    """How a client speaks one route: two turns of one conversation, and what it reads."""

    path: str
    body: Callable[[list[str]], dict[str, Any]]
    """From what was said, in turn by the user and by the model."""
    text: Callable[[Answer], str]
    cached: Callable[[dict[str, Any]], int]
    """Cached prompt tokens in a whole answer."""

    def __repr__(self) -> str:
        return self.path


def turns(said: list[str]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]


def events(answer: Answer) -> list[dict[str, Any]]:
    """The data of all events of a stream."""
    lines = answer.body.decode().split("\n")
    return [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]


def completion_text(answer: Answer) -> str:
    parts = events(answer) if answer.streamed else [answer.json]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def message_text(answer: Answer) -> str:
    if not answer.streamed:
        return str(answer.json["content"][0]["text"])
    return "".join(e["delta"]["text"] for e in events(answer) if e["type"] == "content_block_delta")


def response_text(answer: Answer) -> str:
    if not answer.streamed:
        return str(answer.json["output"][0]["content"][0]["text"])
    return "".join(e["delta"] for e in events(answer) if e["type"] == "response.output_text.delta")


CHAT = Speaker(
    "/v1/chat/completions",
    lambda said: {"messages": turns(said)},
    lambda answer: answer.text,
    lambda whole: whole["usage"]["prompt_tokens_details"]["cached_tokens"],
)
COMPLETIONS = Speaker(
    "/v1/completions",
    lambda said: {"prompt": "".join(said)},
    completion_text,
    lambda whole: whole["usage"]["prompt_tokens_details"]["cached_tokens"],
)
MESSAGES = Speaker(
    "/v1/messages",
    lambda said: {"messages": turns(said), "max_tokens": 50},
    message_text,
    lambda whole: whole["usage"]["cache_read_input_tokens"],
)
RESPONSES = Speaker(
    "/v1/responses",
    lambda said: {"input": turns(said)},
    response_text,
    lambda whole: whole["usage"]["input_tokens_details"]["cached_tokens"],
)
SPEAKERS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
NEW = (COMPLETIONS, MESSAGES, RESPONSES)
both = pytest.mark.parametrize("stream", [False, True])


async def ask(serving: Serving, speaker: Speaker, said: list[str], **fields: Any) -> Answer:
    body = {"model": MODEL, **speaker.body(said), **fields}
    return await serving.post(body, path=speaker.path)


@both
@pytest.mark.parametrize("speaker", SPEAKERS, ids=repr)
async def test_the_second_turn_pulls_the_first(
    serving: Serving, speaker: Speaker, stream: bool
) -> None:
    """On every route, streamed or not, the history comes from decode and the answer is whole."""
    first = await ask(serving, speaker, [LONG], stream=stream)
    assert (first.status, first.reason) == (200, "new_session")
    assert speaker.text(first) == "Fine."
    second = await ask(serving, speaker, [LONG, "Fine.", "Go on."], stream=stream)
    assert (second.reason, speaker.text(second)) == ("history_grew", "Fine.")
    assert second.reused > len(LONG)
    assert serving.cluster.faults == []
    assert serving.decode.pinned() == 1  # the first was read, the second is kept


@both
@pytest.mark.parametrize("speaker", NEW, ids=repr)
async def test_nothing_internal_is_shown(serving: Serving, speaker: Speaker, stream: bool) -> None:
    """No handle, no ids, no event of ours; the stream ends as the route ends it."""
    answer = await ask(serving, speaker, [LONG], stream=stream)
    for word in (b"remote_block_ids", b'token_ids":[', b"kvloop", b"remote_engine_id"):
        assert word not in answer.body
    if stream:
        last = {
            COMPLETIONS: b"data: [DONE]\n\n",
            MESSAGES: b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
        }.get(speaker)
        assert answer.body.endswith(last) if last else events(answer)[-1]["response"]["usage"]


@both
@pytest.mark.parametrize("speaker", NEW, ids=repr)
async def test_both_legs_get_the_same_ids(serving: Serving, speaker: Speaker, stream: bool) -> None:
    """Prefill's leg is a one-token completion over the ids that decode is told."""
    await ask(serving, speaker, [LONG], stream=stream, kv_transfer_params={"remote_host": "evil"})
    (prefill,) = serving.prefill.bodies("/v1/completions")
    (decode,) = serving.decode.bodies(speaker.path)
    told = decode["prompt"] if speaker is COMPLETIONS else None
    assert prefill["prompt"] == (told or decode["kv_transfer_params"]["prompt_token_ids"])
    assert prefill["max_tokens"] == 1
    assert "evil" not in str((prefill, decode))


@both
@pytest.mark.parametrize("speaker", NEW, ids=repr)
async def test_a_failure_before_content_is_not_seen(
    serve: Serve, speaker: Speaker, stream: bool
) -> None:
    """Decode fails once before its first word: the turn is repeated cold."""
    serving = await serve()
    serving.decode.knobs.stream_error_first = int(stream)
    serving.decode.knobs.fail_next = {} if stream else {speaker.path: 1}
    for _ in range(2):
        answer = await ask(serving, speaker, [LONG], stream=stream)
        assert (answer.status, speaker.text(answer)) == (200, "Fine.")
    assert await serving.metric("kvloop_cold_retries_total") == 1
    assert serving.cluster.faults == []


@pytest.mark.parametrize("speaker", NEW, ids=repr)
async def test_a_stream_that_breaks_says_so_in_its_own_way(
    serving: Serving, speaker: Speaker
) -> None:
    """After the first word nothing can be repeated: the last event is an error the SDKs know."""
    serving.decode.knobs.die_after_chunks = 2
    answer = await ask(serving, speaker, [LONG], stream=True)
    assert speaker.text(answer) if speaker is not COMPLETIONS else b"text" in answer.body
    last = events(answer)[-1]
    assert last.get("type", "") == ("" if speaker is COMPLETIONS else "error")
    assert b"stopped answering" in answer.body


@both
@pytest.mark.parametrize("speaker", SPEAKERS, ids=repr)
async def test_without_prefill_decode_does_it_all(
    serve: Serve, speaker: Speaker, stream: bool
) -> None:
    """The client's request goes to decode as it is, and nothing is kept."""
    serving = await serve(prefills=0)
    answer = await ask(serving, speaker, [LONG], stream=stream)
    assert (answer.route, answer.reason) == ("decode-only", "no_prefill_worker")
    (body,) = serving.decode.bodies(speaker.path)
    body.pop("request_id", None)
    assert body == {"model": MODEL, **speaker.body([LONG]), "stream": stream}


@both
@pytest.mark.parametrize("speaker", [CHAT, MESSAGES, RESPONSES], ids=repr)
async def test_without_ids_prefill_renders_the_request_itself(
    serve: Serve, speaker: Speaker, stream: bool
) -> None:
    """No render route and nothing /tokenize could express: P/D works, nothing is reused."""
    serving = await serve()
    for worker in (serving.prefill, serving.decode):
        worker.knobs.render = False
    for said in ([LONG], [LONG, "Fine.", "Go on."]):
        answer = await ask(
            serving,
            speaker,
            said,
            stream=stream,
            tools=[{"type": "function", "name": "f"}],
            **({"tool_choice": "required"} if speaker is CHAT else {}),
        )
        assert (answer.route, answer.reason) == ("cold-prefill", "not_tokenised")
    leg = serving.prefill.bodies(speaker.path)[0]
    assert leg["stream"] is False
    assert leg[{RESPONSES: "max_output_tokens"}.get(speaker, "max_tokens")] == 1
    assert serving.decode.pinned() == 0


@both
@pytest.mark.parametrize("effort", ["none", "low", "medium"])
async def test_thinking_switched_off_is_rendered_as_the_worker_does(
    serve: Serve, stream: bool, effort: str
) -> None:
    """The route asks the template for an effort that the render route does not show. A small
    request, once for each worker, tells which; then a turn has one rendering, and is reused."""
    serving = await serve()
    for worker in (serving.prefill, serving.decode):
        worker.knobs.disabled_effort = effort
    off = {"type": "disabled"}
    for said in ([LONG], [LONG, "Fine.", "Go on."], [LONG, "Fine.", "Go on.", "Fine.", "On."]):
        answer = await ask(serving, MESSAGES, said, stream=stream, thinking=off, temperature=1)
        ids = serving.decode.bodies("/v1/messages")[-1]["kv_transfer_params"]["prompt_token_ids"]
        assert f"effort {effort}".encode() in bytes(each for each in ids if each < 256)
    assert (answer.route, answer.reason) == ("prefill-with-pull", "history_cut")
    assert len(serving.prefill.bodies("/v1/messages/count_tokens")) == 1
    rendered = serving.prefill.bodies("/v1/messages/render")
    assert len([body for body in rendered if LONG in str(body)]) == 3
    assert serving.cluster.faults == []


@both
async def test_a_rendering_that_cannot_be_told_is_not_used(serve: Serve, stream: bool) -> None:
    """Two efforts whose prompts are equally long, say: prefill renders the request itself."""
    serving = await serve()
    serving.prefill.knobs.disabled_effort = "max"  # the prompt is as long as with "xhigh"
    for _ in range(2):
        answer = await ask(serving, MESSAGES, [LONG], stream=stream, thinking={"type": "disabled"})
        assert answer.reason == "not_tokenised"
    assert len(serving.prefill.bodies("/v1/messages/count_tokens")) == 1


@both
async def test_several_prompts_go_to_decode_alone(serving: Serving, stream: bool) -> None:
    """One handle cannot name the blocks of two prompts."""
    for prompt in (["one", "two"], [[1, 2], [3]], ["one"]):
        answer = await serving.post(
            {"model": MODEL, "prompt": prompt, "stream": stream}, path="/v1/completions"
        )
        assert (answer.route, answer.reason) == ("decode-only", "multiple_prompts")
        assert serving.decode.bodies("/v1/completions")[-1]["prompt"] == prompt


@both
async def test_a_suffix_is_left_to_the_workers(serving: Serving, stream: bool) -> None:
    """They put it into the prompt with the model's own marks, or refuse: both get the text."""
    for prompt in (LONG, list(range(1, 99))):
        fields = {"model": MODEL, "prompt": prompt, "suffix": "the end", "stream": stream}
        answer = await serving.post(fields, path="/v1/completions")
        assert (answer.route, answer.reason) == ("cold-prefill", "not_tokenised")
        for worker in (serving.prefill, serving.decode):
            leg = worker.bodies("/v1/completions")[-1]
            assert (leg["prompt"], leg["suffix"]) == (prompt, "the end")
            assert "prompt_token_ids" not in leg["kv_transfer_params"]
    assert serving.prefill.bodies("/tokenize") == []


@both
@pytest.mark.parametrize(
    ("speaker", "cut"),
    [
        (CHAT, {"truncate_prompt_tokens": -1}),
        (COMPLETIONS, {"truncate_prompt_tokens": 50}),
        (RESPONSES, {"truncation": "auto"}),
    ],
    ids=repr,
)
async def test_a_prompt_that_two_workers_might_cut_differently_is_served_by_one(
    serve: Serve, speaker: Speaker, cut: dict[str, Any], stream: bool
) -> None:
    """Where a cut ends can depend on how long the answer may be, and prefill's has one token:
    decode would read KV of other tokens. Ids that are cut already are safe."""
    serving = await serve()
    if speaker is not COMPLETIONS:  # which has no render route
        answer = await ask(serving, speaker, [LONG], stream=stream, **cut)
        assert answer.route == "cold-prefill"
    for worker in (serving.prefill, serving.decode):
        worker.knobs.render = False
    served = len(serving.prefill.bodies("/v1/completions"))
    answer = await ask(serving, speaker, [LONG, "Fine.", "Go on."], stream=stream, **cut)
    assert (answer.route, answer.reason) == ("decode-only", "not_tokenised")
    assert len(serving.prefill.bodies("/v1/completions")) == served
    assert serving.prefill.bodies(speaker.path) == [] or speaker is COMPLETIONS
    assert serving.decode.bodies(speaker.path)[-1].items() >= cut.items()


@both
async def test_token_ids_are_taken_as_they_are(serving: Serving, stream: bool) -> None:
    """A prompt of ids is compared and sent on without asking any tokeniser."""
    ids = list(range(1, 200))
    fields = {"model": MODEL, "stream": stream}
    await serving.post({**fields, "prompt": ids}, path="/v1/completions")
    longer = [*ids, *b"Fine.", 310, 7, 8, 9]
    answer = await serving.post({**fields, "prompt": longer}, path="/v1/completions")
    assert answer.reason == "history_grew"
    assert serving.prefill.bodies("/tokenize") == []
    assert serving.cluster.faults == []


@both
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search_preview"}]}, "builtin_tools"),
        ({"tools": [{"type": "function", "name": "f"}]}, "new_session"),
    ],
)
async def test_responses_that_prefill_cannot_share(
    serving: Serving, stream: bool, fields: dict[str, Any], reason: str
) -> None:
    """Each with its reason."""
    answer = await ask(serving, RESPONSES, [LONG], stream=stream, **fields)
    assert answer.reason == reason


@both
async def test_a_previous_response_is_found_where_it_is(serve: Serve, stream: bool) -> None:
    """The id leads to the decode worker that made the response, and nobody else there."""
    serving = await serve(decodes=3)
    for number in range(12):
        made = await ask(serving, RESPONSES, [LONG], stream=stream, conversation_id=number)
        whole = events(made)[-1]["response"] if stream else made.json
        body = {"input": "Go on.", "previous_response_id": whole["id"]}
        answer = await serving.post(
            {"model": MODEL, "stream": stream, **body}, path="/v1/responses"
        )
        assert (answer.status, answer.reason) == (200, "previous_response")
        stored = await serving.get(f"/v1/responses/{whole['id']}")
        assert stored.json == whole  # the worker stores it with the handle and the ids
        assert stored.json["kv_transfer_params"] is None
    assert sum(bool(decode.stored_responses) for decode in serving.decodes) > 1


@both
@pytest.mark.parametrize("id", ["resp_x", "resp_" + "0" * 56, "x", "é", "resp_" + "0" * 500])
async def test_an_unknown_response_is_a_404_that_touches_no_worker(
    serving: Serving, stream: bool, id: str
) -> None:
    """As the worker itself would answer."""
    body = {"model": MODEL, "input": "x", "previous_response_id": id, "stream": stream}
    answer = await serving.post(body, path="/v1/responses")
    assert (answer.status, answer.json["error"]["param"]) == (404, "previous_response_id")
    assert (await serving.get(f"/v1/responses/{id}")).status == 404
    assert serving.decode.requests == []


@pytest.mark.parametrize("speaker", NEW, ids=repr)
async def test_cached_tokens_are_what_was_reused(serving: Serving, speaker: Speaker) -> None:
    """``usage`` says how much of the prompt nobody computed."""
    await ask(serving, speaker, [LONG])
    second = await ask(serving, speaker, [LONG, "Fine.", "Go on."])
    assert speaker.cached(second.json) == second.reused > 0


@both
async def test_media_is_never_reused(serving: Serving, stream: bool) -> None:
    """An image in any place: both legs render it, nothing is compared."""
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    for block in (image, result, {"type": "new_kind"}):
        answer = await serving.post(
            {
                "model": MODEL,
                "max_tokens": 5,
                "messages": [{"role": "user", "content": [block]}],
                "stream": stream,
            },
            path="/v1/messages",
        )
        assert answer.reason == "media"
    for item in (
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]},
        {"type": "computer_call"},
    ):
        answer = await serving.post(
            {"model": MODEL, "input": [item], "stream": stream}, path="/v1/responses"
        )
        assert answer.reason == "media"
    asked = serving.prefill.bodies("/v1/responses")
    assert [body["store"] for body in asked] == [False] * 3, "nobody can ask prefill for an answer"
