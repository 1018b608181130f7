"""`kvpool check`: an audit of the manager's laws."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.table import Table

from kvpool.client.sync_client import SyncClient
from kvpool.v1 import cache_pb2, common_pb2

from ..terminal import JsonOption, ManagerOption, client_config, print_json, printed, stdout_console


def check(as_json: JsonOption = False, manager: ManagerOption = None) -> None:
    """Audit the manager's laws. Exit status 1 if any is broken."""
    with SyncClient(config=client_config(manager)) as client:
        response = client.check()
    if as_json:
        print_json(_report_object(response))
    else:
        _print_report(response)
    if response.violations:
        raise typer.Exit(1)


def _report_object(response: cache_pb2.CheckResponse) -> dict[str, object]:
    """Return the object that `--json` prints. The names are part of the interface. Null: no single block or sequence."""
    return {
        "violations": [
            {
                "law": violation.law,
                "worker_id": violation.worker_id,
                "block_id": None if violation.block_id < 0 else violation.block_id,
                "sequence": _sequence_name(violation.sequence) or None,
                "message": violation.message,
            }
            for violation in response.violations
        ],
        "num_blocks_checked": response.num_blocks_checked,
        "num_sequences_checked": response.num_sequences_checked,
        "num_nodes_checked": response.num_nodes_checked,
        "num_sessions_checked": response.num_sessions_checked,
    }


def _print_report(response: cache_pb2.CheckResponse) -> None:
    console = stdout_console()
    if response.violations:
        console.print(_table(response.violations))
    result = f"{len(response.violations)} violations" if response.violations else "every law holds"
    console.print(
        f"{result}: {response.num_blocks_checked:,} blocks, {response.num_sequences_checked:,} sequences, "
        f"{response.num_nodes_checked:,} prefix nodes and {response.num_sessions_checked:,} sessions checked",
        markup=False,
    )


def _table(violations: Sequence[cache_pb2.Violation]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("law", "worker", "block", "sequence", "what"):
        table.add_column(column, overflow="fold")
    for violation in violations:
        table.add_row(
            printed(violation.law),
            printed(violation.worker_id),
            "" if violation.block_id < 0 else str(violation.block_id),
            printed(_sequence_name(violation.sequence)),
            printed(violation.message),
        )
    return table


def _sequence_name(key: common_pb2.SequenceKey) -> str:
    return f"{key.sequence_id}/{key.attempt}/{key.round}" if key.sequence_id else ""
