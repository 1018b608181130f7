"""kvpool's command line for tests: in this process, and as a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final
from unittest import mock

import pytest

from kvpool.cli.app import main

KVPOOL: Final = (sys.executable, "-c", "from kvpool.command import main; main()")
"""As the program `kvpool` begins, and its first arguments."""
END_SECONDS: Final = 60.0


def exit_status(arguments: Sequence[str]) -> int:
    """Run a command in this thread, as if it had a process of its own; returns its exit status."""
    try:
        main(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def became(run: Callable[[], object]) -> list[str]:
    """The command that replaces this process while `run` runs."""

    class Became(BaseException):
        """In place of a process that is another one now."""

    with mock.patch.object(os, "execv", side_effect=Became) as execv, pytest.raises(Became):
        run()
    program, command = execv.call_args.args
    assert program == command[0]
    return list(command)


async def kvpool(*arguments: str) -> int:
    """Run a command in a thread next to the fakes' event loop; returns its exit status."""
    return await asyncio.to_thread(exit_status, arguments)


async def run_kvpool(*arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process, with `typed` as its input, until it has ended."""
    return await asyncio.to_thread(
        subprocess.run,
        [*KVPOOL, *arguments],
        input=typed,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        check=False,
    )


async def start_kvpool(*arguments: str) -> asyncio.subprocess.Process:
    """Start a command as a process, with pipes as its stdin, stdout and stderr."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*KVPOOL, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
