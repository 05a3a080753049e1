"""A part of a stack that is not the real thing: answers /health, or dies, as it is told.

Options, in any order: ``port=N`` answer there; ``die=CODE`` say some last words and exit with the
code; ``die-on-request=CODE`` the same once somebody asks for /die; ``child`` start a child in a
session of its own, as a worker's launcher does, and write its pid to ``child-pid=FILE``;
``stubborn`` ignore SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(part.partition("=")[::2] for part in sys.argv[1:])

print("stub says hello", flush=True)
if "stubborn" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in options:
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    )
    with open(options["child-pid"], "w") as file:
        file.write(str(child.pid))


def die(code: str) -> None:
    print("\x1b[31mlast words of the stub\x1b[0m", flush=True)
    os._exit(int(code))


if "die" in options:
    die(options["die"])


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            die(options["die-on-request"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


HTTPServer(("127.0.0.1", int(options["port"])), Health).serve_forever()
