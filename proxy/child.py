"""[io] One of several processes of a proxy: ``python -m proxy.child LISTEN_FD ADMIN_FD``.

The first line of standard input has the settings; its end says that the parent is gone, and then
this process drains as if it had been told to stop.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from proxy import log
from proxy.app import App
from proxy.server import Server
from proxy.settings import Settings


def main() -> int:
    listening, admin = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with os.fdopen(os.dup(0), "rb") as pipe:
        settings = Settings.model_validate_json(pipe.readline())
    log.set_up(settings.log_level)
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    # A child that replaces a dead one has clients at once: it must not tell them that it knows no
    # worker yet.
    app = App(settings, know_workers_first=True)
    return Server(app, settings, admin).serve_until_stopped([listening])


def _outlive_nobody() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
