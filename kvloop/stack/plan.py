"""[pure] The parts of a stack as data: what to run, what for, and when it counts as ready.

A plan can be written to a file and read by another process: that is how a detached supervisor
gets it. It holds no secrets: a password in ``KVLOOP_REDIS_URL`` stays in the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ReadyWhen(StrEnum):
    """How a part shows that it is ready."""

    HTTP_OK = "http_ok"
    """``GET target`` answers 200."""
    PROXY_SERVES = "proxy_serves"
    """``GET target`` answers 200 and lists no worker that it has not yet seen healthy: a turn sent
    right after that is not answered by decode alone."""
    REDIS_PONG = "redis_pong"
    """The server at ``target`` (``unix:///path``) answers PING."""
    FINISHED = "finished"
    """The process has ended with exit code 0: a step that prepares something, not a service."""


@dataclass(frozen=True)
class Part:
    """One process of the stack."""

    name: str
    argv: tuple[str, ...]
    ready_when: ReadyWhen
    target: str = ""
    """Address that is asked; empty for ``FINISHED``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    after: tuple[str, ...] = ()
    """Parts that must be ready before this one starts, and are stopped after it."""


@dataclass(frozen=True)
class StackPlan:
    """All parts, and what the user is told once they are ready."""

    parts: tuple[Part, ...]
    url: str
    """Where the proxy listens: ``http://host:port``."""
    model: str
    """Name to put into a request's ``model``."""
    live_url: str = ""
    """Where the proxy's live page is."""

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError(f"two parts have the same name: {names}")
        known: set[str] = set()
        for part in self.parts:
            if missing := set(part.after) - known:
                raise ValueError(f"{part.name} comes after {missing}, which are not listed before")
            known.add(part.name)
