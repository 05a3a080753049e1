"""``kvloop up`` with the plan that a test has put into the state folder.

``python stub_stack.py FOLDER [detach]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from kvloop.stack import control
from kvloop.stack.state import StateFolder

folder = StateFolder(Path(sys.argv[1]))
run = control.start_detached if "detach" in sys.argv else control.run_in_front
sys.exit(run(folder.read_plan, folder, Console(), control.Limits(start=60, grace=1)))
