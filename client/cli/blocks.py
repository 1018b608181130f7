"""`kvpool blocks`: the block map of every worker, or of one."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from ..block_map import BlockMap, fetch_block_map
from ..client import Client
from ..errors import NotFound
from .block_map import render_block_map
from .terminal import ManagerOption, client_config, stdout_console


def blocks(
    worker: Annotated[str | None, typer.Option("--worker", help="Only this worker.")] = None,
    manager: ManagerOption = None,
) -> None:
    """The block map as a picture: state, sharing and owner of every block."""
    config = client_config(manager)

    async def fetch() -> list[BlockMap]:
        async with Client(config=config) as client:
            live = sorted(description.worker_id for description in (await client.describe()).workers)
            if worker is not None and worker not in live:
                names = ", ".join(live) or "none"
                raise NotFound(f"no live worker {worker!r}; there are: {names}", reason="UNKNOWN_WORKER")
            return [await fetch_block_map(client, worker_id) for worker_id in ([worker] if worker else live)]

    console = stdout_console()
    block_maps = asyncio.run(fetch())
    if not block_maps:
        console.print(f"manager {config.manager}: no live worker; start one with `kvpool worker`", markup=False)
    for index, block_map in enumerate(block_maps):
        if index:
            console.print()
        console.print(render_block_map(block_map, console.width))
