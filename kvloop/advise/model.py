"""[pure] What KV cache weighs and what computing it costs, from a model's ``config.json``.

Costs are those of one prefill worker with all its GPUs: FLOP/s and bytes/s are the worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
}


class UnknownModel(ValueError):
    """A field is missing from the config; the message names it."""


@dataclass(frozen=True)
class KvModel:
    """What matters of a model here.

    ``kv_bytes``: of one token over all layers, once. ``copies``: how often a worker with tensor
    parallelism holds it (MLA's latent is on every rank). ``parameters``: those that one token uses.
    ``attention``: FLOPs of one token for each token that it looks at.
    """

    name: str
    kv_bytes: float
    parameters: float
    attention: float
    copies: int = 1

    def bytes_of(self, tokens: float) -> float:
        return tokens * self.kv_bytes * self.copies

    def flops(self, new: float, context: float = 0.0) -> float:
        """To compute ``new`` tokens after ``context`` others."""
        looked_at = new * context + new * new / 2
        return 2 * self.parameters * new + self.attention * looked_at


def of_config(
    config: Mapping[str, Any],
    *,
    kv_dtype: str | None = None,
    parameters: float | None = None,
    tensor_parallel: int = 1,
) -> KvModel:
    """Read a Hugging Face ``config.json``. ``kv_dtype``: as vLLM's ``--kv-cache-dtype``.

    ``parameters`` overrides the estimate of active parameters. Sliding windows and state-space
    layers are counted as full attention: the figures are then upper bounds. Raises
    ``UnknownModel``.
    """
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else dict(config)
    layers = _count(fields, "num_hidden_layers")
    hidden = _count(fields, "hidden_size")
    heads = _count(fields, "num_attention_heads")
    kind = kv_dtype if kv_dtype not in (None, "auto") else None
    kind = kind or str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")
    size = _BYTES.get(kind.removeprefix("torch."))
    if size is None:
        raise UnknownModel(f"dtype {kind!r}: none of {', '.join(_BYTES)}; give --kv-dtype")
    latent = fields.get("kv_lora_rank")
    if latent:
        rope = _count(fields, "qk_rope_head_dim")
        values = latent + rope
        nope, value_dim = fields.get("qk_nope_head_dim", 128), fields.get("v_head_dim", 128)
        attention = 2.0 * layers * heads * (nope + rope + value_dim)
        query_rank = fields.get("q_lora_rank") or 0
        width = heads * (nope + rope)
        query = query_rank * (hidden + width) if query_rank else hidden * width
        projections = query + hidden * values + latent * heads * (nope + value_dim)
        projections += heads * value_dim * hidden
        copies = tensor_parallel
    else:
        kv_heads = fields.get("num_key_value_heads") or heads
        head = fields.get("head_dim") or hidden // heads
        values = 2 * kv_heads * head
        attention = 4.0 * layers * heads * head
        projections = hidden * head * (2 * heads + 2 * kv_heads)
        copies = max(1, tensor_parallel // kv_heads)
    active = parameters or layers * projections + _mlp(fields, layers, hidden)
    name = str(config.get("_name_or_path") or config.get("model_type") or "model")
    return KvModel(name, float(layers * values * size), float(active), attention, copies)


def _mlp(fields: Mapping[str, Any], layers: int, hidden: int) -> float:
    """Active parameters of the feed-forward layers; three matrices each, as gated ones have."""
    dense = 3.0 * hidden * _count(fields, "intermediate_size")
    chosen = fields.get("num_experts_per_tok")
    if not chosen:
        return layers * dense
    width: int = fields.get("moe_intermediate_size") or _count(fields, "intermediate_size")
    shared: int = fields.get("n_shared_experts") or 0
    first: int = fields.get("first_k_dense_replace") or 0
    return first * dense + (layers - first) * 3.0 * hidden * width * float(chosen + shared)


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnknownModel(f"the model's config has no {name}")
    return value


@dataclass(frozen=True)
class Costs:
    """A pair's speeds. Seconds, FLOP/s and bytes/s of one prefill worker.

    ``overhead``: of any prefill. ``pull_overhead``: what a pull adds besides moving bytes (the
    request is parked for an engine step or more).
    """

    flops_per_second: float
    bytes_per_second: float
    overhead: float = 0.0
    pull_overhead: float = 0.02

    def compute(self, model: KvModel, new: float, context: float = 0.0) -> float:
        """Seconds of a prefill of ``new`` tokens behind ``context`` that is there already."""
        return self.overhead + model.flops(new, context) / self.flops_per_second

    def pull(self, model: KvModel, tokens: float) -> float:
        if tokens <= 0:
            return 0.0
        return self.pull_overhead + model.bytes_of(tokens) / self.bytes_per_second

    def crossover(self, model: KvModel, *, block: int = 1, context: float = 0.0) -> int | None:
        """Shortest prefix, in whole blocks, that is quicker to pull than to compute.

        ``context``: tokens before it that prefill has. None: never up to a million tokens.
        """
        tokens, longest = block, 1_000_000

        def wins(count: int) -> bool:
            computing = model.flops(count, context) / self.flops_per_second
            return self.pull(model, count) < computing

        if not wins(longest):
            return None
        # Computing grows faster than pulling, so there is one crossing: search it.
        low, high = 0, ceil(longest / tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if wins(middle * tokens) else (middle, high)
        return high * tokens
