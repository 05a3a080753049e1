"""What KV weighs and where pulling begins to pay, against figures known from elsewhere."""

from __future__ import annotations

import pytest

from kvloop.advise.model import Costs, UnknownModel, of_config

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "torch_dtype": "bfloat16",
}


def test_grouped_query_attention() -> None:
    """Llama 3.1 8B: 128 KiB a token, some 7 billion parameters without embeddings."""
    model = of_config(LLAMA_8B)
    assert model.kv_bytes == 128 * 1024
    assert model.parameters == pytest.approx(7.0e9, rel=0.02)


def test_a_latent_is_small_counted_once_and_copied_to_every_rank() -> None:
    """DeepSeek V3: 576 values a layer, 68.6 KiB a token; 37 billion active with embeddings."""
    model = of_config(DEEPSEEK_V3, tensor_parallel=8)
    assert model.kv_bytes == 61 * 576 * 2
    assert model.bytes_of(1) == 8 * model.kv_bytes
    assert model.parameters == pytest.approx(36e9, rel=0.05)


def test_kv_heads_fewer_than_ranks_are_copied() -> None:
    assert of_config(LLAMA_8B, tensor_parallel=8).copies == 1
    assert of_config(LLAMA_8B, tensor_parallel=16).copies == 2


def test_the_kv_dtype_of_the_cache_beats_the_model_s() -> None:
    assert of_config(LLAMA_8B, kv_dtype="fp8").kv_bytes == 64 * 1024
    assert of_config(LLAMA_8B, kv_dtype="auto").kv_bytes == 128 * 1024


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "intermediate_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != field}
    with pytest.raises(UnknownModel, match=field):
        of_config(config)


def test_the_crossover_is_where_the_curves_cross() -> None:
    model = of_config(LLAMA_8B)
    costs = Costs(4e14, 25e9, overhead=0.02, pull_overhead=0.02)
    found = costs.crossover(model, block=16)
    assert found is not None
    assert found % 16 == 0

    def gain(tokens: int) -> float:
        return model.flops(tokens) / costs.flops_per_second - costs.pull(model, tokens)

    assert gain(found) > 0 >= gain(found - 16)


def test_a_slow_link_never_pays() -> None:
    model = of_config(LLAMA_8B)
    assert Costs(4e14, 1e8).crossover(model) is None


def test_a_longer_context_makes_computing_dearer() -> None:
    model = of_config(LLAMA_8B)
    assert model.flops(100, 10_000) > model.flops(100)
    whole = model.flops(1000)
    assert model.flops(400) + model.flops(600, 400) == pytest.approx(whole)
