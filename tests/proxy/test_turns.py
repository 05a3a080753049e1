"""Turns of a conversation through the proxy, between fakes that notice every wrong read."""

from __future__ import annotations

import asyncio

import pytest

from proxy.session.fingerprint import SPAN_BYTES
from tests.proxy.conftest import Serve, Serving

LONG = "Tell me about the sea. " * 12


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [True, False])
async def test_growing_conversation_is_pulled_from_the_second_turn_on(
    serving: Serving, stream: bool, named: bool
) -> None:
    """Every turn but the first pulls its whole history, with and without an id, streamed or not."""
    extra = {"conversation_id": "c1"} if named else {}
    messages = [user(LONG)]
    history = 0
    for turn in range(5):
        answer = await serving.chat(messages, stream=stream, **extra)
        assert answer.status == 200
        assert answer.text == "Fine."
        if turn == 0:
            assert (answer.route, answer.reason) == ("cold-prefill", "new_session")
        else:
            assert (answer.route, answer.reason) == ("prefill-with-pull", "history_grew")
            assert answer.reused == history
            assert answer.headers["X-KVLoop-Pulled-Tokens"] == str(history)
        history = int(answer.headers["X-KVLoop-Prompt-Tokens"]) + len("Fine.")
        messages += [assistant("Fine."), user(f"Go on, please ({turn}).")]
    assert serving.cluster.faults == []
    assert serving.cluster.pulls == 4
    assert serving.decode.pinned() == 1


async def test_edited_history_pulls_only_what_is_verified_equal(serving: Serving) -> None:
    """After an edit in the middle prefill gets the common part, count and block list cut."""
    first = [user(LONG)]
    await serving.chat(first, conversation_id="c")
    edited = [user(LONG[:200] + "NO" + LONG[202:]), assistant("Fine."), user("And?")]
    answer = await serving.chat(edited, conversation_id="c")
    assert answer.reason == "history_cut"
    assert 201 - SPAN_BYTES // 3 <= answer.reused <= 201  # whole spans before byte 201
    body = serving.prefill.bodies("/v1/completions")[-1]
    assert body["kv_transfer_params"]["remote_num_tokens"] == answer.reused
    assert len(body["kv_transfer_params"]["remote_block_ids"][0]) == -(-answer.reused // 16)
    assert serving.cluster.faults == []


async def test_verification_is_what_keeps_an_edited_history_right(serve: Serve) -> None:
    """With verification off the same edit makes prefill read blocks of other tokens."""
    serving = await serve(verify_tokens=False)
    await serving.chat([user(LONG)], conversation_id="c")
    edited = [user("NO" + LONG[2:]), assistant("Fine."), user("And?")]
    await serving.chat(edited, conversation_id="c")
    assert serving.cluster.faults == ["tokens differ from the prompt"]


async def test_diverged_history_is_released_and_computed(serving: Serving) -> None:
    """A named conversation that starts over goes cold, and decode's old blocks are freed."""
    await serving.chat([user(LONG)], conversation_id="c")
    answer = await serving.chat([user("X" + LONG)], conversation_id="c")
    assert (answer.route, answer.reason, answer.reused) == ("cold-prefill", "history_diverged", 0)
    assert serving.cluster.releases == 1
    assert serving.decode.pinned() == 1  # the new turn's
    assert serving.cluster.faults == []


async def test_regenerated_turn_is_cut_to_the_shorter_prompt(serving: Serving) -> None:
    """The same prompt again: the handle covers more than the prompt and is cut to a span of it."""
    await serving.chat([user(LONG)], conversation_id="c")
    answer = await serving.chat([user(LONG)], conversation_id="c")
    assert answer.reason == "history_cut"
    assert 278 - SPAN_BYTES // 3 <= answer.reused < 278  # 278 prompt tokens, in whole spans
    assert serving.cluster.faults == []


async def test_another_conversation_with_the_same_opening_leaves_the_handle_alone(
    serving: Serving,
) -> None:
    """Without an id, a shared system prompt is no reason to consume a longer handle."""
    system = {"role": "system", "content": "You are helpful. " * 6}
    await serving.chat([system, user(LONG * 2)])
    other = await serving.chat([system, user("Something else entirely")])
    assert other.reason == "new_session"
    again = await serving.chat([system, user(LONG * 2), assistant("Fine."), user("And?")])
    assert again.reason == "history_grew"
    assert serving.cluster.faults == []


async def test_twenty_parallel_turns_of_one_conversation_pull_once(serve: Serve) -> None:
    """One handle, one read: of parallel turns, over two proxies, exactly one has it."""
    one = await serve()
    two = await serve(cluster=one.cluster, workers=(one.prefills, one.decodes))
    await one.chat([user(LONG)], conversation_id="c")
    messages = [user(LONG), assistant("Fine."), user("And?")]
    answers = await asyncio.gather(
        *(
            proxy.chat([*messages[:-1], user(f"And {n}?")], conversation_id="c")
            for n in range(10)
            for proxy in (one, two)
        )
    )
    assert all(answer.status == 200 for answer in answers)
    # Later turns may pull what earlier ones of the twenty stored; the first handle is read once.
    assert one.cluster.faults == []


async def test_expired_session_is_not_used(serve: Serve) -> None:
    """Past the session's time the handle is gone from the table: the turn is cold, and says why."""
    serving = await serve(decode_kv_ttl_seconds=0.4, expiry_margin_seconds=0.3)
    await serving.chat([user(LONG)], conversation_id="c")
    await asyncio.sleep(0.15)
    answer = await serving.chat([user(LONG), assistant("Fine."), user("?")], conversation_id="c")
    assert answer.reason == "lease_expired"
    assert serving.cluster.pulls == 0


@pytest.mark.parametrize("where", ["body", "number", "X-Conversation-ID", "X-Session-ID", "key"])
async def test_every_source_of_a_session_is_understood(serving: Serving, where: str) -> None:
    """conversation_id as text or number, both headers and prompt_cache_key find it."""
    fields: dict[str, object] = {}
    headers: dict[str, str] = {}
    match where:
        case "body":
            fields["conversation_id"] = "abc"
        case "number":
            fields["conversation_id"] = 7
        case "key":
            fields["prompt_cache_key"] = "abc"
        case _:
            headers[where] = "abc"
    await serving.chat([user(LONG)], headers=headers, **fields)
    messages = [user(LONG), assistant("Fine."), user("?")]
    answer = await serving.chat(messages, headers=headers, **fields)
    assert answer.reason == "history_grew"


async def test_salt_and_key_keep_sessions_apart(serving: Serving) -> None:
    """The same tokens under another cache_salt, or another prompt_cache_key, are not found."""
    await serving.chat([user(LONG)], cache_salt="a")
    messages = [user(LONG), assistant("Fine."), user("?")]
    assert (await serving.chat(messages, cache_salt="b")).reason == "new_session"
    assert (await serving.chat(messages, prompt_cache_key="k")).reason == "new_session"
    assert (await serving.chat(messages, cache_salt="a")).reason == "history_grew"


async def test_stock_decode_streams_are_served_and_named(serving: Serving) -> None:
    """Without the plugin a streamed turn leaves no handle; the next turn says so and is cold."""
    serving.decode.knobs.plugin = False
    first = await serving.chat([user(LONG)], stream=True, conversation_id="c")
    assert first.text == "Fine."
    messages = [user(LONG), assistant("Fine."), user("?")]
    second = await serving.chat(messages, conversation_id="c")
    assert second.reason == "stream_without_handle"
    third = await serving.chat(
        [*messages, assistant("Fine."), user("!")], conversation_id="c", stream=True
    )
    assert third.reason == "history_grew"  # the second turn was not streamed
    assert await serving.metric('kvloop_commits_total{result="stream_without_handle"}') == 2


@pytest.mark.parametrize(
    ("knob", "reason"),
    [({"pins": False}, "decode_kept_nothing"), ({"pin_refused": True}, "pin_refused")],
)
async def test_a_turn_that_kept_nothing_is_named_in_the_next(
    serving: Serving, knob: dict[str, bool], reason: str
) -> None:
    """Stop strings, or a refused pin, leave no handle: the next turn is cold and says why."""
    for name, value in knob.items():
        setattr(serving.decode.knobs, name, value)
    await serving.chat([user(LONG)], conversation_id="c")
    answer = await serving.chat([user(LONG), assistant("Fine."), user("?")], conversation_id="c")
    assert (answer.route, answer.reason) == ("cold-prefill", reason)


@pytest.mark.parametrize("hidden", [1, 2])
@pytest.mark.parametrize("said", [True, False])
async def test_hidden_reasoning_ids_limit_reuse_to_the_prompt(
    serving: Serving, hidden: int, said: bool
) -> None:
    """When a stock worker's output ids are incomplete, only the prompt's KV is trusted."""
    serving.decode.knobs.plugin = False
    serving.decode.knobs.hidden_output_ids = hidden
    extra = {"include_reasoning": False} if said else {}
    first = await serving.chat([user(LONG)], conversation_id="c", **extra)
    prompt = int(first.headers["X-KVLoop-Prompt-Tokens"])
    messages = [user(LONG), assistant("Fine."), user("?")]
    second = await serving.chat(messages, conversation_id="c", **extra)
    assert second.reused == prompt
    assert serving.cluster.faults == []


async def test_async_scheduling_count_is_not_trusted_beyond_the_known_ids(
    serving: Serving,
) -> None:
    """A handle that claims one token more than prompt + output - 1 is cut to what is known."""
    serving.decode.knobs.extra_computed = 1
    first = await serving.chat([user(LONG)], conversation_id="c", stream=True)
    known = int(first.headers["X-KVLoop-Prompt-Tokens"]) + len("Fine.")
    second = await serving.chat([user(LONG), assistant("Fine."), user("?")], conversation_id="c")
    assert second.reused == known
    assert serving.cluster.faults == []


async def test_media_is_served_without_reuse(serving: Serving) -> None:
    """Images: equal ids do not mean equal KV, so the turn is cold and keeps nothing."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "user", "content": [{"type": "text", "text": LONG}, part]}
    for _ in range(2):
        answer = await serving.chat([message], conversation_id="c")
        assert (answer.route, answer.reason) == ("cold-prefill", "media")
    assert serving.decode.pinned() == 0
    decode_body = serving.decode.bodies("/v1/chat/completions")[-1]
    assert "prompt_token_ids" not in decode_body["kv_transfer_params"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("n", 2, "multiple_choices"),
        ("use_beam_search", True, "multiple_choices"),
        ("prompt_logprobs", 1, "prompt_logprobs"),
        ("echo", True, "prompt_logprobs"),
    ],
)
async def test_requests_that_must_not_be_split_go_to_decode_alone(
    serving: Serving, field: str, value: object, reason: str
) -> None:
    """One worker does it all, without transfer parameters and so without a pin."""
    answer = await serving.chat([user(LONG)], **{field: value})
    assert (answer.route, answer.reason) == ("decode-only", reason)
    assert serving.prefill.requests == []
    assert "kv_transfer_params" not in serving.decode.bodies("/v1/chat/completions")[0]


async def test_several_cache_groups_are_pulled_whole_or_not_at_all(serving: Serving) -> None:
    """With two KV-cache groups a grown history is pulled, an edited one is released."""
    serving.decode.knobs.groups = 2
    await serving.chat([user(LONG)], conversation_id="c")
    grown = [user(LONG), assistant("Fine."), user("?")]
    assert (await serving.chat(grown, conversation_id="c")).reason == "history_grew"
    edited = [user(LONG), assistant("Other."), user("?")]
    answer = await serving.chat(edited, conversation_id="c")
    assert answer.reason == "uncuttable"
    assert serving.decode.pinned() == 1


async def test_reuse_can_be_switched_off(serve: Serve) -> None:
    """KVLOOP_REUSE_ENABLED=false: every turn cold, and decode is asked to keep nothing."""
    serving = await serve(reuse_enabled=False)
    for _ in range(2):
        answer = await serving.chat([user(LONG)], conversation_id="c")
        assert answer.reason == "reuse_disabled"
    assert serving.decode.pinned() == 0


async def test_a_worker_without_render_is_asked_to_tokenize(serving: Serving) -> None:
    """A stock worker refuses /render once; from then on /tokenize serves, and reuse works."""
    serving.prefill.knobs.render = False
    await serving.chat([user(LONG)], conversation_id="c")
    answer = await serving.chat([user(LONG), assistant("Fine."), user("?")], conversation_id="c")
    assert answer.reason == "history_grew"
    assert len(serving.prefill.bodies("/v1/chat/completions/render")) == 1
    assert len(serving.prefill.bodies("/tokenize")) == 2


async def test_unknown_fields_reach_the_worker_and_ours_do_not(serving: Serving) -> None:
    """Fields that we do not know pass through; the client's transfer parameters never do."""
    evil = {"remote_host": "evil", "prompt_token_ids": [1]}
    for params in (evil, "evil", ["evil"], 5):
        await serving.chat(
            [user("Hello")],
            conversation_id="c",
            frobnicate={"x": 1},
            kv_transfer_params=params,
            ec_transfer_params=evil,
            vllm_xargs={"kv_transfer_params": "evil", "mine": 1},
        )
    for worker in (serving.prefill, serving.decode):
        for _, body in worker.requests:
            assert "evil" not in str(body)
            assert "conversation_id" not in body
    assert serving.decode.bodies("/v1/chat/completions")[0]["frobnicate"] == {"x": 1}


async def test_answers_show_nothing_internal(serving: Serving) -> None:
    """No handle, no token ids, no plugin event reaches a client that did not ask for them."""
    plain = await serving.chat([user(LONG)])
    assert b"remote_block_ids" not in plain.body
    assert plain.json["kv_transfer_params"] is plain.json["prompt_token_ids"] is None
    assert plain.json["choices"][0]["token_ids"] is None
    streamed = await serving.chat([user(LONG)], stream=True)
    assert b"kvloop" not in streamed.body
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    asked = await serving.chat([user(LONG)], return_token_ids=True)
    assert asked.json["choices"][0]["token_ids"]


async def test_concurrent_conversations_do_not_mix(serving: Serving) -> None:
    """Thirty conversations grow at once: each pulls its own history, none another's."""

    async def converse(number: int) -> list[str]:
        messages = [user(f"{number}: {LONG}")]
        reasons = []
        for turn in range(4):
            answer = await serving.chat(messages, stream=bool(number % 2))
            reasons.append(answer.reason)
            messages += [assistant("Fine."), user(f"More {turn}")]
        return reasons

    for reasons in await asyncio.gather(*(converse(number) for number in range(30))):
        assert reasons == ["new_session", *["history_grew"] * 3]
    assert serving.cluster.faults == []
