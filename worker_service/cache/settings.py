"""How the cache side behaves towards the manager."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Size of the pool, and how often and how much is said to the manager."""

    block_size: int = 16
    """Token slots of one block."""
    num_blocks: int = 1024
    """Blocks of the pool, the null block included."""
    report_seconds: float = 0.1
    """Filled blocks are reported at most this late, many in one call; sooner if another sequence waits for them."""
    reserve_seconds: float = 2.0
    """How many seconds of decoding the reserve should last without the manager."""
    prefix_wait_seconds: float = 10.0
    """How long a request waits for a prefix in flight that makes no progress, before it computes it itself."""
    no_blocks_retry_seconds: float = 1.0
    """When to ask again after NO_BLOCKS although nothing was given back; only a safeguard."""
    max_items_per_call: int = 256
    """Sequences in one call to the manager."""
    max_call_bytes: int = 8 << 20
    """Bytes of tokens and table entries, there and back, in one call; half of what gRPC is told to let through."""
