"""``python -m kvloop.probe URL``: exit 0 if URL answers 200. For containers, which lack curl."""

from __future__ import annotations

import sys
import urllib.request


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m kvloop.probe URL\n")
        return 2
    # No proxy from the environment: the address is one of this container's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(arguments[0], timeout=5) as response:
            return 0 if response.status == 200 else 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
