"""The size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Size of a KV cache before anything is allocated."""

    num_blocks: int
    """Including the null block."""
    block_size: int
    """Tokens per block."""
    bytes_per_token: int
    """K and V of all layers."""

    @property
    def capacity(self) -> int:
        """Blocks that can hold KV."""
        return self.num_blocks - 1

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def concurrency(self, num_tokens: int) -> float:
        """Number of sequences of `num_tokens` that the cache holds at once, if they share nothing."""
        return self.capacity / -(-num_tokens // self.block_size)

    def describe(self, max_model_len: int) -> str:
        """One line for the log."""
        tokens = self.capacity * self.block_size
        return (
            f"KV cache: {show_bytes(self.total_bytes)}, {self.capacity:,} blocks of {self.block_size} tokens = {tokens:,} "
            f"tokens; at {max_model_len:,} tokens per sequence {self.concurrency(max_model_len):.2f} at once"
        )


def size_setting(count: int) -> str:
    """As a setting takes it, e.g. 16.9GiB: three digits, rounded down, so that it fits where `count` bytes do."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            num_decimals = max(0, 3 - len(str(count // size)))
            return f"{count * 10**num_decimals // size / 10**num_decimals:g}{unit}"
    return str(count)


def show_bytes(count: int) -> str:
    """In binary units with two decimals."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
