"""``kvloop advise`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvloop.advise.commands import advise
from kvloop.bench import records
from tests.kvloop_advise.test_fit import turns
from tests.kvloop_advise.test_model import LLAMA_8B
from tests.kvloop_bench.test_summary import run_of

app = typer.Typer()
app.command()(advise)
SPEEDS = ["--tflops", "400", "--gbps", "25"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    return file


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Agents: turns of 4,000 tokens and more, ten seconds apart."""
    file = tmp_path / "access.jsonl"
    rows = [
        {
            "time": 3 * number + 10 * turn,
            "session": f"s{number}",
            "prompt_tokens": 4000 + 1000 * turn,
            "completion_tokens": 200,
        }
        for number in range(20)
        for turn in range(6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_advice_is_said_and_written(traffic: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--model", str(model), *SPEEDS, "--decode-blocks", "40000", "--out", str(out)]
    done = CliRunner().invoke(app, [str(traffic), *options])
    assert done.exit_code == 0, done.output
    assert "Advice: adopt" in done.output
    said = json.loads((out / "advice.json").read_text())
    assert said["verdict"] == "adopt"
    assert f"lease {said['lease']:g} s" in done.output
    text = (out / "report.md").read_text()
    for words in ("What repeats", "Gaps and leases", "When a pull beats computing", "Not modelled"):
        assert words in text
    # A session is found for the lease if decode keeps its blocks for the proxy's margin longer.
    assert f"KVLOOP_DECODE_KV_TTL_SECONDS={said['lease'] + 30:g} " in text
    assert "KVLOOP_APPEND_TOKENS=64" in text
    assert "<svg" in (out / "report.html").read_text()


def test_a_measured_run_gives_speeds_and_errors(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(records.to_json(run_of(*turns(noise=0.1), lease_seconds=480.0)))
    done = CliRunner().invoke(app, ["--measured", str(file), "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert "checked, prefill leg without a pull: median error" in done.output
    assert "checked, prefill leg with a pull: median error" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--model is required"),
        (["--model", "{model}"], "give --tflops and --gbps"),
        (["--model", "{model}", *SPEEDS, "--format", "nonsense"], "nonsense"),
        (["--model", "no-such-file", *SPEEDS], "no-such-file"),
    ],
)
def test_what_is_missing_is_named(
    traffic: Path, model: Path, options: list[str], words: str
) -> None:
    given = [str(model) if option == "{model}" else option for option in options]
    done = CliRunner().invoke(app, [str(traffic), *given])
    assert done.exit_code == 2
    assert words in done.output
