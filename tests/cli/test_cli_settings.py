"""What the commands that call a cluster are told by variables and by a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.cli.terminal import client_config
from kvpool.process.settings import SettingsProblem


def test_every_setting_of_the_file_reaches_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_MANAGER", raising=False)
    path = tmp_path / "kvpool.toml"
    path.write_text('[client]\nmanager = "127.0.0.1:9"\ntimeout = 7.5\nmax_attempts = 3\ncontinuation = false\n')
    monkeypatch.setenv("KVPOOL_CONFIG", str(path))
    config = client_config(None)
    assert (config.manager, config.timeout, config.max_attempts, config.continuation) == ("127.0.0.1:9", 7.5, 3, False)
    assert config.max_model_bytes == 64 << 20
    monkeypatch.setenv("KVPOOL_CLIENT_MAX_MODEL_BYTES", "1000")
    assert client_config(None).max_model_bytes == 1000
    monkeypatch.setenv("KVPOOL_CLIENT_TIMEOUT", "8")
    monkeypatch.setenv("KVPOOL_MANAGER", "127.0.0.1:10")
    config = client_config(None)
    assert (config.manager, config.timeout) == ("127.0.0.1:10", 8.0)
    assert client_config("127.0.0.1:11").manager == "127.0.0.1:11"


def test_what_makes_no_sense_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_CLIENT_MAX_ATTEMPTS", "0")
    with pytest.raises(SettingsProblem, match="KVPOOL_CLIENT_MAX_ATTEMPTS: "):
        client_config(None)
