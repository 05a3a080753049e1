"""[io] ``python -m worker_launch prefill|decode|model``, the same as ``kvloop worker``."""

from worker_launch.cli import app

if __name__ == "__main__":
    app(prog_name="python -m worker_launch")
