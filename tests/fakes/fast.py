"""A prefill or decode worker that costs next to nothing, for measuring what stands before it.

``python -m tests.fakes.fast --port N``. Answers are bytes made at the start; it checks nothing, so
tests of behaviour use ``worker.py``. One process serves both roles: what a relay adds is the
difference to asking it directly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import zlib
from typing import Any

import httptools
import uvloop

MODEL = "fake-model"
_CONTENT = "token " * 2


def _handle(role: str, number: int, tokens: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": role == "prefill",
        "do_remote_decode": role != "prefill",
        "remote_block_ids": [list(range(1, tokens // 16 + 2))],
        "remote_engine_id": f"engine-{role}",
        "remote_request_id": f"request-{number}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }


def _head(length: int, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()


class Answers:
    """The bytes of all answers for one answer length and prompt length."""

    def __init__(
        self, chunks: int, prompt_tokens: int, hold: bool = False, pace: float = 0.0
    ) -> None:
        self.hold = hold
        self.pace = pace
        self.prompt_tokens = prompt_tokens
        self.models = json.dumps(
            {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        ).encode()
        self.metrics = (
            b'process_start_time_seconds 1.0\nvllm:cache_config_info{block_size="16",'
            b'num_gpu_blocks="100000"} 1.0\n'
        )
        self.ids_rest = (
            "," + ",".join(str(1000 + i % 5000) for i in range(prompt_tokens - 1))
        ).encode()
        self.prefill = json.dumps(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "model": MODEL,
                "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
                "kv_transfer_params": {
                    **_handle("prefill", 1, prompt_tokens),
                    "remote_prefill_cached_tokens": 0,
                    "kvloop_pulled_tokens": 0,
                    "kvloop_local_tokens": 0,
                },
            }
        ).encode()
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        middle = {
            "index": 0,
            "delta": {"content": _CONTENT},
            "logprobs": None,
            "finish_reason": None,
        }
        last = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"}
        self.chunks = [self._chunk(first), *[self._chunk(middle)] * chunks, self._chunk(last)]
        event = {
            "v": 1,
            "kv_transfer_params": _handle("decode", 1, prompt_tokens + chunks - 1),
            "token_ids": list(range(chunks)),
            "prompt_tokens": prompt_tokens,
            "finish_reason": "stop",
        }
        comment = b": kvloop " + json.dumps(event).encode() + b"\n\n"
        self.end_asked = _framed(comment + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.end_plain = _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
        }
        return _framed(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Connection(asyncio.Protocol):
    """One client connection: requests one after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = []

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        answers = self._answers
        path = self._path
        if path == b"/v1/chat/completions":
            body = b"".join(self._body)
            asked = b'"kvloop":1' in body
            if b'"max_tokens":1,' in body or b'"max_tokens":1}' in body:
                self._whole(answers.prefill)  # a prefill leg of another router
                return
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._send(0, answers.end_asked if asked else answers.end_plain)
        elif path == b"/v1/completions":
            self._whole(answers.prefill)
        elif path == b"/v1/chat/completions/render":
            # Another first id for another body: each conversation has tokens of its own.
            first = zlib.crc32(b"".join(self._body))
            self._whole(b'{"token_ids":[%d' % first + answers.ids_rest + b'],"features":null}')
        elif path == b"/v1/models":
            self._whole(answers.models)
        elif path == b"/metrics":
            self._whole(answers.metrics)
        else:
            self._whole(b"{}")

    def _whole(self, body: bytes) -> None:
        self._transport.write(_head(len(body)) + body)

    def _send(self, index: int, end: bytes) -> None:
        """One chunk a turn of the event loop, as tokens come one by one."""
        if self._transport.is_closing():
            return
        if index == len(self._answers.chunks):
            self._transport.write(end)
            return
        self._transport.write(self._answers.chunks[index])
        if self._answers.hold and index:
            return  # the stream stays open until its client leaves
        loop = asyncio.get_running_loop()
        if self._answers.pace:
            loop.call_later(self._answers.pace, self._send, index + 1, end)
        else:
            loop.call_soon(self._send, index + 1, end)


async def serve(port: int, answers: Answers) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--chunks", type=int, default=64)
    options.add_argument("--prompt-tokens", type=int, default=600)
    options.add_argument("--hold", action="store_true", help="stop after the first token")
    options.add_argument("--pace", type=float, default=0, help="seconds between two tokens")
    chosen = options.parse_args()
    answers = Answers(chosen.chunks, chosen.prompt_tokens, chosen.hold, chosen.pace)
    uvloop.run(serve(chosen.port, answers))


if __name__ == "__main__":
    main()
