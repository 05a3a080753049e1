"""[pure] What a launch profile is, and the settings that every profile shares.

A profile is data: every flag, variable and connector setting with the reason for its value, so that
``--dry-run --explain`` can print both. What differs per worker (role, ports, model) is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_launch.connector.pin_decision import DEFAULT_MAX_PINNED_FRACTION

Value = str | int | float | bool | tuple[str, ...]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def kv_role(self) -> str:
        return "kv_producer" if self is Role.PREFILL else "kv_consumer"


class TransferMode(StrEnum):
    """Who moves the blocks: decode (and prefill, from decode) reads them, or prefill writes them.

    Only what is read can flow back: vLLM refuses bidirectional transfer in push mode.
    """

    PULL = "pull"
    PUSH = "push"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the reason for it."""

    name: str
    value: Value
    why: str


@dataclass(frozen=True, slots=True)
class LaunchProfile:
    """What a kind of machine needs.

    ``engine``: vLLM flags without their dashes; True is a bare flag, False its ``--no-`` form.
    ``prefill_engine`` and ``decode_engine`` add to it for one role. ``transfer``: keys of
    ``kv-transfer-config``. ``connector``: keys of its ``kv_connector_extra_config``.
    ``environment``: variables; ``prefill_environment`` and ``decode_environment`` for one role.
    ``transfer`` and ``connector`` hold for both roles: the two workers read each other's blocks, so
    what describes the blocks must be equal.
    """

    name: str
    summary: str
    engine: tuple[Setting, ...]
    transfer: tuple[Setting, ...]
    connector: tuple[Setting, ...]
    environment: tuple[Setting, ...]
    prefill_engine: tuple[Setting, ...] = ()
    decode_engine: tuple[Setting, ...] = ()
    prefill_environment: tuple[Setting, ...] = ()
    decode_environment: tuple[Setting, ...] = ()

    def engine_for(self, role: Role) -> tuple[Setting, ...]:
        added = self.prefill_engine if role is Role.PREFILL else self.decode_engine
        return self.engine + added

    def environment_for(self, role: Role) -> tuple[Setting, ...]:
        added = self.prefill_environment if role is Role.PREFILL else self.decode_environment
        return self.environment + added


CONNECTOR_SETTINGS = (
    Setting(
        "bidirectional_kv_xfer",
        True,
        "decode keeps its blocks and prefill may read them; a prefill without it hangs on a handle",
    ),
    Setting(
        "decoder_kv_blocks_ttl",
        480,
        "seconds that decode keeps a finished turn, vLLM's default: shorter than a user's pause "
        "loses the reuse, longer fills decode with conversations that have ended",
    ),
    Setting(
        "kvloop_max_pinned_fraction",
        DEFAULT_MAX_PINNED_FRACTION,
        "share of decode's blocks that kept turns may take: nothing evicts them, so without a "
        "limit running requests find no memory",
    ),
)

PULL_ONLY = frozenset({"kv_recompute_threshold", *(item.name for item in CONNECTOR_SETTINGS)})
"""Connector settings of a profile that mean nothing, or stop the start, in push mode."""

PUSH_SETTINGS = (
    Setting(
        "push_registration_timeout",
        60,
        "seconds after which decode's log names a request that prefill has written nothing for "
        "(default 480); vLLM 0.32.0 does no more than that: the request waits on",
    ),
)

FAIL_CLEANLY = Setting(
    "kv_load_failure_policy",
    "fail",
    "a failed read becomes a clean error that the proxy retries cold; with 'recompute' a "
    "failed read of prefill hangs for ever",
)

SCALE_OUT = Setting(
    "enable-scale-out",
    True,
    "serves /v1/chat/completions/render, whose token ids are by construction those that the worker "
    "runs; without it the proxy asks /tokenize, which can express fewer requests",
)
