"""`make prove KIND=cpus` counts what pytest reports, and lets nothing pass that did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import cpus

REPORT = """<testsuites><testsuite>
<testcase classname="tests.model.test_a" name="test_right[x]"><properties>
<property name="attention_choice" value="64: partitions of 192 keys"/></properties></testcase>
<testcase classname="tests.model.test_a" name="test_wrong"><failure message="no"/></testcase>
<testcase classname="tests.model.test_a" name="test_broken"><error message="no"/></testcase>
<testcase classname="tests.model.test_b" name="test_left_out"><skipped message="not promised: because"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return path


def test_each_outcome_is_counted_and_named(report: Path) -> None:
    result = cpus.read(report, ["tests/model/test_a.py", "tests/model/test_b.py"])
    assert result.passed == 1
    assert result.failed == ("tests.model.test_a::test_wrong", "tests.model.test_a::test_broken")
    assert result.skipped == ("tests.model.test_b::test_left_out: not promised: because",)
    assert result.choices == "64: partitions of 192 keys"
    assert not result.trouble


def test_a_file_without_a_selected_test_is_trouble(report: Path) -> None:
    assert "tests.model.test_gone" in cpus.read(report, ["tests/model/test_a.py", "tests/model/test_gone.py"]).trouble


def test_a_failure_in_one_setting_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"good": cpus.Result(3), "bad": cpus.Result(2, ("test_wrong",), ("test_left_out: why",))}
    monkeypatch.setattr(cpus, "_run", lambda setting: results[setting.name])
    good, bad = cpus.Setting("good", {}), cpus.Setting("bad", {"A": "b"}, num_threads=2)
    absent = cpus.Setting("absent", {}, needs="no_such_flag")
    assert cpus.run_all([good, absent]) == 0
    assert "| absent | none | 1 | not on this CPU: it has no no_such_flag |" in capsys.readouterr().out
    assert cpus.run_all([good, bad]) == 1
    out = capsys.readouterr().out
    assert "| bad | `A=b` | 2 | 2 | 1 | 1 |" in out
    assert "bad: failed: test_wrong" in out
    assert "bad: skipped: test_left_out: why" in out


def test_every_file_that_it_names_exists() -> None:
    assert all((cpus.ROOT / path).is_file() for path in cpus.TESTS)
