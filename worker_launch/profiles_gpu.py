"""[pure] Profiles for GPUs: the published P5en benchmark's settings, and one machine with 8 H200.

Source of the two P5en profiles: the vLLM blog of 2026-10-12 on bidirectional KV transfer and its
script ``serve_pd_multiturn.sh`` (vLLM 0.29.0). ``tests/worker_launch/test_profiles_gpu.py`` holds
the profiles to that text point by point and names every departure with its reason. None of these
has been run by us: there was no such machine.
"""

from __future__ import annotations

from worker_launch.launch_profile import (
    CONNECTOR_SETTINGS,
    FAIL_CLEANLY,
    SCALE_OUT,
    LaunchProfile,
    Setting,
)

_PUBLISHED = "as in the published benchmark"

_DTYPE = Setting("dtype", "bfloat16", f"{_PUBLISHED}; FP8 checkpoints keep their quantised weights")
_CONTEXT = Setting(
    "max-model-len",
    32768,
    f"{_PUBLISHED}: room for its longest conversation of 24k tokens and ten turns; a longer "
    "context only needs KV memory, so raise it for real use",
)
_SEQUENCES = Setting(
    "max-num-seqs",
    8,
    f"{_PUBLISHED}, which runs two clients; raise it for real use (--set max-num-seqs=256)",
)
_NO_PREFIX_CACHE = Setting(
    "enable-prefix-caching",
    False,
    f"{_PUBLISHED}, on prefill only: it stands for a prefill whose cache was evicted, or another "
    "one than last turn's. For real use turn it on (--set enable-prefix-caching=true): both kinds "
    "of reuse then add up",
)
_DETAILS = Setting(
    "enable-prompt-tokens-details",
    True,
    "usage then reports cached tokens, which clients look for; the benchmark leaves it out",
)
_CUDA_BUFFER = Setting(
    "kv_buffer_device", "cuda", f"{_PUBLISHED}: the network reads GPU memory, no copy through host"
)
_THRESHOLD = Setting(
    "kv_recompute_threshold",
    64,
    f"{_PUBLISHED}, vLLM's default and the proxy's pull_threshold: below this many tokens "
    "computing beats a read",
)
_KEEP_ALIVE = Setting(
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    120,
    "seconds; the default of 5 closes idle connections while the proxy reuses them",
)
_NO_USAGE_STATS = Setting(
    "VLLM_NO_USAGE_STATS", 1, "a serving fleet reports nothing outside; remove it to take part"
)

_EFA_BACKEND = Setting(
    "backends",
    ("LIBFABRIC",),
    f"{_PUBLISHED}: NIXL over libfabric uses every EFA interface. The default, UCX, has no native "
    "EFA path in many builds and then falls back to TCP without a word",
)
_EFA_PROVIDER = Setting(
    "FI_PROVIDER",
    "efa",
    f"{_PUBLISHED}: without it libfabric may choose tcp, which is far slower or hangs; with "
    "it a machine without EFA fails at the start, where it can be seen",
)


def _p5en(name: str, summary: str, *more: Setting) -> LaunchProfile:
    """One worker on each of two p5en.48xlarge, 8 GPUs and 16 EFA interfaces each."""
    return LaunchProfile(
        name=name,
        summary=summary,
        engine=(
            _DTYPE,
            Setting(
                "tensor-parallel-size",
                8,
                f"{_PUBLISHED}: all GPUs of the machine; equal on both sides, so that every rank "
                "reads from one rank over its own two EFA interfaces",
            ),
            _CONTEXT,
            _SEQUENCES,
            _DETAILS,
            SCALE_OUT,
            *more,
        ),
        prefill_engine=(_NO_PREFIX_CACHE,),
        transfer=(FAIL_CLEANLY, _CUDA_BUFFER),
        connector=(_EFA_BACKEND, *CONNECTOR_SETTINGS, _THRESHOLD),
        environment=(_EFA_PROVIDER, _KEEP_ALIVE, _NO_USAGE_STATS),
    )


QWEN3_32B_P5EN = _p5en(
    "qwen3-32b-p5en", "Qwen/Qwen3-32B, a prefill and a decode worker on a p5en.48xlarge each"
)

GLM_5_FP8_P5EN = _p5en(
    "glm-5-fp8-p5en", "zai-org/GLM-5-FP8, a prefill and a decode worker on a p5en.48xlarge each"
)

SINGLE_NODE_H200 = LaunchProfile(
    name="single-node-h200",
    summary="a prefill and a decode worker with 4 GPUs each on one machine with 8 H200",
    engine=(
        _DTYPE,
        Setting(
            "tensor-parallel-size",
            4,
            "half of the machine's GPUs; equal on both sides, as every transfer needs",
        ),
        _CONTEXT,
        Setting(
            "max-num-seqs", 256, "vLLM's own order of magnitude: this profile is no benchmark's"
        ),
        _DETAILS,
        SCALE_OUT,
    ),
    transfer=(FAIL_CLEANLY, _CUDA_BUFFER),
    connector=(
        Setting("backends", ("UCX",), "within one machine UCX moves blocks over NVLink (cuda_ipc)"),
        *CONNECTOR_SETTINGS,
        _THRESHOLD,
    ),
    environment=(
        Setting(
            "UCX_TLS",
            "cuda_ipc,cuda_copy,sm,self,tcp",
            "NVLink for the blocks, tcp only to set up; without cuda_ipc they would go through "
            "host memory",
        ),
        _KEEP_ALIVE,
        _NO_USAGE_STATS,
    ),
    prefill_environment=(
        Setting("CUDA_VISIBLE_DEVICES", "0,1,2,3", "the first half; decode takes the other"),
    ),
    decode_environment=(
        Setting("CUDA_VISIBLE_DEVICES", "4,5,6,7", "the second half; prefill takes the other"),
    ),
)

GPU_PROFILES = (QWEN3_32B_P5EN, GLM_5_FP8_P5EN, SINGLE_NODE_H200)
