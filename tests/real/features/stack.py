"""Two real workers with everything switched on that a feature needs, and the proxy before them.

The model is the tiny random one, with a chat template that shows tools and thinking, four of its
tokenizer's unused special tokens renamed to the marks that the parsers look for, and a random LoRA
adapter. Its answers are noise, but noise that depends on every token of the prompt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvloop.stack.local import free_ports
from tests.real.conftest import MODELS

MODEL, ADAPTER = "features", "adapter"
RENAMED = {
    "<gh_stars>": "<think>",
    "<issue_start>": "</think>",
    "<issue_comment>": "<tool_call>",
    "<issue_closed>": "</tool_call>",
}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- if not (loop.last and continue_final_message) %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
WORKER_FLAGS = (
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    *("--reasoning-parser", "qwen3"),
    *("--reasoning-config", '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'),
    *("--scheduling-policy", "priority"),
    *("--max-logprobs", "20"),
    "--enable-lora",
    *("--max-lora-rank", "8"),
)
_START_SECONDS = 240


@dataclass(frozen=True)
class FeatureStack:
    """Addresses. ``plain`` is the prefill worker, asked without any transfer: one vLLM worker with
    the same flags, and with its prefix cache off."""

    proxy: str
    plain: str
    decode: str
    model_folder: Path


def make_model(folder: Path) -> None:
    """From the tiny model, which is made first where it is not there yet."""
    command = (sys.executable, "-m", "worker_launch", "model", "tiny", "--out", MODELS / "tiny")
    subprocess.run(command, check=True, capture_output=True)
    shutil.copytree(MODELS / "tiny", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in RENAMED.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def make_adapter(model: Path, folder: Path) -> None:
    """A random adapter in PEFT's format, strong enough to change the answer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    kv = config["num_key_value_heads"] * config["head_dim"]
    torch.manual_seed(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in (("q_proj", hidden), ("v_proj", kv)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, hidden) * 0.2
            tensors[f"{base}.lora_B.weight"] = torch.randn(out, rank) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


@contextmanager
def running(folder: Path, redis_url: str, **proxy_settings: str) -> Iterator[FeatureStack]:
    """Start all in ``folder``, stop all at the end. Raises with the log of what failed."""
    model, adapter = folder / "model", folder / "adapter"
    make_model(model)
    make_adapter(model, adapter)
    ports = free_ports(6)
    prefill, decode, proxy, admin, *side = ports
    with ExitStack() as stack:

        def start(
            name: str, command: list[str], environment: dict[str, str]
        ) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}
            )
            stack.callback(_stop, process)
            return process

        workers = []
        for role, port, channel in (("prefill", prefill, side[0]), ("decode", decode, side[1])):
            command = [sys.executable, "-m", "worker_launch", role, "--model", str(model)]
            command += ["--served-model-name", MODEL, "--port", str(port)]
            command += ["--side-channel-port", str(channel), "--", *WORKER_FLAGS]
            command += ["--lora-modules", f"{ADAPTER}={adapter}"]
            stored = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
            workers.append((role, port, start(role, command, stored)))
        for role, port, process in workers:
            _wait(f"http://127.0.0.1:{port}/health", process, folder / f"{role}.log")
        settings = {
            "KVLOOP_PORT": str(proxy),
            "KVLOOP_ADMIN_PORT": str(admin),
            "KVLOOP_PREFILL_URLS": f"http://127.0.0.1:{prefill}",
            "KVLOOP_DECODE_URLS": f"http://127.0.0.1:{decode}",
            "KVLOOP_REDIS_URL": redis_url,
            **proxy_settings,
        }
        process = start("proxy", [sys.executable, "-m", "proxy"], settings)
        _wait(f"http://127.0.0.1:{proxy}/ready", process, folder / "proxy.log")
        addresses = (f"http://127.0.0.1:{port}" for port in (proxy, prefill, decode))
        yield FeatureStack(*addresses, model)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"{url} did not become ready:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
