"""Each client has exact versions, and an environment that cannot be made is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import NAMES, PINS, NoEnvironment, make
from tests.clients.table import CLIENTS, ROUTERS

pytestmark = pytest.mark.slow


def test_each_client_has_exact_versions_and_a_test() -> None:
    for name in NAMES:
        lines = [line for line in (PINS / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert [line for line in lines if "==" not in line] == [], name
    assert {*CLIENTS, *ROUTERS, "lm-eval"} == set(NAMES)


def test_an_environment_that_could_not_be_made_is_an_error_each_time(tmp_path: Path) -> None:
    folder, pins = tmp_path / "environment", tmp_path / "pins.txt"
    pins.write_text("--no-index\n--find-links .\nno-such-client==1\n")
    for _ in range(2):
        with pytest.raises(NoEnvironment, match="no-such-client"):
            make(folder, pins)
