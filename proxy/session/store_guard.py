"""[io] Ends the private Valkey server when the proxy is gone, however that ended.

A process of its own, ``python -I -S store_guard.py SOCKET DIRECTORY``, because a proxy that gets
SIGKILL can clean up nothing. Its standard input is a pipe that the proxy holds open and never
writes to: the kernel closes it with the proxy. The server is then told to stop through its own
socket, in a directory that nobody else uses: a process id could have become someone else's.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time

_TRIES = 50
_PAUSE_SECONDS = 0.1
"""So it waits for a server that was only just being started."""


def main() -> int:
    path, directory = sys.argv[1:3]
    sys.stdin.buffer.read()
    for _ in range(_TRIES):
        if _told(path):
            break
        time.sleep(_PAUSE_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _told(path: str) -> bool:
    """Has the server ended its connection, as it does when it stops?"""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(5)
            link.connect(path)
            link.sendall(b"SHUTDOWN NOSAVE\r\n")
            return link.recv(64) == b""
    except ConnectionResetError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
