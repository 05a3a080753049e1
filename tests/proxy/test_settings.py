"""Settings: one name in env, flag and file; wrong values say how to mend them."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.settings import Settings, SettingsError, load

DECODE = ["--decode-urls", "http://d:1"]


def test_environment_flag_and_file_use_one_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flag beats environment, environment beats file."""
    file = tmp_path / "kvloop.toml"
    file.write_text('decode_urls = "http://file:1"\nport = 1\npull_threshold = 7\n')
    monkeypatch.setenv("KVLOOP_CONFIG", str(file))
    assert load([]).decode_urls == ("http://file:1",)
    monkeypatch.setenv("KVLOOP_DECODE_URLS", "http://env:1, http://env:2/")
    monkeypatch.setenv("KVLOOP_PORT", "2")
    settings = load(["--port", "3"])
    assert settings.decode_urls == ("http://env:1", "http://env:2")
    assert (settings.port, settings.pull_threshold) == (3, 7)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "decode_urls is empty"),
        (["--decode-urls", "d:1"], "write http://host:port"),
        (["--decode-urls", "http://d:1,http://d:1"], "listed twice"),
        ([*DECODE, "--port", "x"], "KVLOOP_PORT"),
        ([*DECODE, "--port", "70000"], "--port"),
        ([*DECODE, "--redis-url", "http://x"], "redis://"),
        ([*DECODE, "--log-level", "loud"], "DEBUG, INFO"),
        ([*DECODE, "--decode-kv-ttl-seconds", "20"], "expiry_margin_seconds must be smaller"),
        ([*DECODE, "--pull-threshold", "0"], "pull_threshold"),
    ],
)
def test_a_wrong_value_stops_the_start_and_names_the_mend(arguments: list[str], says: str) -> None:
    """The message names the setting or what to write."""
    with pytest.raises(SettingsError) as caught:
        load(arguments)
    assert says in str(caught.value)


def test_a_missing_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVLOOP_CONFIG pointing nowhere is an error, not a default."""
    monkeypatch.setenv("KVLOOP_CONFIG", "/nowhere/kvloop.toml")
    with pytest.raises(SettingsError, match="not a file"):
        load(DECODE)


def test_every_setting_says_what_it_is_for() -> None:
    """No setting without a description."""
    for name, field in Settings.model_fields.items():
        assert field.description, name
