"""What the tests of the worker side share."""

from __future__ import annotations

import pytest

from worker_launch import vllm_compat


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the running vLLM, whose import takes seconds."""
    monkeypatch.setattr(vllm_compat, "running_version", lambda: "0.32.0")
