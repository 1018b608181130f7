"""Measurements of bench.manager_scale at their smallest."""

from __future__ import annotations

import pytest

from bench.manager_scale import LEAST_BLOCKS, MEASUREMENTS


@pytest.mark.parametrize("name", ["register", "route", "report"])
def test_a_measurement_runs_with_the_fewest_blocks_that_the_command_takes(name: str) -> None:
    assert MEASUREMENTS[name](LEAST_BLOCKS)
