"""`kvpool check`: do all laws hold?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import typer
from rich.table import Table

from kvpool.v1 import cache_pb2

from ...client import Client
from ..terminal import ManagerOption, client_config, printed, stdout_console


def check(manager: ManagerOption = None) -> None:
    """Audit the manager's laws. Exit status 1 if any is broken."""
    config = client_config(manager)

    async def audit() -> cache_pb2.CheckResponse:
        async with Client(config=config) as client:
            return await client.check()

    response = asyncio.run(audit())
    console = stdout_console()
    if response.violations:
        console.print(_table(response.violations))
    found = f"{len(response.violations)} violations" if response.violations else "every law holds"
    console.print(
        f"{found}: {response.num_blocks_checked:,} blocks, {response.num_sequences_checked:,} sequences, "
        f"{response.num_nodes_checked:,} prefix nodes and {response.num_sessions_checked:,} sessions checked",
        markup=False,
    )
    if response.violations:
        raise typer.Exit(1)


def _table(violations: Sequence[cache_pb2.Violation]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("law", "worker", "block", "sequence", "what"):
        table.add_column(column, overflow="fold")
    for violation in violations:
        key = violation.sequence
        table.add_row(
            printed(violation.law),
            printed(violation.worker_id),
            "" if violation.block_id < 0 else str(violation.block_id),
            printed(f"{key.sequence_id}/{key.attempt}/{key.round}" if key.sequence_id else ""),
            printed(violation.message),
        )
    return table
