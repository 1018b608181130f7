"""The blocks of a worker as the manager describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpool.v1 import cache_pb2, common_pb2

from .client import Client
from .errors import NotFound

PAGE_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class BlockMap:
    """All blocks of the pool of one worker's group, as the manager described them page by page."""

    worker_id: str
    """Whose blocks they are."""
    block_size: int
    """Token slots of a block."""
    num_blocks: int
    """Blocks of the pool, the null block included."""
    blocks: tuple[cache_pb2.BlockDescription, ...]
    """In order of block_id. The null block may be missing."""
    group: int = 0
    num_groups: int = 1
    """Of the worker."""
    window_tokens: int = 0
    """Tokens that the group's layers see; 0: all."""
    has_states: bool = False
    """Its layers are recurrent: a block has their state after a number of tokens."""
    max_encoder_tokens: int = 0
    """With cross attention: tokens of the longest input of the encoder; 0: the group has the decoder's own KV."""


async def fetch_block_maps(client: Client, worker_id: str) -> list[BlockMap]:
    """Those of all groups of a worker. NotFound as below."""
    first = await fetch_block_map(client, worker_id)
    return [first, *[await fetch_block_map(client, worker_id, group=group) for group in range(1, first.num_groups)]]


async def fetch_block_map(
    client: Client, worker_id: str, page_blocks: int = PAGE_BLOCKS, *, group: int = 0
) -> BlockMap:
    """Page through Describe, `page_blocks` at a time, at most PAGE_BLOCKS. Pages are taken one after the other, so blocks may
    change between them. NotFound if the worker is not there."""
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
                window_tokens=worker.kv_cache_config.groups[group].sliding_window.window_tokens,
                has_states=worker.kv_cache_config.groups[group].HasField("state"),
                max_encoder_tokens=worker.kv_cache_config.groups[group].cross_attention.max_encoder_tokens,
            )


def num_device_blocks(worker: cache_pb2.WorkerDescription) -> int:
    """Blocks of the device tier, over all groups, null blocks included."""
    return sum(pool.num_blocks for pool in worker.kv_cache_config.pools if pool.tier == common_pb2.TIER_DEVICE)


def sequence_blocks(worker: cache_pb2.WorkerDescription) -> int:
    """Blocks of each group that sequences can have: those of the smallest pool, without its null block. Of groups with a window
    or a state a sequence needs a few only, however long it is, and of cross attention those of the encoder's input."""
    config = worker.kv_cache_config
    pools = [pool for pool in config.pools if pool.tier == common_pb2.TIER_DEVICE]
    full = [pool for pool in pools if config.groups[pool.group].WhichOneof("spec") == "full_attention"]
    return min((pool.num_blocks for pool in full or pools), default=1) - 1
