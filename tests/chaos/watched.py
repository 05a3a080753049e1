"""``python -m tests.chaos.watched ...``: the proxy, which on SIGUSR1 says what its tasks wait for.

A count that finds a task too many says nothing of what it does; its stack in the proxy's log does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from types import FrameType

from proxy.__main__ import main


def _tell(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(RuntimeError):  # no loop runs yet
        for task in asyncio.all_tasks():
            print(f"task {task.get_name()}", file=sys.stderr)
            task.print_stack(file=sys.stderr)
        sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _tell)
    main()
