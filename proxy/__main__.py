"""``python -m proxy``, ``kvloop proxy``: read the settings, serve until told to stop."""

from __future__ import annotations

import sys

import uvicorn

from proxy import log
from proxy.app import App
from proxy.settings import load


def main(arguments: list[str] | None = None) -> None:
    """Serve. ``arguments``: flags, by default those of the command line."""
    settings = load(sys.argv[1:] if arguments is None else arguments)
    log.set_up(settings.log_level)
    uvicorn.run(
        App(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,  # the turn log says more, once a turn
        server_header=False,
        proxy_headers=False,  # nothing here looks at the client's address
        date_header=False,
        timeout_graceful_shutdown=30,
        h11_max_incomplete_event_size=None,
    )


if __name__ == "__main__":
    main()
