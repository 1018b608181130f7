"""The Register request of a benchmark's worker."""

from __future__ import annotations

from bench.replay import FINGERPRINT
from kvpool.v1 import cache_pb2, common_pb2


def register_request(worker_id: str, incarnation: int, block_size: int, num_blocks: int) -> cache_pb2.RegisterRequest:
    """A worker with one empty pool, which serves no texts."""
    config = common_pb2.KVCacheConfig(block_size=block_size)
    config.groups.add(group=0).full_attention.SetInParent()
    config.pools.add(group=0, tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)
    return cache_pb2.RegisterRequest(
        worker_id=worker_id,
        incarnation=incarnation,
        register_no=1,
        address="127.0.0.1:1",
        model_fingerprint=FINGERPRINT,
        kv_cache_config=config,
    )
