"""Waiting for a worker to have nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from kvloop import drain, probe


class Page(BaseHTTPRequestHandler):
    pages: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_it_ends_when_the_work_does(url: str) -> None:
    """One running request, then none: exit code 0, after having asked twice at least."""
    Page.pages = ["vllm:num_requests_running 1.0\n", "vllm:num_requests_running 0.0\n"]
    assert drain.main([url, "--quiet", "0", "--longest", "5"]) == 0
    assert len(Page.pages) == 1


def test_kept_conversations_count_only_when_asked(url: str) -> None:
    """A pin delays the end with --pins, up to the limit, and is ignored without."""
    Page.pages = ["vllm:kvloop_pinned_requests 3.0\n"]
    assert drain.main([url, "--quiet", "0", "--longest", "5"]) == 0
    assert drain.main([url, "--quiet", "0", "--longest", "0.2", "--pins"]) == 1


def test_a_dead_worker_is_drained() -> None:
    """Where nothing answers there is nothing to wait for; the probe says unhealthy."""
    assert drain.main(["http://127.0.0.1:9"]) == 0
    assert probe.main(["http://127.0.0.1:9/health"]) == 1
