"""A load generator that costs little: chat requests over kept connections, timed to the token."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from tests.fakes.fast import MODEL

_numbers = itertools.count(1)
_END = b"0\r\n\r\n"


@dataclass
class Sample:
    """What one target did in one round. ``cpu``: processor seconds of the target's processes."""

    requests: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    errors: int = 0
    cpu: float = 0.0


class Requests:
    """Requests of one size, no two alike, so that each is a session of its own."""

    def __init__(self, prompt_bytes: int) -> None:
        head = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"'.encode()
        text = b"word " * max(1, (prompt_bytes - len(head) - 45) // 5)
        self._before = head
        self._after = b" " + text + b'"}],"stream":true}'

    def next(self) -> bytes:
        body = b"%b%012d%b" % (self._before, next(_numbers), self._after)
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )


class Client(asyncio.Protocol):
    """One connection: a request, its whole answer, the next request."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._transport: asyncio.Transport | None = None
        self._started = 0.0
        self._tail = b""
        self._answer: asyncio.Future[float | None] | None = None
        self.first: float | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.first is None and b"token " in data:
            self.first = time.perf_counter() - self._started
        self._tail = (self._tail + data[-8:])[-8:]
        if self._tail.endswith(_END) and self._answer is not None and not self._answer.done():
            self._answer.set_result(self.first)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def send(self) -> asyncio.Future[float | None]:
        """Ask. The result is the TTFT in seconds, None when no token or no end came."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.first, self._tail = None, b""
        data = self._requests.next()
        self._started = time.perf_counter()
        self._transport.write(data)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(port: int, requests: Requests) -> Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(requests), "127.0.0.1", port)
    return client


async def _one(port: int, requests: Requests, until: float, sample: Sample) -> None:
    client = await connect(port, requests)
    while True:
        first = await client.send()
        if first is None:
            sample.errors += 1
        else:
            sample.ttft.append(first)
            sample.requests += 1
        if time.perf_counter() >= until:
            break
        if client.lost:
            client = await connect(port, requests)
    client.close()


async def round_of(port: int, clients: int, seconds: float, prompt_bytes: int) -> Sample:
    """``clients`` clients for ``seconds`` seconds, each to the end of its last answer, of which
    there is one at least."""
    sample = Sample()
    requests = Requests(prompt_bytes)
    start = time.perf_counter()
    await asyncio.gather(*(_one(port, requests, start + seconds, sample) for _ in range(clients)))
    sample.seconds = time.perf_counter() - start
    return sample
