"""What is tried: one case for each feature of each route."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.real.features.stack import ADAPTER, MODEL

WORDS = (
    "Once upon a time a small dog called Rex lived near a wide river and counted every boat. " * 9
)
REUSED = "reuse"
"""The turn must pull its history; any other expectation is the reason that must be named."""

WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}
CLOCK = {
    "name": "clock",
    "description": "The time.",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["zone"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Rex", "Fido"]},
        "boats": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "boats"],
    "additionalProperties": False,
}
CHAT_TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, CLOCK)]
ANTHROPIC_TOOLS = [
    {
        "name": t["name"],
        "description": t["description"],
        "input_schema": t["parameters"],
        "strict": True,
    }
    for t in (WEATHER, CLOCK)
]
RESPONSES_TOOLS = [{"type": "function", "strict": True, **tool} for tool in (WEATHER, CLOCK)]
STRICT_TOOLS = [
    {"type": "function", "function": {**tool, "strict": True}} for tool in (WEATHER, CLOCK)
]
"""Of the others the model leaves the arguments open, and ends their call sooner."""


AT_ONCE: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
"""The answer begins at once: the model would think, noise that never ends, before it obeys."""
CALL = r'<tool_call>|"arguments": "|"type": "tool_use"'
"""A call, or its beginning as text: strict arguments may be cut off in the white space that the
model likes between their braces."""
OBJECT = r'": "(\\n|\\t| )*\{'


@dataclass(frozen=True, eq=False)
class Case:
    """One cell of the table. ``fields`` go into both turns, ``opening`` only into the first,
    ``last`` only into the second; a function there is given what it replaces and what was said."""

    route: str
    feature: str
    fields: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    opening: dict[str, Any] = field(default_factory=dict)
    expect: str = REUSED
    """``reuse``, a reason, or the status of a refusal that both give."""
    streams: tuple[bool, ...] = (False, True)
    model: str = MODEL
    shows: str = ""
    """A pattern that the answer's JSON must match: else what is tried might not have happened."""

    def turns(self, mark: str) -> list[dict[str, Any]]:
        """Both requests; ``mark`` keeps this conversation apart from every other."""
        said = f"{mark} {WORDS}"
        common = {"model": self.model, "temperature": 0, **self.fields}
        grown: dict[str, Any]
        if self.route == "/v1/completions":
            first, grown = {"prompt": said}, {"prompt": said + " The dog said"}
            limit = "max_tokens"
        else:
            start = [{"role": "user", "content": said}]
            more = [
                {"role": "assistant", "content": "I see."},
                {"role": "user", "content": "What did Rex say then?"},
            ]
            name = "input" if self.route == "/v1/responses" else "messages"
            first, grown = {name: start}, {name: start + more}
            limit = "max_output_tokens" if self.route == "/v1/responses" else "max_tokens"
        turns = []
        for body, own in ((first, self.opening), (grown, self.last)):
            turn = {limit: 12, **common, **body}
            for key, value in own.items():
                turn[key] = value(turn[key], said) if callable(value) else value
            turns.append(turn)
        return turns


def _chat(feature: str, **kwargs: Any) -> Case:
    return Case("/v1/chat/completions", feature, **kwargs)


def _text(feature: str, **kwargs: Any) -> Case:
    return Case("/v1/completions", feature, **kwargs)


def _message(feature: str, **kwargs: Any) -> Case:
    return Case("/v1/messages", feature, **kwargs)


def _response(feature: str, **kwargs: Any) -> Case:
    return Case("/v1/responses", feature, **kwargs)


def _after_a_call(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return [
        messages[0],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


def _after_a_use(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}
    return [
        messages[0],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]


def _after_an_item(items: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "call_1", "name": "weather"}
    return [
        items[0],
        {**call, "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]


def _ids(prompt: str, said: str) -> list[int]:
    """As token ids, one for each of the first letters: whatever text they stand for."""
    return [300 + letter for letter in said.encode()[:190]]


def _more_ids(prompt: str, said: str) -> list[int]:
    return [*_ids(prompt, said), *range(700, 720)]


def _unfinished(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    return [messages[0], {"role": "assistant", "content": "Well, Rex said"}]


_IMAGE = "data:image/png;base64,iVBORw0KGgo="
_SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "dog", "schema": SCHEMA}}

CASES: tuple[Case, ...] = (
    _chat("text"),
    _chat("token ids in the answer", last={"return_token_ids": True}),
    _chat("prompt text in the answer", last={"return_prompt_text": True}),
    _chat("usage in streams", last={"stream_options": {"include_usage": True}}, streams=(True,)),
    _chat("tools, tool_choice auto", fields={"tools": CHAT_TOOLS}),
    _chat(
        "tools, tool_choice none", fields={**AT_ONCE, "tools": CHAT_TOOLS, "tool_choice": "none"}
    ),
    _chat(
        "tools, tool_choice required",
        fields={**AT_ONCE, "tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": 60},
        shows=CALL,
    ),
    _chat(
        "strict tools",
        fields={**AT_ONCE, "tools": STRICT_TOOLS, "tool_choice": "required", "max_tokens": 60},
        shows=CALL,
    ),
    _chat(
        "parallel tool calls",
        fields={**AT_ONCE, "tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": 120},
        shows=CALL,
    ),
    _chat(
        "tools, named tool",
        fields={
            **AT_ONCE,
            "tools": CHAT_TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "clock"}},
            "max_tokens": 40,
        },
        shows=CALL,
    ),
    _chat(
        "parallel tool calls off",
        fields={
            **AT_ONCE,
            "tools": CHAT_TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 60,
        },
        shows=CALL,
    ),
    _chat("tool results", fields={"tools": CHAT_TOOLS}, last={"messages": _after_a_call}),
    _chat("reasoning content", fields={"chat_template_kwargs": {"enable_thinking": True}}),
    _chat("reasoning effort", fields={"reasoning_effort": "low"}),
    _chat("reasoning hidden", last={"include_reasoning": False}),
    _chat("thinking budget", last={"thinking_token_budget": 4}),
    _chat(
        "JSON object",
        fields=AT_ONCE,
        last={"response_format": {"type": "json_object"}, "max_tokens": 30},
        shows=OBJECT,
    ),
    _chat(
        "JSON schema",
        fields=AT_ONCE,
        last={"response_format": _SCHEMA_FORMAT, "max_tokens": 40},
        shows=OBJECT,
    ),
    _chat("JSON schema, after reasoning", last={"response_format": _SCHEMA_FORMAT}),
    _chat(
        "structured outputs: regex",
        fields=AT_ONCE,
        last={"structured_outputs": {"regex": "[a-c]{6}"}},
        shows=r'"[a-c]{6}"',
    ),
    _chat(
        "structured outputs: choice",
        fields=AT_ONCE,
        last={"structured_outputs": {"choice": ["yes", "no"]}},
        shows=r'"(yes|no)"',
    ),
    _chat("logprobs, top_logprobs", last={"logprobs": True, "top_logprobs": 3}),
    _chat("n > 1", last={"n": 2, "seed": 5, "temperature": 0.8}, expect="multiple_choices"),
    _chat("seed", last={"seed": 11, "temperature": 0.9, "top_p": 0.9, "top_k": 20}),
    _chat("stop strings", last={"stop": ["a", "e"], "max_tokens": 30}),
    _chat("stop token ids", last={"stop_token_ids": list(range(100, 20000)), "max_tokens": 30}),
    _chat(
        "penalties",
        last={
            "presence_penalty": 1.5,
            "frequency_penalty": 1.0,
            "repetition_penalty": 1.2,
            "max_tokens": 24,
        },
    ),
    _chat("logit_bias", last={"logit_bias": {"1000": 50, "1001": 49}}),
    _chat("bad words", last={"bad_words": ["the", "dog"]}),
    _chat("allowed token ids", last={"allowed_token_ids": [500, 501, 502]}),
    _chat("min_tokens, max_completion_tokens", last={"min_tokens": 3, "max_completion_tokens": 7}),
    _chat(
        "continue_final_message",
        last={
            "messages": _unfinished,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    _chat("priority", fields={"priority": 3}),
    _chat("cache_salt", fields={"cache_salt": "salt"}),
    _chat("LoRA adapter", model=ADAPTER),
    _chat("user, metadata, unknown fields", last={"user": "u", "metadata": {"a": "b"}, "zz": 1}),
    _chat(
        "image, for a text model",
        last={
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": _IMAGE}}]}
            ]
        },
        expect="400",
    ),
    _chat(
        "too long a prompt",
        last={"messages": [{"role": "user", "content": WORDS * 60}]},
        expect="400",
    ),
    _chat(
        "too long an answer",
        last={"max_tokens": 100000},
        expect="400",
    ),
    _chat(
        "prompt cut by the worker",
        last={"truncate_prompt_tokens": 150, "truncation_side": "right"},
    ),
    _chat(
        "beam search",
        last={"use_beam_search": True, "n": 2},
        expect="multiple_choices",
        streams=(False,),
    ),
    _chat(
        "prompt_logprobs", last={"prompt_logprobs": 2}, expect="prompt_logprobs", streams=(False,)
    ),
    _chat("echo", last={"echo": True}, expect="prompt_logprobs"),
    _chat("bad schema", last={"response_format": {"type": "json_schema"}}, expect="400"),
    _chat("bad sampling value", last={"top_k": -5}, expect="400"),
    _text("text"),
    _text(
        "token ids",
        opening={"prompt": _ids},
        last={"prompt": _more_ids},
    ),
    _text("usage in streams", last={"stream_options": {"include_usage": True}}, streams=(True,)),
    _text(
        "several prompts",
        last={"prompt": lambda prompt, said: [prompt, said]},
        expect="multiple_prompts",
    ),
    _text("echo", last={"echo": True}, expect="prompt_logprobs"),
    _text(
        "echo, nothing generated", last={"echo": True, "max_tokens": 0}, expect="prompt_logprobs"
    ),
    _text("logprobs", last={"logprobs": 3}),
    _text("n > 1", last={"n": 2, "seed": 5, "temperature": 0.8}, expect="multiple_choices"),
    _text("seed", last={"seed": 11, "temperature": 0.9}),
    _text("stop strings", last={"stop": ["a", "e"], "max_tokens": 30}),
    _text("penalties", last={"presence_penalty": 1.5, "frequency_penalty": 1.0}),
    _text("logit_bias", last={"logit_bias": {"1000": 50}}),
    _text(
        "structured outputs: regex",
        last={
            "prompt": lambda prompt, said: prompt + "</think>",
            "structured_outputs": {"regex": "[a-c]{6}"},
        },
        shows=r'"[a-c]{6}"',
    ),
    _text("token ids in the answer", last={"return_token_ids": True}),
    _text("priority", fields={"priority": 3}),
    _text("LoRA adapter", model=ADAPTER),
    _text("prompt cut by the worker", last={"truncate_prompt_tokens": 150}, expect="not_tokenised"),
    _text(
        "prompt_logprobs", last={"prompt_logprobs": 2}, expect="prompt_logprobs", streams=(False,)
    ),
    _text("echo, logprobs", last={"echo": True, "logprobs": 2}, expect="prompt_logprobs"),
    _text("suffix, for a model without one", last={"suffix": "x"}, expect="400"),
    _text(
        "too long a prompt", last={"prompt": lambda prompt, said: said + WORDS * 60}, expect="400"
    ),
    _text("too long an answer", last={"max_tokens": 100000}, expect="400"),
    _text("ids that are no tokens", last={"prompt": [999999]}, expect="400"),
    _message("text"),
    _message("system prompt", fields={"system": [{"type": "text", "text": "You are kind."}]}),
    _message("tools, tool_choice auto", fields={"tools": ANTHROPIC_TOOLS}),
    _message(
        "tools, tool_choice any",
        fields={
            **AT_ONCE,
            "tools": ANTHROPIC_TOOLS,
            "tool_choice": {"type": "any"},
            "max_tokens": 60,
        },
        shows=CALL,
    ),
    _message(
        "tools, named tool",
        fields={
            **AT_ONCE,
            "tools": ANTHROPIC_TOOLS,
            "tool_choice": {"type": "tool", "name": "clock"},
            "max_tokens": 40,
        },
        shows=CALL,
    ),
    _message("tool results", fields={"tools": ANTHROPIC_TOOLS}, last={"messages": _after_a_use}),
    _message("thinking, adaptive", last={"thinking": {"type": "adaptive"}}),
    _message(
        "thinking with a budget",
        last={"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1030},
    ),
    _message("thinking switched off", fields={"thinking": {"type": "disabled"}}),
    _message("effort", fields={"output_config": {"effort": "low"}}),
    _message(
        "JSON schema",
        fields=AT_ONCE,
        shows=OBJECT,
        last={
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "max_tokens": 40,
        },
    ),
    _message("stop_sequences", last={"stop_sequences": ["a", "e"], "max_tokens": 30}),
    _message("top_k, top_p", last={"top_k": 1, "top_p": 0.9, "temperature": 1}),
    _message("metadata", last={"metadata": {"user_id": "u"}}),
    _message("LoRA adapter", model=ADAPTER),
    _message(
        "too small a thinking budget",
        last={"thinking": {"type": "enabled", "budget_tokens": 5}},
        expect="400",
    ),
    _message(
        "too long a prompt",
        last={"messages": [{"role": "user", "content": WORDS * 60}]},
        expect="400",
    ),
    _response("text"),
    _response("plain text input", last={"input": lambda items, said: said}, expect="history_cut"),
    _response("instructions", fields={"instructions": "Be brief."}),
    _response("tools, tool_choice auto", fields={"tools": RESPONSES_TOOLS}),
    _response(
        "tools, tool_choice required",
        fields={
            **AT_ONCE,
            "tools": RESPONSES_TOOLS,
            "tool_choice": "required",
            "max_output_tokens": 60,
        },
        shows=CALL,
    ),
    _response(
        "tools, named tool",
        fields={
            **AT_ONCE,
            "tools": RESPONSES_TOOLS,
            "tool_choice": {"type": "function", "name": "clock"},
            "max_output_tokens": 40,
        },
        shows=CALL,
    ),
    _response("tool results", fields={"tools": RESPONSES_TOOLS}, last={"input": _after_an_item}),
    _response(
        "JSON schema",
        fields=AT_ONCE,
        shows=OBJECT,
        last={
            "text": {"format": {"type": "json_schema", "name": "dog", "schema": SCHEMA}},
            "max_output_tokens": 40,
        },
    ),
    _response("reasoning effort", fields={"reasoning": {"effort": "low"}}),
    _response(
        "logprobs",
        last={"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    _response("seed", last={"seed": 11, "temperature": 0.9}),
    _response("stop strings", last={"stop": ["a", "e"], "max_output_tokens": 30}),
    _response("raw messages in the answer", last={"enable_response_messages": True}),
    _response("not stored", last={"store": False}),
    _response("LoRA adapter", model=ADAPTER),
    _response("prompt cut by the worker", last={"truncation": "auto"}),
    _response("too long a prompt", last={"input": WORDS * 60}, expect="400"),
    _response("too long an answer", last={"max_output_tokens": 100000}, expect="400"),
    _response(
        "built-in tools", last={"tools": [{"type": "web_search_preview"}]}, expect="builtin_tools"
    ),
)
