"""``python -m kvloop.drain URL``: wait until a worker has nothing to do, then exit 0.

For a container's preStop hook: the platform first takes the worker out of its name service, so that
proxies give it no new turns, and this lets the running ones end before the process is told to stop.
With ``--pins`` it also waits until decode's kept conversations were read or lapsed.
"""

from __future__ import annotations

import argparse
import time
import urllib.request

from kvloop.doctor.facts import metric_total

_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_PINS = "vllm:kvloop_pinned_requests"
_QUIET_SECONDS = 10
"""A name lives this long in a proxy's cache: a turn may still be on its way."""


def left(page: str, *, pins: bool) -> float:
    """Requests, and with ``pins`` kept conversations, that a metrics page reports."""
    names = (*_BUSY, _PINS) if pins else _BUSY
    return sum(metric_total(page, name) or 0 for name in names)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvloop.drain", description=__doc__)
    parser.add_argument("url", help="the worker, http://host:port")
    parser.add_argument("--longest", type=float, default=540, help="seconds, then exit 1")
    parser.add_argument("--quiet", type=float, default=_QUIET_SECONDS, help="seconds of no work")
    parser.add_argument("--pins", action="store_true", help="wait for kept conversations too")
    given = parser.parse_args(arguments)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + given.longest
    quiet_since: float | None = None
    while time.monotonic() < end:
        try:
            with opener.open(given.url.rstrip("/") + "/metrics", timeout=5) as response:
                busy = left(response.read().decode("utf-8", "replace"), pins=given.pins) > 0
        except OSError:
            return 0  # nothing answers: nothing to wait for
        if busy:
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        if quiet_since is not None and time.monotonic() - quiet_since >= given.quiet:
            return 0
        time.sleep(min(0.5, given.quiet or 0.05))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
