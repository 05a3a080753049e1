"""Pages of metrics recorded from real workers, told again by fakes as if the work went on.

``tests/system/recorded``: a prefill and a decode worker of the CPU pair (vLLM 0.32.0 with the
kvloop connector) in the middle of a soak; left out are Python's and the HTTP server's own metrics.
"""

from __future__ import annotations

import re
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")
_TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)
_OF_THE_FAKE = ("process_start_time_seconds", "vllm:cache_config_info")


class RecordedPage:
    """Each call gives the next page: counters and histograms grow by a tenth of the recording."""

    def __init__(self, role: str) -> None:
        text = (RECORDED / f"{role}_metrics.txt").read_text()
        self._lines = text.splitlines()
        types = dict(_TYPE.findall(text))
        self._growing = {name for name, kind in types.items() if kind in ("counter", "histogram")}
        self._calls = 0
        self.instead: dict[str, float] = {}
        """Series name -> value to tell instead, whatever its labels."""

    def __call__(self) -> str:
        self._calls += 1
        return (
            "\n".join(self._told(line) for line in self._lines if not self._left_out(line)) + "\n"
        )

    def _left_out(self, line: str) -> bool:
        return any(name in line for name in _OF_THE_FAKE)

    def _told(self, line: str) -> str:
        match = _LINE.match(line)
        if not match:
            return line
        name, labels, value = match[1], match[2] or "", float(match[3])
        if name in self.instead:
            value = self.instead[name]
        elif name in self._growing or re.sub(r"_(bucket|sum|count)$", "", name) in self._growing:
            value *= 1 + self._calls / 10
        return f"{name}{labels} {value}"
