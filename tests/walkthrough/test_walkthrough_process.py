"""`python -m kvpool.walkthrough` without a terminal, and what it says when something is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvpool.walkthrough.__main__ import STORIES, main
from kvpool.walkthrough.recording import Story
from kvpool.walkthrough.worker import Worker
from tests.cli.terminal_user import at_terminal
from tests.python_program import run_python

run = partial(run_python, "-m", "kvpool.walkthrough")


@pytest.mark.parametrize("name", STORIES)
def test_piped_output_has_all_steps_and_no_escape_codes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        for variable, value in {"COLUMNS": "40", "TERM": "xterm-256color"}.items():
            patch.setenv(variable, value)
        assert main([name]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "\x1b" not in output
    lines = output.splitlines()
    assert max(map(len, lines)) == 120
    titles = [line for line in lines if re.match(rf"{name} \d+/\d+ │ ", line)]
    num_steps = int(titles[0].split("/")[1].split()[0])
    assert [title.split()[1] for title in titles] == [f"{number}/{num_steps}" for number in range(1, num_steps + 1)]
    for part in ("Blocks       ", "Changed      ", "Free list    head → "):
        assert sum(line.startswith(part) for line in lines) == num_steps * len(STORIES[name].layout)
    assert sum(line.startswith("Blocks       16 of 4 tokens: ") for line in lines) == num_steps
    assert main([name]) == 0
    assert capsys.readouterr() == (output, "")


def test_the_process_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("prefix", COLUMNS="40")
    assert main(["prefix"]) == 0
    assert (done.stdout, done.stderr, done.returncode) == (*capsys.readouterr(), 0)
    coloured = run("prefix", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == done.stdout


def test_no_torch_and_no_grpc_is_imported() -> None:
    """It starts at once, and in an environment without torch."""
    code = (
        "import sys, runpy\n"
        "try: runpy.run_module('kvpool.walkthrough', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = set(run_python("-c", code).stdout.splitlines()[-1].split())
    assert {"kvpool", "rich", "xxhash", "google"} <= loaded
    assert not {"grpc", "torch", "numpy", "pydantic", "asyncio"} & loaded


def test_without_a_name_the_stories_are_listed() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for story in STORIES.values():
        assert sum(line.split() == [story.name, *story.summary.split()] for line in lines) == 1


def test_an_unknown_story_is_refused_with_the_known_ones() -> None:
    done = run("evicton")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no story 'evicton'" in done.stderr
    assert all(name in done.stderr for name in STORIES)


@pytest.mark.parametrize(("term", "has_colours"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_gets_all_steps_in_its_colours(term: str, has_colours: bool) -> None:
    """No key is asked for; a pager may follow."""
    with at_terminal("-m", "kvpool.walkthrough", "prefix", columns=120, terminal=term) as user:
        assert user.end() == 0
    assert b"prefix 7/7" in user.output
    assert (b"\x1b[" in user.output) is has_colours


def test_a_reader_that_leaves_is_not_complained_about() -> None:
    """kvpool walkthrough … | head"""
    command = [sys.executable, "-m", "kvpool.walkthrough", "eviction"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_ascii_output_loses_signs_and_nothing_else() -> None:
    done = run("prefix", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "prefix 7/7" in done.stdout


def _breaks_a_ref_count(worker: Worker) -> Iterator[str]:
    worker.allocate("A", "one two three four five")
    yield "All is well\n\nSo far."
    worker.session.pools[0]._ref_count[1] += 1
    yield "Broken\n\nA count is wrong."
    yield "Not reached\n\nNever shown."


def _breaks_off(worker: Worker) -> Iterator[str]:
    worker.allocate("A", "one two three four five")
    yield "All is well\n\nSo far."
    worker.session.pools[0]._ref_count[1] += 1
    raise ValueError("an answer that the story cannot use")


@pytest.mark.parametrize(("play", "title"), [(_breaks_a_ref_count, "Broken"), (_breaks_off, "The story cannot go on")])
def test_a_broken_law_is_shown_and_ends_the_story(
    play: object, title: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORIES, "broken", Story("broken", "a story with a wrong count", play))  # type: ignore[arg-type]
    assert main(["broken"]) == 1
    output = capsys.readouterr().out
    assert "broken 1/2 │ All is well" in output
    assert f"broken 2/2 │ {title}" in output
    before, _, after = output.partition("breaks its own laws")
    assert "broken 2/2" in before
    assert "references: " in after
    assert "Not reached" not in output


FIVE = "one two three four five"


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (
            lambda worker: worker.allocate("A", "too many words " * 30),
            'A was to be live after allocate("A", 90 tokens) → NEVER_FITS',
        ),
        (
            lambda worker: [worker.allocate(name, FIVE) for name in ("A", "B")],
            "B was to be live after allocate(\"B\", 5 tokens) → wait for 'A' up to position 4",
        ),
        (
            lambda worker: worker.allocate_in_vain("A", FIVE),
            'A was to be waiting after allocate("A", 5 tokens) → table [1, 2]',
        ),
        (
            lambda worker: [worker.allocate("A", "one two three four"), worker.compute("A", "five six")],
            "A was to go on; no step can be run",
        ),
        (
            lambda worker: [worker.allocate("A", FIVE), worker.compute("A"), worker.fork("A", "B", "six")],
            "B was to be a fork of A; the reserve has too few blocks",
        ),
        (
            lambda worker: [
                worker.cache.state.lose_session("the manager has forgotten it"),
                worker.allocate("A", FIVE),
            ],
            "the manager has forgotten it",
        ),
    ],
)
def test_an_answer_that_the_story_does_not_expect_is_an_error(
    play: Callable[[Worker], Iterator[str]],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STORIES, "changed", Story("changed", "a story that does not fit", play))
    assert main(["changed"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvpool walkthrough: changed: {message}")
