"""One `kvpool worker --dry-run` before the workers start: what they cannot use is reported once, and in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from dataclasses import replace

from ...errors import KvpoolError
from .children import ChildSpec


class WorkerRefused(KvpoolError):
    """A worker cannot use its settings."""

    def __init__(self, lines: list[str], exit_status: int) -> None:
        super().__init__(" ".join(lines), reason="WORKER_REFUSED")
        self.lines = lines
        """What it wrote to stderr."""
        self.exit_status = exit_status
        """2: its settings are wrong; 1: this machine or the model does not allow them."""


async def try_settings(worker: ChildSpec) -> None:
    """Let a process with the arguments and variables of `worker` check them. Raises WorkerRefused. May be cancelled.

    It is ended after its first line on stdout: cache folder, model, device and length are checked then. The plan of the memory is
    left to the workers, because they may take some of it meanwhile.
    """
    dry_run = replace(worker, command=[*worker.command, "--log-level", "error", "--dry-run"])
    process = await dry_run.start(stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        if await process.stdout.readline():
            return
        lines = (await errors).decode(errors="replace").splitlines()
        status = await process.wait()
        if status:
            raise WorkerRefused(lines or [f"{worker.name} --dry-run ended with exit status {status}"], status)
    finally:
        errors.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
