"""[pure] What a run leaves behind: one record a request, samples of the workers, what was constant.

The file is the evidence: every number of a report is computed from it. It holds no text of prompts
or answers, only digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps

from pydantic import TypeAdapter, ValidationError

FORMAT = 1


@dataclass(frozen=True)
class TurnRecord:
    """One request, as its client saw it. Times are seconds, sizes bytes, lengths tokens.

    None means that nobody said, never zero.
    """

    workload: str
    conversation: str
    turn: int
    """From 1."""
    arm: str
    started: float
    """Unix time at which the request was sent."""
    total: float
    repeat: int = 0
    """Which pass over the workload, where arms take turns pass by pass."""
    loaded: bool = False
    """Other requests of this arm ran at the same time."""
    pause: float | None = None
    """Since the conversation's last answer on this arm; None for a first turn."""
    ttft: float | None = None
    """To the first content byte; None if there was no content."""
    itl: tuple[float, ...] = ()
    """Gaps between content chunks."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """As the answer's ``usage`` reports it."""
    route: str = ""
    reason: str = ""
    pulled_tokens: int | None = None
    prefill_cached_tokens: int | None = None
    reused_tokens: int | None = None
    legs: Mapping[str, float] = field(default_factory=dict)
    """Calls to workers, from the proxy's own log."""
    pull: Transfer | None = None
    """Decode to prefill, from prefill's counters; None when other requests ran too."""
    push: Transfer | None = None
    """Prefill to decode, from decode's counters."""
    history: str = ""
    """Digest of the messages sent."""
    answer: str = ""
    """Digest of the answer's text."""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.ttft is not None


@dataclass(frozen=True)
class Transfer:
    """What a reader's NIXL counters grew by during one turn."""

    bytes: float
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One look at a decode worker."""

    time: float
    """Unix seconds."""
    worker: str
    pinned_blocks: float | None = None
    usage: float | None = None
    """Share of its KV blocks that are taken, 0 to 1."""
    workload: str = ""


@dataclass(frozen=True)
class Span:
    """One pass of one arm over a workload, where arms take turns pass by pass."""

    workload: str
    arm: str
    repeat: int
    started: float
    ended: float


@dataclass(frozen=True)
class ArmInfo:
    """One way of serving, as it was measured."""

    name: str
    what: str
    url: str
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerInfo:
    """A worker, as it describes itself."""

    name: str
    role: str
    block_size: int | None = None
    blocks: int | None = None
    prefix_cache: bool | None = None
    version: str = ""


@dataclass(frozen=True)
class Run:
    """Everything that one run found out."""

    title: str
    started: float
    ended: float
    command: str
    """What to type to run it again."""
    commit: str
    machine: str
    model: str
    seed: int
    constant: tuple[str, ...]
    """What was the same for all arms, in words."""
    arms: tuple[ArmInfo, ...]
    workers: tuple[WorkerInfo, ...]
    turns: tuple[TurnRecord, ...]
    samples: tuple[Sample, ...] = ()
    spans: tuple[Span, ...] = ()
    workloads: Mapping[str, str] = field(default_factory=dict)
    """Name -> what it stands for."""
    lease_seconds: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know, such as a worker that restarted."""
    version: int = FORMAT


class RunUnreadable(ValueError):
    """A file is not a run of this version; the message names the file."""


_RUN = TypeAdapter(Run)


def to_json(run: Run) -> bytes:
    """One run as JSON; a line for each record, so that a diff can be read."""
    whole = _RUN.dump_python(run, mode="json", exclude_defaults=False)
    head = {key: value for key, value in whole.items() if key not in ("turns", "samples")}
    parts = [dumps(head, indent=1)[:-2]]
    for name in ("turns", "samples"):
        lines = ",\n  ".join(dumps(_slim(item), separators=(",", ":")) for item in whole[name])
        parts.append(f' "{name}": [\n  {lines}\n ]' if lines else f' "{name}": []')
    return (",\n".join(parts) + "\n}\n").encode()


def _slim(record: dict[str, object]) -> dict[str, object]:
    """Without what is empty or unknown, and with times that do not pretend to nanoseconds."""
    return {
        key: _rounded(value)
        for key, value in record.items()
        if value is not None and value is not False and value != "" and value != [] and value != {}
    }


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def from_json(data: bytes, name: str) -> Run:
    """``name``: of the file, for the message. Raises ``RunUnreadable``."""
    try:
        run = _RUN.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunUnreadable(
            f"{name} is not a run of kvloop bench: {where}: {first['msg']}"
        ) from None
    if run.version != FORMAT:
        raise RunUnreadable(f"{name} has format {run.version}; this version reads {FORMAT}")
    return run
