"""Settings that may be repeated, and those that are refused, most of them because they would open the gateway by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.gateway.settings import MAX_KEY_FILE_BYTES, GatewaySettings
from kvpool.process.settings import SettingsProblem, load_settings

KEYS = ("a-key-of-this-test", "another-key-of-it")


def test_a_repeated_flag_gives_each_of_its_values() -> None:
    flags = [word for key in KEYS for word in ("--api-key", key)]
    flags += ["--allowed-host", "a.example", "--allowed-host", "b.example"]
    flags += ["--cors-origin", "https://a.example", "--cors-origin", "https://b.example"]
    settings = load_settings(GatewaySettings, flags)
    assert settings.keys == KEYS
    assert settings.allowed_host == ["a.example", "b.example"]
    assert settings.cors_origin == ["https://a.example", "https://b.example"]


@pytest.mark.parametrize("value", [",".join(KEYS), ", ".join(KEYS), json.dumps(KEYS)])
def test_a_variable_has_words_with_commas_or_a_json_list(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_GATEWAY_API_KEY", value)
    assert load_settings(GatewaySettings, []).keys == KEYS


def test_a_file_has_keys_in_its_lines_and_each_key_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n{KEYS[1]}\n\n{KEYS[0]}\n")
    settings = load_settings(GatewaySettings, ["--host", "0.0.0.0", "--api-key", KEYS[0], "--api-key-file", str(file)])
    assert settings.keys == KEYS
    assert KEYS[0] not in repr(settings)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--no-api-key"),
        (["--host", "pool.example"], "--no-api-key"),
        (["--api-key", "secret"], "8 to 512"),
        (["--no-api-key", "--api-key", "secret-secret"], "contradict"),
        (["--api-key", "", "--api-key", "secret-secret"], "empty"),
        (["--api-key", "secret-secret,"], "empty"),
        (["--api-key", '["secret-secret"'], "JSON list"),
        (["--allowed-host", "a.example,,b.example"], "empty"),
        (["--manager", "nonsense"], "host:port"),
        (["--api-key-file", "/no/such/file"], "cannot be read"),
    ],
)
def test_a_setting_that_is_wrong_is_named_and_a_key_is_not_repeated(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsProblem, match=said) as raised:
        load_settings(GatewaySettings, arguments)
    assert arguments[0] in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"k" * 20 + b"\n" + b"k" * MAX_KEY_FILE_BYTES, "more than"),
        (b"# nothing\n", "has no key"),
        (b"secret with-spaces\n", "8 to 512"),
        (b"secret-one,secret-two\n", "8 to 512"),
        (b"\xff\xfe", "not text"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_whole(content: bytes, said: str, tmp_path: Path) -> None:
    """Half a key would be a key too."""
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(SettingsProblem, match=said) as raised:
        load_settings(GatewaySettings, ["--api-key-file", str(file)])
    assert "secret" not in str(raised.value)
