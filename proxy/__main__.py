"""``python -m proxy``, ``kvloop proxy``: read the settings, serve until told to stop."""

from __future__ import annotations

import sys

from proxy import log
from proxy.settings import load


def main(arguments: list[str] | None = None) -> None:
    """Serve. ``arguments``: flags, by default those of the command line."""
    settings = load(sys.argv[1:] if arguments is None else arguments)
    log.set_up(settings.log_level)
    if settings.workers > 1:
        from proxy import processes

        sys.exit(processes.run(settings))
    from proxy.app import App
    from proxy.server import Server, admin_socket

    sys.exit(Server(App(settings), settings, admin_socket(settings)).serve_until_stopped())


if __name__ == "__main__":
    main()
