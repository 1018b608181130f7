"""`kvpool drain`: let a worker finish and leave."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import typer
from rich.console import Console

from kvpool.client.client import MAX_GRACE_SECONDS, Client
from kvpool.client.config import ClientConfig
from kvpool.client.errors import DeadlineExceeded, KvpoolError, Unavailable
from kvpool.v1 import cache_pb2

from ..terminal import ManagerOption, client_config, printed, stderr_console, stdout_console

_POLL_SECONDS: Final = 0.2
_BEYOND_GRACE_SECONDS: Final = 15.0
"""Time that a worker needs in addition to its grace: to get the order, to free its blocks, to deregister."""
_UNKNOWN_GRACE_SECONDS: Final = 60.0
"""Assumed grace if the worker uses its own setting, which is unknown here."""
_LOOK_SECONDS: Final = 2.0
"""Time for one answer of the manager. `kvpool up` ends its manager when its last worker has left."""


def drain(
    worker_id: Annotated[
        str, typer.Argument(metavar="WORKER", help="Name of the worker, as `kvpool status` shows it.")
    ],
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MAX_GRACE_SECONDS,
            help="Seconds that running requests may take to end. Default: the worker's --grace-seconds.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the worker has left.")] = True,
    manager: ManagerOption = None,
) -> None:
    """Let a worker end its requests and leave: no new ones go to it, its blocks are freed, its process ends."""
    asyncio.run(_drain(client_config(manager), worker_id, grace, wait))


async def _drain(config: ClientConfig, worker_id: str, grace: float | None, wait: bool) -> None:
    async with Client(config=config) as client:
        await client.drain(worker_id, grace=grace)
        if wait:
            await _until_left(client, worker_id, grace, stderr_console())
    stdout_console().print(printed(f"{worker_id} has left" if wait else f"{worker_id} is leaving"))


async def _until_left(client: Client, worker_id: str, grace: float | None, console: Console) -> None:
    """Wait until the present process of the worker has ended. A manager that has restarted may have lost the order, so it gets it
    again."""
    patience = _BEYOND_GRACE_SECONDS + (_UNKNOWN_GRACE_SECONDS if grace is None else grace)
    try:
        with console.status(printed(f"{worker_id} is leaving")) as progress:
            async with asyncio.timeout(patience):
                leaving: cache_pb2.WorkerDescription | None = None
                while True:
                    try:
                        workers = (await client.describe(timeout=_LOOK_SECONDS)).workers
                    except (Unavailable, DeadlineExceeded):
                        if leaving is None:
                            raise
                        if await _has_ended(leaving.address):
                            return
                        await asyncio.sleep(_POLL_SECONDS)
                        continue
                    worker = next((worker for worker in workers if worker.worker_id == worker_id), None)
                    leaving = leaving or worker
                    if worker is None or leaving is None or worker.incarnation != leaving.incarnation:
                        return  # another incarnation is its successor
                    if not worker.draining:
                        await client.drain(worker_id, grace=grace)
                    progress.update(printed(f"{worker_id} is leaving: {worker.load.num_running} requests running"))
                    await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise KvpoolError(
            f"{worker_id} has not left after {patience:g} s, although it gets no new requests: its log says why; to end it at "
            "once, end its process",
            reason="STILL_THERE",
        ) from None


async def _has_ended(address: str) -> bool:
    """Whether the worker's process has ended: connections to its address are refused."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    writer.close()
    return False
