"""Small stand-ins for the parts of vLLM 0.32.0 that our code wraps, subclasses or reads.

Signatures and the order of effects are those of the real ones; ``recorded/`` holds what the real
ones answered.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

DONE = "data: [DONE]\n\n"


@dataclass
class Output:
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0
    text: str = "x"


@dataclass
class Result:
    outputs: list[Output]
    finished: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: [1, 2, 3])


@dataclass
class Request:
    kv_transfer_params: dict[str, Any] | None = None
    n: int | None = None
    use_beam_search: bool = False


class GenerationError(Exception):
    pass


def raise_if_error(result: Result) -> None:
    if any(output.finish_reason == "error" for output in result.outputs):
        raise GenerationError


class OpenAIServingChat:
    async def chat_completion_stream_generator(
        self,
        request,
        result_generator,
        request_id,
        model_name,
        conversation,
        tokenizer,
        request_metadata,
        chat_template_kwargs=None,
        mm_token_counts=None,
    ):
        try:
            async for result in result_generator:
                raise_if_error(result)
                yield f"data: {json.dumps({'text': [o.text for o in result.outputs]})}\n\n"
        except GenerationError:
            yield 'data: {"error": {"code": 500}}\n\n'
        yield DONE

    async def chat_completion_full_generator(
        self,
        request,
        result_generator,
        request_id,
        model_name,
        conversation,
        tokenizer,
        request_metadata,
        parser=None,
        mm_token_counts=None,
    ):
        result = [result async for result in result_generator][-1]
        raise_if_error(result)
        return {"kv_transfer_params": result.kv_transfer_params}


class OpenAIServingCompletion:
    async def completion_stream_generator(
        self,
        request,
        engine_inputs,
        result_generator,
        request_id,
        created_time,
        model_name,
        num_prompts,
        tokenizer,
        request_metadata,
    ):
        try:
            async for _index, result in result_generator:
                raise_if_error(result)
                yield f"data: {json.dumps({'text': [o.text for o in result.outputs]})}\n\n"
        except GenerationError:
            yield 'data: {"error": {"code": 500}}\n\n'
        yield DONE

    def request_output_to_completion_response(
        self,
        final_res_batch,
        request,
        request_id,
        created_time,
        model_name,
        tokenizer,
        request_metadata,
    ):
        return {"kv_transfer_params": final_res_batch[0].kv_transfer_params}


class AnthropicServingMessages:
    """In the stand-in module it subclasses that module's ``OpenAIServingChat``."""

    async def message_stream_converter(self, generator):
        try:
            async for item in generator:
                if not item.startswith("data:"):
                    yield 'event: error\ndata: {"type":"error"}\n\n'
                elif item == DONE:
                    yield 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
                elif "error" in item:
                    raise ValueError
                else:
                    yield f"event: content_block_delta\n{item}"
        except ValueError:
            yield 'event: error\ndata: {"type":"error"}\n\n'


class ResponsesContext:
    """``SimpleContext``: gathers one generation."""

    def __init__(self):
        self.final_output = None
        self.kv_transfer_params = None

    def append_output(self, result):
        ids = list(self.final_output.outputs[0].token_ids) if self.final_output else []
        last = result.outputs[0]
        gathered = Output([*ids, *last.token_ids], last.finish_reason)
        self.final_output = Result([gathered], result.finished, result.kv_transfer_params)
        if result.kv_transfer_params is not None:
            self.kv_transfer_params = result.kv_transfer_params


class OpenAIServingResponses:
    async def responses_full_generator(
        self,
        request,
        sampling_params,
        result_generator,
        context,
        model_name,
        tokenizer,
        request_metadata,
        created_time=None,
    ):
        async for _ in result_generator:
            pass
        raise_if_error(context.final_output)
        return {"kv_transfer_params": context.kv_transfer_params}


def serving_module() -> ModuleType:
    """A fresh module with fresh classes, so that a patch stays in one test."""
    module = ModuleType("serving_stand_in")
    chat: Any = None
    for original in (OpenAIServingChat, OpenAIServingCompletion, OpenAIServingResponses):
        made = type(original.__name__, (), dict(vars(original)))
        chat = chat or made
        setattr(module, original.__name__, made)
    messages = type("AnthropicServingMessages", (chat,), dict(vars(AnthropicServingMessages)))
    module.AnthropicServingMessages = messages
    return module


async def engine(*results: Any) -> AsyncIterator[Any]:
    for result in results:
        yield result


class NixlStats:
    """``NixlKVConnectorStats`` with one of its nine lists."""

    def __init__(self, data: dict[str, list[Any]] | None = None) -> None:
        self.data: dict[str, list[Any]] = data or {}
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"transfer_duration": []}

    def is_empty(self) -> bool:
        return not self.data["transfer_duration"]

    def aggregate(self, other: Any) -> Any:
        if not other.is_empty():
            for key, values in other.data.items():
                self.data[key].extend(values)
        return self

    def reduce(self) -> dict[str, float]:
        return {"Num successful transfers": len(self.data["transfer_duration"])}


class NixlPromMetrics:
    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        self._gauge_cls, self._counter_cls = metric_types
        self.per_engine_labelvalues = per_engine_labelvalues

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        assert "transfer_duration" in transfer_stats_data


class PullScheduler:
    """The bookkeeping of ``NixlPullConnectorScheduler`` that decides about pins."""

    def __init__(self, bidirectional: bool, ttl: int) -> None:
        self._reqs_in_batch: set[str] = set()
        self._reqs_need_send: dict[str, float] = {}
        self._reqs_not_processed: set[str] = set()
        self.decoder_kv_blocks_ttl = ttl
        self.is_bidirectional_kv_xfer_enabled = bidirectional

    def update_state_after_alloc(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params and (params.get("do_remote_decode") or params.get("do_remote_prefill")):
            self._reqs_in_batch.add(request.request_id)
            params["do_remote_prefill"] = False

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        params = request.kv_transfer_params
        if not params:
            return False, None
        prefill = bool(params.get("do_remote_decode"))
        if request.aborted:
            self._reqs_not_processed.add(request.request_id)
            return False, None
        self._reqs_need_send[request.request_id] = 1e9
        return True, {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": block_ids,
            "remote_blocks_expiry_time": None if prefill else 1e9,
        }


class NixlPullConnector:
    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        self.kv_transfer_config = vllm_config
        scheduler = PullScheduler(True, vllm_config.get_from_extra_config("ttl", 480))
        self.connector_scheduler = scheduler if role == "scheduler" else None
        self.connector_worker = None if role == "scheduler" else SimpleNamespace(stats=None)

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self._kv_cache_manager = manager
        self.bind_gpu_block_pool(manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        return

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.update_state_after_alloc(request)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.request_finished(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        return

    def get_kv_connector_stats(self) -> Any:
        assert self.connector_worker is not None
        return self.connector_worker.stats
