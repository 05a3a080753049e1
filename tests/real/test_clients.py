"""vLLM's own benchmark clients against the real stack: all is answered, and later turns pull."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import MODELS, Pair, Workers
from tests.real.test_pair import QUESTIONS, release_all

_BENCH = """\
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
"""``vllm bench serve``, whose own command looks for a distribution called vllm."""


@pytest.mark.parametrize(
    ("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
async def test_vllm_bench_serve(pair: Pair, tmp_path: Path, backend: str, path: str) -> None:
    """Every request of ``vllm bench serve`` is answered, with all the tokens that it asked for."""
    model = MODELS / pair.model
    command = [sys.executable, "-c", _BENCH, "--backend", backend, "--endpoint", path]
    command += ["--base-url", pair.proxy, "--model", pair.model, "--tokenizer", str(model)]
    command += ["--dataset-name", "random", "--random-input-len", "120"]
    command += ["--random-output-len", "9", "--num-prompts", "6", "--max-concurrency", "3"]
    command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--result-filename",
        "result.json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 54)


async def read_as_the_multi_turn_client_does(
    pair: Pair, workers: Workers, body: dict[str, Any]
) -> tuple[str, Any]:
    """One turn, and the headers. The client takes every line that is not empty for a chunk: it
    knows no comments and no events without choices."""
    number = body["conversation_id"]
    headers = {"Content-Type": "application/json", "X-Session-ID": str(number)}
    text, ended = "", False
    url = pair.proxy + "/v1/chat/completions"
    async with workers.session.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        async for line in response.content:
            if not (chunk := line.strip().decode().removeprefix("data: ")):
                continue
            if chunk == "[DONE]":
                ended = True
            else:
                text += json.loads(chunk)["choices"][0]["delta"].get("content") or ""
        assert ended
        return text, response.headers


async def test_what_vllms_multi_turn_benchmark_sends(pair: Pair, workers: Workers) -> None:
    """Conversations in turn, named by number in body and header, no usage chunk: each later turn
    pulls its history, and says what a cold worker says.

    The client itself (``benchmarks/multi_turn`` in vLLM's repository) is not in vLLM's wheel.
    """
    talks: dict[int, list[dict[str, str]]] = {71: [], 72: []}
    for turn in range(3):
        for number, messages in talks.items():
            question = f"Conversation {number}. {QUESTIONS[0]}" if turn == 0 else QUESTIONS[turn]
            messages.append({"role": "user", "content": question})
            body = {
                "model": pair.model,
                "messages": messages,
                "conversation_id": number,
                "stream": True,
                "stream_options": {"include_usage": False},
                "max_tokens": 12,
                "temperature": 0,
            }
            before = await workers.pulled()
            text, headers = await read_as_the_multi_turn_client_does(pair, workers, body)
            pulled = await workers.pulled() - before
            expected = "prefill-with-pull" if turn else "cold-prefill"
            assert headers["X-KVLoop-Route"] == expected, (turn, headers["X-KVLoop-Reason"])
            assert (pulled > 300) == bool(turn)
            cold = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
            del cold["conversation_id"]
            answer = await workers.post(pair.prefill + "/v1/chat/completions", cold)
            assert text == answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
    for number in talks:
        await release_all(workers, {"model": pair.model, "conversation_id": number})
