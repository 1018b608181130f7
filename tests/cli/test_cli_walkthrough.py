"""`kvpool walkthrough`: the command becomes the manager's own process for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvpool.process.services import WALKTHROUGH_MODULE
from kvpool.walkthrough.__main__ import STORIES
from tests.client.commands import KVPOOL, exit_status


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The command with its output in pipes."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_the_command_is_the_process() -> None:
    """Same output, same exit status."""
    ours = run([*KVPOOL, "walkthrough", "nothing"])
    theirs = run([sys.executable, "-m", WALKTHROUGH_MODULE, "nothing"])
    assert ours.returncode == 2
    assert (ours.stdout, ours.stderr, ours.returncode) == (theirs.stdout, theirs.stderr, theirs.returncode)
    assert len(ours.stderr) > 50


def test_the_command_is_found_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of the stories."""
    assert exit_status(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "walkthrough See the manager's core at work" in text
    assert ", ".join(STORIES) in text
