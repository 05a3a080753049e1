"""[io] ``python -m kvloop.stack.detached FOLDER START GRACE``: the supervisor behind
``kvloop up --detach``. It runs the plan that the command left in the state folder.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvloop.stack.state import Phase, StateFolder
from kvloop.stack.supervisor import AlreadyRunning, Supervisor, locked


def main(folder_path: str, start_seconds: str, grace_seconds: str) -> int:
    """Run the plan to its end; 0 if it was asked to stop, 1 if it failed."""
    folder = StateFolder(Path(folder_path))
    try:
        with locked(folder):
            supervisor = Supervisor(
                folder.read_plan(),
                folder,
                start_seconds=float(start_seconds),
                grace_seconds=float(grace_seconds),
            )
            state = asyncio.run(supervisor.run())
    except AlreadyRunning as error:
        print(error)
        return 1
    print(state.problem or "stopped")
    return 1 if state.phase is Phase.FAILED else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
