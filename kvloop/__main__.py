"""``python -m kvloop``: the same as the ``kvloop`` command."""

from kvloop.cli import main

if __name__ == "__main__":
    main()
