"""Runs `kvpool worker --dry-run` once before the workers start, so that wrong settings are reported once."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from dataclasses import replace
from typing import Final

from kvpool.client.errors import KvpoolError

from .children import ChildSpec

_LONGEST_SECONDS: Final = 30.0


class WorkerRefused(KvpoolError):
    """A worker cannot use its settings."""

    def __init__(self, lines: list[str], exit_status: int) -> None:
        super().__init__(" ".join(lines), reason="WORKER_REFUSED")
        self.lines = lines
        """Lines that it wrote to stderr."""
        self.exit_status = exit_status
        """2: its settings are wrong; 1: this machine or the model does not allow them."""


async def try_settings(worker: ChildSpec, longest_seconds: float = _LONGEST_SECONDS) -> None:
    """Let a process with the arguments and variables of `worker` check them. Raises WorkerRefused. May be cancelled.

    The process is ended after its first line on stdout, when the worker's `find_candidate` has made all quick checks, or after
    `longest_seconds`, e.g. if the hub does not answer. The workers check everything themselves.
    """
    dry_run = replace(worker, command=[*worker.command, "--log-level", "error", "--dry-run"])
    process = await dry_run.start(stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(longest_seconds):
            if await process.stdout.readline():
                return
            lines = (await errors).decode(errors="replace").splitlines()
            status = await process.wait()
        if status:
            raise WorkerRefused(lines or [f"{worker.name} --dry-run ended with exit status {status}"], status)
    except TimeoutError:
        return
    finally:
        errors.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
