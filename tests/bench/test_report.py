"""The command line that all benchmarks have in common."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import Ratio, Series, command_line, report_as


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


def test_a_ratio_is_the_median_of_the_pairs() -> None:
    ratio = Ratio(Series("ours", [1.0, 2.0, 4.0]), Series("peer", [4.0, 4.0, 4.0]))
    assert ratio.as_json() == {"median": 2.0, "least": 1.0, "most": 4.0}
    assert str(ratio) == "2.00x (1.00x to 4.00x)"


@pytest.mark.parametrize(
    ("given", "out", "written"),
    [
        ([], "tables\n", None),
        (["--json"], '{"figure": 1}\n', None),
        (["--json", "found.json"], "tables\n", {"figure": 1}),
    ],
)
def test_json_is_printed_instead_of_the_tables_or_written_next_to_them(
    given: list[str],
    out: str,
    written: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command_line(None, runs=5, json_file=True).parse_args(given)
    report_as(arguments.json, {"figure": 1}, lambda: print("tables"))
    assert capsys.readouterr().out == out
    assert [json.loads(file.read_text()) for file in tmp_path.iterdir()] == ([] if written is None else [written])
