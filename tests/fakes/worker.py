"""A scripted vLLM worker: a real HTTP server that speaks the wire format of vLLM 0.32.0.

It holds no model. Its tokeniser maps UTF-8 bytes to ids, its decode answers with scripted text, and
its "KV blocks" are the token ids themselves: a prefill fake that pulls compares what it reads with
its own prompt, so a wrong, second or late read is recorded as a fault. ``tests/contract`` holds its
answers against recorded ones of the real worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from tests.fakes import push, routes

ROLE_IDS = {"system": 300, "user": 301, "assistant": 302, "tool": 303}
END = 310
MODEL = "fake-model"


def tokenise(body: dict[str, Any]) -> list[int]:
    """The fake's chat template: role id, bytes, end id; then the generation prompt."""
    ids: list[int] = []
    if body.get("tools"):
        ids += [299, *json.dumps(body["tools"]).encode(), END]
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            parts = [part if isinstance(part, str) else part.get("text", "") for part in content]
            content = "".join(map(str, parts))
        ids += [ROLE_IDS.get(message["role"], 304), *content.encode(), END]
    if body.get("add_generation_prompt", True):
        ids.append(ROLE_IDS["assistant"])
    return ids


@dataclass
class Pin:
    """Blocks kept for one handle: the tokens they really hold."""

    tokens: list[int]
    blocks: list[int]
    expires: float


@dataclass
class Knobs:
    """How the fake misbehaves. Counters count down; zero means well-behaved."""

    answer: str = "Fine."
    finish_reason: str = "stop"
    letters_per_chunk: int = 1
    """As vLLM's stream-interval: one token a chunk by default."""
    chunk_delay: float = 0.0
    prefill_delay: float = 0.0
    token_delay: float = 0.0
    """Seconds of prefill for each prompt token that is neither pulled nor cached."""
    plugin: bool = True
    """Emit the kvloop comment event before [DONE]."""
    connector: bool = True
    """Report kvloop_pulled_tokens and honour kvloop_lease_seconds."""
    render: bool = True
    disabled_effort: str = "none"
    """What /v1/messages asks the template for when thinking is off; render always says none."""
    pins: bool = True
    """False: finish as after a stop string: no handle."""
    pin_refused: bool = False
    fail_next: dict[str, int] = field(default_factory=dict)
    """Path -> how many requests get a 500."""
    refuse_next: dict[str, int] = field(default_factory=dict)
    """Path -> how many requests get a 400."""
    warm_fails: int = 0
    """Prefill requests with a handle that get a 500."""
    hang_warm: bool = False
    stream_error_first: int = 0
    """Streams that report an error after the role chunk."""
    die_after_chunks: int | None = None
    health_status: int = 200
    hidden_output_ids: int = 0
    """Ids left out of token_ids, as hidden reasoning is."""
    extra_computed: int = 0
    """Added to remote_num_tokens, as asynchronous scheduling may."""
    groups: int = 1
    version: str = ""
    transfer_mode: str = "pull"
    server_info: bool = False
    """Serve /server_info, as in vLLM's development mode."""
    prefill_gate: asyncio.Event | None = None
    """Prefills wait for it."""
    running: int = 0
    waiting: int = 0
    """Requests of other proxies, on the metrics page."""
    seconds_per_token: float = 0.0
    """What computing, and moving, a prompt token takes."""
    seconds_per_moved_token: float = 0.0
    wrong_after_pull: bool = False
    """Sample another token after a pull, as with wrong KV."""


class Cluster:
    """The fake workers of one test: who holds which blocks, and what went wrong."""

    def __init__(self) -> None:
        self.pins: dict[tuple[str, str], Pin] = {}
        self.faults: list[str] = []
        self.releases = 0
        self.pulls = 0
        self.engines: set[str] = set()
        self.push = push.PushBoard(self.faults)


class FakeWorker:
    """One fake. ``await start()``, then ``url``; ``requests`` holds what it was sent."""

    middlewares: Sequence[Middleware] = ()
    """Around every route; a subclass may misbehave in them."""

    def __init__(
        self,
        cluster: Cluster,
        role: str,
        *,
        block_size: int = 16,
        engine_id: str | None = None,
        lease: float = 480.0,
        prefix_cache: bool = False,
        blocks: int = 2**16,
    ) -> None:
        self.cluster = cluster
        self.role = role
        self.block_size = block_size
        self.block_count = blocks
        self.pins_refused = 0
        self._refused = False
        self.engine_id = engine_id or f"engine-{role}-{id(self):x}"
        self.lease = lease
        self.knobs = Knobs()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.more_metrics: Callable[[], str] = str
        """Gives lines to add to the page of metrics."""
        self.headers: list[dict[str, str]] = []
        """Of each request in ``requests``, with lower-case names."""
        self.started_at = time.time()
        self.stored_responses: dict[str, dict[str, Any]] = {}
        self.open_requests = 0
        self.aborted = 0
        self._numbers = itertools.count(1)
        self._blocks = itertools.count(1)
        self.appends = 0
        self._cache: set[int] | None = set() if prefix_cache else None
        self._engine = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> FakeWorker:
        app = web.Application(client_max_size=2**30, middlewares=self.middlewares)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/render", self._render_messages)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/responses/render", self._render_responses)
        app.router.add_get("/v1/responses/{id}", self._stored_response)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/v1/audio/transcriptions", self._transcribe)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.cluster.engines.add(self.engine_id)
        return self

    async def stop(self) -> None:
        """The process ends: its engine and its blocks are gone."""
        self.cluster.engines.discard(self.engine_id)
        for key in [key for key in self.cluster.pins if key[0] == self.engine_id]:
            del self.cluster.pins[key]
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """A new process on the same address: new engine, nothing pinned."""
        await self.stop()
        self.engine_id += "'"
        self.started_at += 1000
        await self.start()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.requests if where == path]

    def pinned(self) -> int:
        """How many handles this worker keeps blocks for."""
        now = time.monotonic()
        return sum(
            key[0] == self.engine_id and pin.expires > now for key, pin in self.cluster.pins.items()
        )

    @property
    def pin_limit(self) -> int:
        """Most blocks that the connector pins: half of those that can be used."""
        return (self.block_count - 1) // 2

    def pinned_blocks(self) -> int:
        """Blocks that pins take now."""
        now = time.monotonic()
        return sum(
            len(pin.blocks)
            for key, pin in self.cluster.pins.items()
            if key[0] == self.engine_id and pin.expires > now
        )

    # Routes that any worker has.

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.knobs.health_status)

    async def _metrics(self, request: web.Request) -> web.Response:
        knobs = self.knobs
        page = (
            f"process_start_time_seconds {self.started_at:.2f}\n"
            f'vllm:cache_config_info{{block_size="{self.block_size}",'
            f'enable_prefix_caching="{self._cache is not None}",engine="0",'
            f'num_gpu_blocks="{self.block_count}"}} 1.0\n'
        )
        if self.more_metrics is str:  # a recorded page brings its own
            running = knobs.running + self.open_requests
            page += f'vllm:num_requests_running{{engine="0"}} {running:.1f}\n'
            page += f'vllm:num_requests_waiting{{engine="0"}} {knobs.waiting:.1f}\n'
        if knobs.connector and self.role == "decode" and self.more_metrics is str:
            page += f'vllm:kvloop_pin_limit_blocks{{engine="0"}} {self.pin_limit}\n'
            page += f'vllm:kvloop_pinned_blocks{{engine="0"}} {self.pinned_blocks()}\n'
        return web.Response(text=page + self.more_metrics())

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.knobs.version})

    async def _server_info(self, request: web.Request) -> web.Response:
        if not self.knobs.server_info:
            raise web.HTTPNotFound
        return web.json_response(push.server_info(self.knobs.transfer_mode))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "max_model_len": 100000}],
            }
        )

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(await request.read())
        self.requests.append((request.path, body))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.knobs.fail_next.get(request.path, 0) > 0:
            self.knobs.fail_next[request.path] -= 1
            raise web.HTTPInternalServerError(
                text=_error("Internal server error", "InternalServerError", 500),
                content_type="application/json",
            )
        if self.knobs.refuse_next.get(request.path, 0) > 0:
            self.knobs.refuse_next[request.path] -= 1
            raise web.HTTPBadRequest(
                text=_error("not here", "BadRequestError", 400).replace("null", '"messages"'),
                content_type="application/json",
            )
        return body

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        ids = routes.text_ids(body["prompt"]) if "prompt" in body else tokenise(body)
        return web.json_response(
            {"count": len(ids), "max_model_len": 100000, "tokens": ids, "token_strs": None}
        )

    async def _render(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        return self._rendered(body, tokenise(body))

    async def _render_messages(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        return self._rendered(body, tokenise(routes.chat_of_messages(body)))

    async def _render_responses(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        return self._rendered(body, tokenise(routes.chat_of_response(body)))

    def _rendered(self, body: dict[str, Any], ids: list[int]) -> web.Response:
        if not self.knobs.render:
            return web.Response(
                status=403,
                text=_error("Scale-out endpoints are disabled.", "PermissionDeniedError", 403),
                content_type="application/json",
            )
        if body.get("temperature", 0) > 100:
            return _bad_request("temperature is too high", "temperature")
        return web.json_response({"request_id": "chatcmpl-x", "token_ids": ids, "features": None})

    # Prefill.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        given = body["prompt"]
        first = given[0] if isinstance(given, list) and not isinstance(given[0], int) else given
        prompt = routes.text_ids(first) if isinstance(first, str) else list(first)
        return await self._generated(request, body, prompt, routes.completion)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        chat = routes.chat_of_messages(body, self.knobs.disabled_effort)
        prompt = self._told(body) or tokenise(chat)
        return await self._generated(request, body, prompt, routes.message)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        prompt = self._told(body) or tokenise(routes.chat_of_response(body))
        return await self._generated(request, body, prompt, routes.response)

    @staticmethod
    def _told(body: dict[str, Any]) -> list[int] | None:
        return (body.get("kv_transfer_params") or {}).get("prompt_token_ids")

    async def _generated(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], answer: Any
    ) -> web.StreamResponse:
        if self.role == "prefill":
            made = await self._prefilled(body, prompt, chat=False)
            self._pushed(request, body, prompt, made)
            return made
        params = body.get("kv_transfer_params")
        handed_over = self.judge(params)
        self.open_requests += 1
        try:
            await self._received(request, body, params, prompt, handed_over=handed_over)
            await self._decoded(prompt, handed_over=handed_over)
            answered: web.StreamResponse = await answer(self, request, body, prompt)
            return answered
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open_requests -= 1

    def _pushed(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], made: web.Response
    ) -> None:
        """A prefill is done: its blocks can be written, if it is prefill that moves them."""
        params = body.get("kv_transfer_params") or {}
        if (
            self.knobs.transfer_mode == "push"
            and made.status == 200
            and params.get("do_remote_decode")
        ):
            base_id = push.base_id(request, body)
            self.cluster.push.finished(self.engine_id, base_id, prompt)

    async def _received(
        self,
        request: web.Request,
        body: dict[str, Any],
        params: dict[str, Any] | None,
        prompt: list[int],
        *,
        handed_over: bool,
    ) -> None:
        """Wait for prefill's writes, if it is prefill that moves the blocks."""
        if not handed_over or not params:
            return
        given = params.get("transfer_mode", "pull")
        engine_id = params["remote_engine_id"]
        if given != self.knobs.transfer_mode or (
            given == "push" and engine_id not in self.cluster.engines
        ):
            raise web.HTTPInternalServerError(  # the handshake fails
                text=_error("Internal server error", "InternalServerError", 500),
                content_type="application/json",
            )
        if given == "push" and self._local(prompt) < len(prompt):
            base_id = push.base_id(request, body)
            await self.cluster.push.register(engine_id, base_id, prompt).written.wait()

    async def _decoded(self, prompt: list[int], *, handed_over: bool) -> None:
        """Take the time that decode needs, and remember what it computed."""
        local = self._local(prompt)
        await self._work(
            computed=1 if handed_over else len(prompt) - local,
            moved=len(prompt) - local if handed_over else 0,
        )
        self._remember([*prompt, *self.output()])

    def judge(self, params: dict[str, Any] | None) -> bool:
        """Has prefill handed this request over? Notes what would pin blocks for ever."""
        handed_over = bool(params and params.get("do_remote_prefill"))
        if params and not handed_over and not params.get("do_remote_decode"):
            if not self.knobs.connector:
                self.cluster.faults.append("both flags false: blocks pinned for ever")
            self.appends += 1
        return handed_over

    # Routes that one worker answers alone.

    async def _count(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        chat = routes.chat_of_messages(body, self.knobs.disabled_effort)
        return web.json_response({"input_tokens": len(tokenise(chat))})

    async def _stored_response(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, {}))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        found = self.stored_responses.get(request.match_info["id"])
        return web.json_response(found, status=200 if found else 404)

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        if body.get("input") == "refuse":
            return _bad_request("no such thing", "input")
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
        answer = {"object": "list", "model": body.get("model"), "data": [vector]}
        return web.json_response(answer, headers={"X-Worker-Secret": "10.0.0.7"})

    async def _transcribe(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.requests.append((request.path, {key: str(value) for key, value in form.items()}))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"text": "words"})

    async def _prefilled(
        self, body: dict[str, Any], prompt: list[int], *, chat: bool
    ) -> web.Response:
        params = body.get("kv_transfer_params") or {}
        pulled, local = 0, self._local(prompt)
        if params.get("remote_block_ids"):
            if self.knobs.hang_warm:
                await asyncio.Event().wait()
            if self.knobs.warm_fails > 0:
                self.knobs.warm_fails -= 1
                return web.Response(
                    status=500,
                    text=_error("Internal server error", "InternalServerError", 500),
                    content_type="application/json",
                )
            try:
                pulled = self._pull(params, prompt, local)
            except LookupError:
                return web.Response(
                    status=500,
                    text=_error("Internal server error", "InternalServerError", 500),
                    content_type="application/json",
                )
        if self.knobs.prefill_gate is not None:
            await self.knobs.prefill_gate.wait()
        delay = self.knobs.prefill_delay
        delay += self.knobs.token_delay * (len(prompt) - pulled - local)
        if delay:
            await asyncio.sleep(delay)
        await self._work(computed=len(prompt) - local - pulled, moved=pulled)
        self._remember(prompt)
        handle = None
        if params.get("do_remote_decode"):
            handle = self._handle(prompt, is_prefill=True)
            handle["remote_prefill_cached_tokens"] = pulled + local
            if self.knobs.connector:
                handle["kvloop_pulled_tokens"] = pulled
                handle["kvloop_local_tokens"] = local
        choice = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice |= {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None}
        choice |= {"text": "x", "routed_experts": None}
        if body.get("return_token_ids"):
            wrong = self.knobs.wrong_after_pull and pulled
            choice |= {"token_ids": [sum(prompt) % 1000 + bool(wrong)]}
        return web.json_response(
            {
                "id": "cmpl-x",
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": "vllm-fake",
                "usage": self.usage(prompt, [0]),
                "kv_transfer_params": handle,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _local(self, prompt: list[int]) -> int:
        """Leading tokens in this worker's own prefix cache."""
        if self._cache is None:
            return 0
        whole = len(prompt) // self.block_size
        digests = _prefixes(prompt, self.block_size)
        while whole and digests[whole - 1] not in self._cache:
            whole -= 1
        return whole * self.block_size

    def _remember(self, tokens: list[int]) -> None:
        if self._cache is not None:
            self._cache.update(_prefixes(tokens, self.block_size))

    async def _work(self, *, computed: int, moved: int) -> None:
        """Take the time; one request computes at a time."""
        if moved and (seconds := moved * self.knobs.seconds_per_moved_token):
            await asyncio.sleep(seconds)
        if seconds := computed * self.knobs.seconds_per_token:
            async with self._engine:
                await asyncio.sleep(seconds)

    def _pull(self, params: dict[str, Any], prompt: list[int], local: int) -> int:
        """What vLLM's P does with D's handle, with every silent fault recorded."""
        key = (params["remote_engine_id"], params["remote_request_id"])
        pin = self.cluster.pins.get(key)
        count = min(params["remote_num_tokens"], len(prompt)) - local
        if key[0] not in self.cluster.engines:
            raise LookupError  # handshake fails: the engine is gone
        if params["remote_num_tokens"] == 0 or count < 64:
            if pin is not None:
                del self.cluster.pins[key]
                self.cluster.releases += 1
            return 0
        if pin is None:
            self.cluster.faults.append("read of freed blocks")
            return count
        del self.cluster.pins[key]
        if pin.expires < time.monotonic():
            self.cluster.faults.append("read after expiry")
        wanted = min(params["remote_num_tokens"], len(prompt))
        ids = params["remote_block_ids"][0]
        if len(ids) != ceil(wanted / self.block_size):
            self.cluster.faults.append("block list and count do not agree")
        elif ids != pin.blocks[: len(ids)]:
            self.cluster.faults.append("blocks of another request")
        elif pin.tokens[:wanted] != prompt[:wanted]:
            self.cluster.faults.append("tokens differ from the prompt")
        self.cluster.pulls += 1
        return count

    def _handle(self, tokens: list[int], *, is_prefill: bool, lease: float = 0) -> dict[str, Any]:
        request_id = f"req-{self.role}-{next(self._numbers)}"
        blocks = [next(self._blocks) for _ in range(ceil(len(tokens) / self.block_size))]
        if not is_prefill:
            self.cluster.pins[(self.engine_id, request_id)] = Pin(
                tokens, blocks, time.monotonic() + lease
            )
        return {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_block_ids": [blocks] * self.knobs.groups,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(tokens) + (0 if is_prefill else self.knobs.extra_computed),
            "remote_blocks_expiry_time": None if is_prefill else time.perf_counter() + lease,
            "transfer_mode": self.knobs.transfer_mode,
        }

    # Decode.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        params = body.get("kv_transfer_params")
        if body.get("temperature", 1) < 0:
            return _bad_request("temperature must be non-negative", "temperature")
        handed_over = self.judge(params)
        if self.role == "prefill":
            prompt = self._told(body) or tokenise(body)
            made = await self._prefilled(body, prompt, chat=True)
            self._pushed(request, body, prompt, made)
            return made
        prompt = (params or {}).get("prompt_token_ids") or tokenise(body)
        self.open_requests += 1
        try:
            await self._received(request, body, params, prompt, handed_over=handed_over)
            await self._decoded(prompt, handed_over=handed_over)
            if body.get("stream"):
                return await self._stream(request, body, params, prompt)
            if self.knobs.chunk_delay:
                await asyncio.sleep(self.knobs.chunk_delay)
            return self._whole(body, params, prompt)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open_requests -= 1

    @staticmethod
    def usage(prompt: list[int], output: list[int], cached: int = 0) -> dict[str, Any]:
        return {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(output),
            "completion_tokens": len(output),
            "prompt_tokens_details": {
                "cached_tokens": cached,
                "created_cache_tokens": 0,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }

    def error_in_stream(self) -> bool:
        """Is this one of the streams that report an error?"""
        if self.knobs.stream_error_first <= 0:
            return False
        self.knobs.stream_error_first -= 1
        return True

    def described(
        self,
        params: dict[str, Any] | None,
        handle: dict[str, Any] | None,
        prompt: list[int],
        output: list[int],
    ) -> dict[str, Any] | None:
        """``kv_transfer_params`` of a whole answer."""
        if self.knobs.plugin and params and params.get("kvloop"):
            return {**(handle or {}), "kvloop": self._described(prompt, output)}
        return handle

    def turn_event(
        self,
        params: dict[str, Any] | None,
        handle: dict[str, Any] | None,
        prompt: list[int],
        output: list[int],
    ) -> bytes:
        """The plugin's event in a stream; empty without the plugin."""
        if not (self.knobs.plugin and params and params.get("kvloop")):
            return b""
        event = {**self._described(prompt, output), "kv_transfer_params": handle}
        return b": kvloop " + json.dumps(event).encode() + b"\n\n"

    def output(self) -> list[int]:
        ids = list(self.knobs.answer.encode())
        return [*ids, END] if self.knobs.finish_reason == "stop" else ids

    def kept(
        self, params: dict[str, Any] | None, prompt: list[int], output: list[int]
    ) -> dict[str, Any] | None:
        self._refused = False
        if not params or not self.knobs.pins or self.knobs.transfer_mode == "push":
            return None
        if self.knobs.connector and params.get("kvloop_lease_seconds") == 0:
            return None
        self._refused = self.knobs.pin_refused or self._over_share(len(prompt) + len(output) - 1)
        if self._refused:
            self.pins_refused += 1
            return None
        asked = params.get("kvloop_lease_seconds") if self.knobs.connector else None
        lease = self.lease if asked is None else min(self.lease, asked)
        handle = self._handle([*prompt, *output][:-1], is_prefill=False, lease=lease)
        if asked is not None:
            handle["kvloop_lease_seconds"] = lease
        return handle

    def _over_share(self, tokens: int) -> bool:
        blocks = self.pinned_blocks() + ceil(tokens / self.block_size)
        return self.knobs.connector and blocks > self.pin_limit

    def _described(self, prompt: list[int], output: list[int]) -> dict[str, Any]:
        """What the plugin says of a finished turn."""
        described = {
            "v": 1,
            "token_ids": output,
            "prompt_tokens": len(prompt),
            "finish_reason": self.knobs.finish_reason,
        }
        if self._refused:
            described["pin_refused"] = "over_share"
        return described

    def _whole(
        self, body: dict[str, Any], params: dict[str, Any] | None, prompt: list[int]
    ) -> web.Response:
        output = self.output()
        shown = output[self.knobs.hidden_output_ids :]
        handle = self.kept(params, prompt, output)
        handle = self.described(params, handle, prompt, output)
        ids = body.get("return_token_ids")
        message = {"role": "assistant", "content": self.knobs.answer, "refusal": None}
        message |= {"annotations": None, "audio": None, "function_call": None, "reasoning": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self.knobs.finish_reason,
            "stop_reason": None,
            "token_ids": shown if ids else None,
            "routed_experts": None,
        }
        return web.json_response(
            {
                "id": "chatcmpl-x",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": "vllm-fake",
                "usage": self.usage(prompt, output),
                "prompt_logprobs": None,
                "prompt_token_ids": prompt if ids else None,
                "prompt_text": None,
                "kv_transfer_params": handle,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    async def _saying(self, request: web.Request, number: int, pieces: int) -> None:
        """Before each piece of a stream."""

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        params: dict[str, Any] | None,
        prompt: list[int],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        ids = body.get("return_token_ids")
        output = self.output()
        remaining = output

        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            chunk = {
                "id": "chatcmpl-x",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": body["model"],
                "choices": choices,
                **more,
            }
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def choice(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
            return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}

        first = choice({"role": "assistant", "content": ""})
        await send([first], prompt_token_ids=prompt if ids else None, prompt_text=None)
        if self.knobs.stream_error_first > 0:
            self.knobs.stream_error_first -= 1
            error = _error("Internal server error", "InternalServerError", 500).encode()
            await response.write(b"data: " + error + b"\n\ndata: [DONE]\n\n")
            return response
        finish = self.knobs.finish_reason
        # A stop token is not shown; at the length limit the last chunk carries the last text.
        letters = self.knobs.answer if finish == "stop" else self.knobs.answer[:-1]
        step, sent = self.knobs.letters_per_chunk, 0
        pieces = [letters[start : start + step] for start in range(0, len(letters), step)]
        for number, piece in enumerate(pieces):
            if self.knobs.die_after_chunks == number:
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.knobs.chunk_delay:
                await asyncio.sleep(self.knobs.chunk_delay)
            await self._saying(request, number, len(pieces))
            taken = remaining[sent : sent + len(piece.encode())]
            sent += len(taken)
            await send([choice({"content": piece}, token_ids=taken if ids else None)])
        remaining = remaining[sent:]
        rest = {"content": self.knobs.answer[len(letters) :]}
        last = choice(rest, finish, stop_reason=None, token_ids=remaining if ids else None)
        # The fingerprint comes with the last chunk of all.
        mark = {"system_fingerprint": "vllm-fake"}
        usage = (body.get("stream_options") or {}).get("include_usage")
        await send([last], **({} if usage else mark))
        if usage:
            counts = self.usage(prompt, output)
            del counts["completion_tokens_details"]
            await send([], usage=counts, **mark)
        handle = self.kept(params, prompt, output)
        end = self.turn_event(params, handle, prompt, output)
        await response.write(end + b"data: [DONE]\n\n")
        return response


def _prefixes(tokens: list[int], block: int) -> list[int]:
    """A number for each prefix of whole blocks."""
    found: list[int] = []
    value = 0
    for start in range(0, len(tokens) - block + 1, block):
        value = hash((value, tuple(tokens[start : start + block])))
        found.append(value)
    return found


def _error(message: str, kind: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _bad_request(message: str, param: str) -> web.Response:
    return web.Response(
        status=400,
        text=json.dumps(
            {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}
        ),
        content_type="application/json",
    )
