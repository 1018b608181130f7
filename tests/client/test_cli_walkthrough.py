"""`kvpool walkthrough`: the command becomes the manager's own process for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvpool.client.cli.commands.walkthrough import WALKTHROUGH_MODULE
from tests.client.commands import KVPOOL

COMMAND = [*KVPOOL, "walkthrough"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The command with its output in pipes."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status"), [(["prefix"], 0), (["chain", "--plain"], 0), ([], 0), (["--help"], 0), (["nothing"], 2)]
)
def test_the_command_is_the_process(arguments: list[str], status: int) -> None:
    """Same output, same exit status, all arguments passed on."""
    ours = run([*COMMAND, *arguments])
    theirs = run([sys.executable, "-m", WALKTHROUGH_MODULE, *arguments])
    assert ours.returncode == status
    assert (ours.stdout, ours.stderr, ours.returncode) == (theirs.stdout, theirs.stderr, theirs.returncode)
    assert len(ours.stdout + ours.stderr) > 50


def test_the_command_is_found_in_the_help() -> None:
    """With the names of the cases."""
    text = " ".join(run([*KVPOOL, "--help"]).stdout.replace("│", "").split())
    assert "walkthrough See the manager's core at work" in text
    assert "allocation, prefix, chain, eviction" in text
