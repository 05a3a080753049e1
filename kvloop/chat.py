"""``kvloop chat``: a conversation in the terminal, and after each answer what was reused.

Speaks plain OpenAI chat completions over the standard library's HTTP client: it shows what any
client gets, and starts at once.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit
from uuid import uuid4

from rich.console import Console
from rich.text import Text

_HELP = """\
/edit N [TEXT]  replace your message number N and go on from there
/history        list your messages with their numbers
/reset          forget the conversation
/exit           leave (so does Ctrl-D)
Ctrl-C ends an answer; at the prompt it leaves."""


class ChatError(Exception):
    """The server refused a turn or cannot be reached; the message is for the user."""


@dataclass(frozen=True)
class Settings:
    """What goes into each request."""

    model: str | None = None
    conversation_id: str | None = None
    """None: a new one for each conversation, so that an edited one frees what it left behind."""
    system: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0


@dataclass
class Answer:
    """What is known about one turn. ``ttft_seconds`` from sending to the first text."""

    headers: Mapping[str, str] = field(default_factory=dict)
    """Response headers, names in lower case."""
    text: str = ""
    ttft_seconds: float | None = None
    finish_reason: str = ""
    usage_prompt_tokens: int | None = None


class Client:
    """Asks one server. ``timeout_seconds`` is the longest silence."""

    def __init__(self, url: str, *, api_key: str | None, timeout_seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds

    def first_model(self) -> str:
        """Name of the first model that the server lists. Raises ``ChatError``."""
        connection, response = self._request("GET", "/v1/models", None)
        try:
            listed = json.loads(response.read()).get("data") or []
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            raise ChatError(f"{self.url}/v1/models gave no list of models: {error}") from error
        finally:
            connection.close()
        if not listed:
            raise ChatError(f"{self.url} lists no model yet; is a worker ready? (kvloop status)")
        return str(listed[0]["id"])

    def stream(self, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        """Pieces of text as they come; the rest is written to ``answer``. Raises ``ChatError``."""
        sent = time.monotonic()
        connection, response = self._request("POST", "/v1/chat/completions", body)
        try:
            answer.headers = {name.lower(): value for name, value in response.getheaders()}
            for event in _events(response):
                if "error" in event:
                    raise ChatError(_error_text(event))
                if usage := event.get("usage"):
                    answer.usage_prompt_tokens = usage.get("prompt_tokens")
                for choice in event.get("choices") or ():
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    if piece := (choice.get("delta") or {}).get("content"):
                        if answer.ttft_seconds is None:
                            answer.ttft_seconds = time.monotonic() - sent
                        answer.text += piece
                        yield piece
        except TimeoutError as error:
            raise ChatError(f"no sign of the server for {self._timeout_seconds:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke in the middle of the answer: {error}") from error
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ChatError(f"--url {self.url}: write it as http://host:port")
        secure = address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(address.hostname, address.port, timeout=self._timeout_seconds)
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, address.path + path, content, headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            raise ChatError(_refusal(response.status, response.read()))
        except TimeoutError as error:
            connection.close()
            raise ChatError(f"no answer within {self._timeout_seconds:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(
                f"cannot reach {self.url}: {error}. Is the stack running? (kvloop status)"
            ) from error
        except ChatError:
            connection.close()
            raise


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream, until ``[DONE]``. Raises ``ChatError``."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError as error:
            raise ChatError(f"the stream holds something that is not JSON: {data!r}") from error
    raise ChatError("the answer ended without [DONE]: it may be incomplete")


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status}: {_error_text(json.loads(body))}"
    except (ValueError, AttributeError):
        return f"{status}: {body[:500].decode(errors='replace').strip() or 'no explanation'}"


def _error_text(body: dict[str, Any]) -> str:
    """The message of an error in OpenAI's shape, with the field that it is about."""
    error = body.get("error", body)
    if not isinstance(error, dict):
        return str(error)
    param = error.get("param")
    return str(error.get("message") or error) + (f" (field {param})" if param else "")


def turn_line(answer: Answer) -> str:
    """What happened in a turn: time, size, and where the KV of the prompt came from."""
    headers = answer.headers
    parts = [] if answer.ttft_seconds is None else [f"TTFT {answer.ttft_seconds * 1000:,.0f} ms"]
    prompt = _count(headers, "x-kvloop-prompt-tokens") or answer.usage_prompt_tokens
    if prompt:
        parts.append(f"prompt {prompt:,} tokens")
    if "x-kvloop-route" not in headers:
        parts.append("no X-KVLoop headers: not a kvloop proxy")
    else:
        pulled = _count(headers, "x-kvloop-pulled-tokens")
        cached = _count(headers, "x-kvloop-prefill-cached-tokens")
        # A turn that decode answered alone reports a total and neither of its parts.
        other = _count(headers, "x-kvloop-reused-tokens") - pulled - cached
        if pulled:
            parts.append(f"{pulled:,} from decode")
        if cached:
            parts.append(f"{cached:,} from prefill cache")
        if other > 0:
            parts.append(f"{other:,} reused in place")
        reason = headers.get("x-kvloop-reason", "unknown")
        if not pulled and other <= 0:
            parts.append(f"none {'from decode' if cached else 'reused'}: {reason}")
    if answer.finish_reason == "length":
        parts.append("cut at --max-tokens")
    return " · ".join(parts)


def _count(headers: Mapping[str, str], name: str) -> int:
    try:
        return int(headers.get(name, "0"))
    except ValueError:
        return 0


class _Conversation:
    """The messages, and how they are asked and shown."""

    def __init__(self, client: Client, settings: Settings, model: str, console: Console) -> None:
        self._client = client
        self._settings = settings
        self._model = model
        self._console = console
        self.failed = False
        self.reset()

    def reset(self) -> None:
        system = self._settings.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._conversation_id = self._settings.conversation_id or uuid4().hex

    @property
    def own(self) -> list[str]:
        """The user's messages."""
        return [message["content"] for message in self._messages if message["role"] == "user"]

    def edit(self, number: int, text: str) -> None:
        """Replace the user's message ``number`` (from 1), forget what followed, ask again."""
        places = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        del self._messages[places[number - 1] :]
        self.ask(text)

    def ask(self, text: str) -> None:
        """One turn. A turn that fails leaves the conversation as it was before it."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*self._messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
            "conversation_id": self._conversation_id,
        }
        answer = Answer()
        stopped = False
        try:
            for piece in self._client.stream(body, answer):
                self._console.print(Text(piece), end="", soft_wrap=True)
        except ChatError as error:
            self.failed = True
            self._say(f"{error}", "red", after_text=bool(answer.text))
            return
        except KeyboardInterrupt:
            stopped = True
        self._console.print()
        self._say("stopped" if stopped else turn_line(answer), "dim")
        if answer.text:
            self._messages = [
                *body["messages"],
                {"role": "assistant", "content": answer.text},
            ]

    def _say(self, text: str, style: str = "", *, after_text: bool = False) -> None:
        if after_text:
            self._console.print()
        self._console.print(Text(text, style=style), soft_wrap=True)

    def show_history(self) -> None:
        for number, text in enumerate(self.own, 1):
            self._say(f"{number}  {text}")


def run(client: Client, settings: Settings, source: TextIO, console: Console) -> int:
    """Hold the conversation until the input ends. 1 if a turn failed in a pipe, else 0."""
    interactive = source.isatty()
    try:
        model = settings.model or client.first_model()
    except ChatError as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return 1
    conversation = _Conversation(client, settings, model, console)
    if interactive:
        console.print(Text(f"{model} at {client.url}; /help lists commands.", style="dim"))
    while True:
        line = _read(source, console, len(conversation.own) + 1, interactive)
        if line is None or line == "/exit":
            break
        if line:
            _obey(line, conversation, console, source, interactive)
    return 1 if conversation.failed and not interactive else 0


def _obey(
    line: str, conversation: _Conversation, console: Console, source: TextIO, interactive: bool
) -> None:
    command, _, rest = line.partition(" ")
    match command:
        case "/reset":
            conversation.reset()
        case "/history":
            conversation.show_history()
        case "/help":
            console.print(_HELP, markup=False)
        case "/edit":
            digits, _, text = rest.strip().partition(" ")
            count = len(conversation.own)
            if not digits.isdecimal() or not 1 <= int(digits) <= count:
                console.print(f"/edit takes a number from 1 to {count} (/history)", markup=False)
                return
            new = text.strip() or _read(source, console, int(digits), interactive)
            if new:
                conversation.edit(int(digits), new)
        case _ if command.startswith("/"):
            console.print(f"unknown command {command}; /help lists them", markup=False)
        case _:
            conversation.ask(line)


def _read(source: TextIO, console: Console, number: int, interactive: bool) -> str | None:
    """The next line without its end; None at the end of the input."""
    prompt = f"{number}> "
    if interactive:
        # Gives input() line editing and a history.
        import readline  # noqa: F401

        try:
            return input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
    line = source.readline()
    if not line:
        return None
    # Echoed, so that what comes out of a pipe reads as a conversation.
    console.print(Text(f"{prompt}{line.strip()}", style="bold"), soft_wrap=True)
    return line.strip()
