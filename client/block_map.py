"""The blocks of a worker as the manager describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvpool.v1 import cache_pb2, common_pb2

from .client import Client
from .errors import NotFound

PAGE_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class BlockMap:
    """All blocks of the pool of one worker's group, as the manager described them page by page."""

    worker_id: str
    """Name of the worker."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Blocks of the pool, the null block included."""
    blocks: tuple[cache_pb2.BlockDescription, ...]
    """Descriptions in order of block_id. The null block may be missing."""
    group: int = 0
    num_groups: int = 1
    """Groups that the worker has."""
    spec: common_pb2.KVCacheGroup = field(default_factory=common_pb2.KVCacheGroup)
    """The kind of the group."""


async def fetch_block_maps(client: Client, worker_id: str) -> list[BlockMap]:
    """Fetch the block maps of all groups of a worker. NotFound if the worker is not there."""
    first = await fetch_block_map(client, worker_id)
    return [first, *[await fetch_block_map(client, worker_id, group=group) for group in range(1, first.num_groups)]]


async def fetch_block_map(
    client: Client, worker_id: str, page_blocks: int = PAGE_BLOCKS, *, group: int = 0
) -> BlockMap:
    """Fetch the block map of one group page by page, `page_blocks` (at most PAGE_BLOCKS) in each call of Describe. Blocks may
    change between two pages. NotFound if the worker is not there."""
    blocks: dict[int, cache_pb2.BlockDescription] = {}
    first_block = 0
    while True:
        response = await client.describe(
            worker_id=worker_id, first_block=first_block, max_blocks=page_blocks, group=group
        )
        if not response.workers:
            raise NotFound(
                f"the manager knows no live worker {worker_id!r}; `kvpool status` lists them", reason="UNKNOWN_WORKER"
            )
        worker = response.workers[0]
        pools = {pool.group: pool for pool in worker.kv_cache_config.pools if pool.tier == common_pb2.TIER_DEVICE}
        num_blocks = pools[group].num_blocks
        blocks |= {block.block_id: block for block in worker.blocks}
        first_block += page_blocks
        if first_block >= num_blocks:
            return BlockMap(
                worker_id=worker_id,
                block_size=worker.kv_cache_config.block_size,
                num_blocks=num_blocks,
                blocks=tuple(blocks[block_id] for block_id in sorted(blocks)),
                group=group,
                num_groups=len(pools),
                spec=worker.kv_cache_config.groups[group],
            )


def num_device_blocks(worker: cache_pb2.WorkerDescription) -> int:
    """Count the blocks of the device tier over all groups, null blocks included."""
    return sum(pool.num_blocks for pool in worker.kv_cache_config.pools if pool.tier == common_pb2.TIER_DEVICE)


def sequence_blocks(worker: cache_pb2.WorkerDescription) -> int:
    """Count the blocks that sequences can have in each group: those of the smallest pool, without its null block. Groups with a
    window, a state or cross attention do not count beside others: a sequence needs few blocks there, however long it is."""
    config = worker.kv_cache_config
    pools = [pool for pool in config.pools if pool.tier == common_pb2.TIER_DEVICE]
    full = [pool for pool in pools if config.groups[pool.group].WhichOneof("spec") == "full_attention"]
    return min((pool.num_blocks for pool in full or pools), default=1) - 1
