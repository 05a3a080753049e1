"""``kvloop chat`` against a small server that streams as the proxy does."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from kvloop import chat

HEADERS = {
    "X-KVLoop-Route": "prefill_with_pull",
    "X-KVLoop-Reason": "history_grew",
    "X-KVLoop-Prompt-Tokens": "1024",
    "X-KVLoop-Reused-Tokens": "992",
    "X-KVLoop-Pulled-Tokens": "960",
    "X-KVLoop-Prefill-Cached-Tokens": "32",
}


class Server(ThreadingHTTPServer):
    """Answers each turn with "answer N" in pieces; keeps the requests' bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None
        """Sent with status 400 instead of an answer."""
        self.last_event = "[DONE]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "stub-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.error is not None:
            self._json(400, {"error": self.server.error})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in ("answer ", f"{len(self.server.bodies)} [bold]"):
            self._event(json.dumps({"choices": [{"delta": {"content": piece}}]}))
        self._event(json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
        self._event(self.server.last_event)
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        # Cut in the middle: a chunk's end is not a line's end.
        for part in (event[:9], event[9:]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    def _json(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def talk(server: Server, typed: str, **settings: Any) -> tuple[int, str]:
    """Exit code and output of a chat that reads ``typed`` from a pipe."""
    output = io.StringIO()
    client = chat.Client(server.url, api_key=None, timeout_seconds=30)
    code = chat.run(
        client, chat.Settings(**settings), io.StringIO(typed), Console(file=output, width=200)
    )
    return code, output.getvalue()


def test_a_piped_conversation(server: Server) -> None:
    """Each line is a turn with all before it; the answer and the reuse line are printed."""
    code, output = talk(server, "first\n\nsecond\n", system="Be brief.", conversation_id="c1")
    assert code == 0
    assert "1> first\nanswer 1 [bold]\nTTFT " in output
    assert "2> second\nanswer 2 [bold]\nTTFT " in output
    assert " ms · prompt 1,024 tokens · 960 from decode · 32 from prefill cache\n" in output
    last = server.bodies[-1]
    assert [message["role"] for message in last["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert last["messages"][2]["content"] == "answer 1 [bold]"
    assert (last["model"], last["conversation_id"]) == ("stub-model", "c1")
    assert (last["stream"], last["temperature"], last["max_tokens"]) == (True, 0.0, 256)


def test_a_conversation_has_one_id_until_it_is_reset(server: Server) -> None:
    """Without a given id each conversation gets one of its own."""
    talk(server, "one\ntwo\n/reset\nthree\n")
    first, second, third = (body["conversation_id"] for body in server.bodies[-3:])
    assert first == second != third


def test_edit_goes_on_from_the_edited_message(server: Server) -> None:
    """/edit 1 replaces the first message, drops what followed and asks again."""
    _, output = talk(server, "one\ntwo\n/edit 1 uno\n/history\n")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["uno"]
    assert "answer 3" in output
    assert output.endswith("/history\n1  uno\n")


def test_edit_without_a_text_takes_the_next_line(server: Server) -> None:
    """The new text may come on a line of its own; a number that does not exist is refused."""
    _, output = talk(server, "one\n/edit 2\n/edit 1\nuno\n")
    assert "/edit takes a number from 1 to 1" in output
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["uno"]


def test_reset_and_exit(server: Server) -> None:
    """/reset forgets the history; after /exit nothing more is sent."""
    talk(server, "one\n/reset\ntwo\n/exit\nthree\n")
    assert len(server.bodies) == 2
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["two"]


def test_a_refusal_is_shown_plainly(server: Server) -> None:
    """An error in OpenAI's shape is shown with status, message and field; the exit code is 1."""
    server.error = {"message": "max_tokens is too large", "param": "max_tokens", "type": "x"}
    code, output = talk(server, "one\n")
    assert code == 1
    assert "400: max_tokens is too large (field max_tokens)\n" in output


def test_an_error_in_the_stream_is_shown(server: Server) -> None:
    """A stream that ends in an error keeps its text on screen, and the turn out of the history."""
    server.last_event = json.dumps({"error": {"message": "decode died"}})
    code, output = talk(server, "one\ntwo\n")
    assert code == 1
    assert "answer 1 [bold]\ndecode died\n" in output
    assert len(server.bodies[-1]["messages"]) == 1


def test_a_cut_stream_is_not_taken_for_an_answer(server: Server) -> None:
    """An answer without [DONE] is reported as possibly incomplete."""
    server.last_event = "{}"
    code, output = talk(server, "one\n")
    assert code == 1
    assert "ended without [DONE]" in output


def test_no_server_is_an_error_with_advice() -> None:
    """When nothing listens, the address and the command that tells more are named."""
    output = io.StringIO()
    client = chat.Client("http://127.0.0.1:1/v1", api_key=None, timeout_seconds=5)
    code = chat.run(client, chat.Settings(), io.StringIO("hi\n"), Console(file=output, width=200))
    assert code == 1
    assert "cannot reach http://127.0.0.1:1" in output.getvalue()
    assert "kvloop status" in output.getvalue()


@pytest.mark.parametrize(
    ("headers", "line"),
    [
        (HEADERS, "TTFT 312 ms · prompt 1,024 tokens · 960 from decode · 32 from prefill cache"),
        (
            {"X-KVLoop-Route": "cold_prefill", "X-KVLoop-Reason": "new_session"},
            "TTFT 312 ms · none reused: new_session",
        ),
        (
            {
                "X-KVLoop-Route": "cold_prefill",
                "X-KVLoop-Reason": "history_diverged",
                "X-KVLoop-Prompt-Tokens": "100",
                "X-KVLoop-Reused-Tokens": "64",
                "X-KVLoop-Prefill-Cached-Tokens": "64",
            },
            "TTFT 312 ms · prompt 100 tokens · 64 from prefill cache"
            " · none from decode: history_diverged",
        ),
        (
            {
                "X-KVLoop-Route": "decode_local_append",
                "X-KVLoop-Reason": "history_grew",
                "X-KVLoop-Reused-Tokens": "64",
            },
            "TTFT 312 ms · 64 reused in place",
        ),
        ({}, "TTFT 312 ms · no X-KVLoop headers: not a kvloop proxy"),
    ],
)
def test_turn_line(headers: dict[str, str], line: str) -> None:
    """The line says where the prompt's KV came from, or why nothing was reused."""
    answer = chat.Answer(
        headers={name.lower(): value for name, value in headers.items()}, ttft_seconds=0.312
    )
    assert chat.turn_line(answer) == line
