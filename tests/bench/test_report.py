"""The command line that all benchmarks have in common."""

from __future__ import annotations

import pytest

from bench.report import Series, command_line


@pytest.mark.parametrize("runs", ["0", "-1"])
def test_no_run_at_all_is_refused_before_anything_is_measured(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(None, runs=5).parse_args(["--runs", runs])
    assert f"argument --runs: must be at least 1, got {runs}" in capsys.readouterr().err


def test_runs_and_json_have_defaults() -> None:
    arguments = command_line(None, runs=5).parse_args([])
    assert (arguments.runs, arguments.json) == (5, False)


def test_a_series_shows_median_least_and_most() -> None:
    series = Series("ours", [1.5, 0.5, 3.0])
    assert series.spread == "1.50 s (500 ms to 3.00 s)"
    assert str(series) == "1.50 s (500 ms to 3.00 s, 3 runs)"
