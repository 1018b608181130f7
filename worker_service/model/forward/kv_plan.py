"""The size of a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


class _Pool:
    """Blocks of a group, of whatever kind."""

    __slots__ = ()
    num_blocks: int
    """Blocks, the null block included; 0: not planned yet."""

    @property
    def capacity(self) -> int:
        """Blocks that can hold something."""
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True)
class GroupPlan(_Pool):
    """Size of the KV of one group of layers, which have their blocks in common."""

    index: int
    window: int | None
    """Tokens that its layers see at most, the token itself included; None: full attention, all tokens are kept."""
    num_blocks: int
    bytes_per_token: int
    """K and V of its layers."""

    def blocks_per_sequence(self, num_tokens: int, block_size: int) -> int:
        """Blocks that the decodes of a sequence of `num_tokens` need at once: with a window those that it touches."""
        blocks = -(-num_tokens // block_size)
        # The tokens of a window begin and end anywhere in a block.
        return blocks if self.window is None else min(blocks, (self.window + block_size - 2) // block_size + 1)


@dataclass(frozen=True, slots=True)
class StatesPlan(_Pool):
    """Size of the states of recurrent layers: the last group of a model that has some. A block has the states of all of them."""

    num_blocks: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class CrossPlan(_Pool):
    """Size of the cross group: the KV of encoders' outputs, to which a decoder attends."""

    num_blocks: int
    bytes_per_token: int
    """K and V of all layers that attend to an encoder's output, for a token of the encoder's input."""
    max_tokens: int
    """Tokens of the encoder's longest input."""

    def total_bytes(self, block_size: int) -> int:
        return self.num_blocks * block_size * self.bytes_per_token

    def blocks_per_input(self, block_size: int) -> int:
        """Blocks of the longest input."""
        return -(-self.max_tokens // block_size)


@dataclass(frozen=True, slots=True)
class PoolSize(_Pool):
    """Blocks of one group, of whatever kind."""

    index: int
    what: str
    """What the group keeps, for users."""
    num_blocks: int
    bytes_per_block: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        blocks = f"{self.capacity:,} blocks of {show_bytes(self.bytes_per_block)}"
        return f"group {self.index} ({self.what}): {show_bytes(self.total_bytes)}, {blocks}"


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Size of a KV cache before anything is allocated."""

    block_size: int
    """Tokens per block, in all groups."""
    groups: tuple[GroupPlan, ...]
    """The groups of attention layers, by index; empty: no layer attends."""
    chunk_tokens: int | None = None
    """Most tokens of one sequence in one step, if a group has a window: its rings have room for no more."""
    states: StatesPlan | None = None
    """The group of the recurrent layers, which comes after all others; None: there are no recurrent layers."""
    cross: CrossPlan | None = None
    """The cross group of an encoder-decoder model, which comes after all others; None: there is no encoder. No model has both an
    encoder and recurrent layers."""

    def __post_init__(self) -> None:
        assert [group.index for group in self.groups] == list(range(len(self.groups))), self.groups
        assert self.groups or self.states, "a model has layers"

    @classmethod
    def one_group(
        cls,
        num_blocks: int,
        block_size: int,
        bytes_per_token: int,
        states: StatesPlan | None = None,
        cross: CrossPlan | None = None,
        *,
        attends: bool = True,
    ) -> Self:
        """A plan in which all attention layers keep all tokens, in the same blocks. attends: whether there are such layers."""
        groups = (GroupPlan(0, None, num_blocks, bytes_per_token),) if attends else ()
        return cls(block_size, groups, states=states, cross=cross)

    @property
    def has_one_group(self) -> bool:
        """Whether all layers attend and keep their KV in the same blocks."""
        return len(self.groups) == 1 and self.states is None and self.cross is None

    @property
    def only_pool(self) -> PoolSize:
        """The blocks of a plan that has one group."""
        (pool,) = self.pools()
        return pool

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def total_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.pools())

    def pools(self) -> Iterator[PoolSize]:
        """The sizes of all groups, in their order."""
        size = self.block_size
        for group in self.groups:
            sight = "full attention" if group.window is None else f"window {group.window:,}"
            yield PoolSize(group.index, sight, group.num_blocks, size * group.bytes_per_token)
        if self.states is not None:
            yield PoolSize(len(self.groups), "states", self.states.num_blocks, self.states.bytes_per_block)
        if (cross := self.cross) is not None:
            yield PoolSize(self.cross_index, "encoder's outputs", cross.num_blocks, size * cross.bytes_per_token)

    @property
    def cross_index(self) -> int:
        """Index of the cross group, if there is one."""
        return len(self.groups)

    def concurrency(self, num_tokens: int) -> float:
        """Number of sequences of `num_tokens` that the cache holds at once, if they share nothing."""
        each = [group.capacity / group.blocks_per_sequence(num_tokens, self.block_size) for group in self.groups]
        return min([*each, *([float(self.states.capacity)] if self.states else [])])

    def group_of(self, window: int | None) -> int:
        """Index of the group of a layer whose KV is seen through this window: the one of this window, or the one that keeps all."""
        for sight in (window, None):
            for group in self.groups:
                if group.window == sight:
                    return group.index
        raise AssertionError(f"no group keeps the tokens of a window of {window}: {self.groups}")

    def describe(self, max_model_len: int) -> str:
        """One line for the log, and one more for each group if there are several."""
        at_once = f"at {max_model_len:,} tokens per sequence {self.concurrency(max_model_len):.2f} at once"
        lines = list(map(str, self.pools()))
        if (cross := self.cross) is not None:
            num_inputs = cross.capacity // cross.blocks_per_input(self.block_size)
            lines[-1] += f", {num_inputs:,} inputs of {cross.max_tokens:,} tokens"
        if len(lines) > 1 or not self.groups:
            groups = f"{len(lines)} groups" if len(lines) > 1 else "one group"
            size = f"{show_bytes(self.total_bytes)} in {groups}, blocks of {self.block_size} tokens"
            return "\n".join([f"KV cache: {size}; {at_once}", *lines])
        capacity = self.only_pool.capacity
        tokens = capacity * self.block_size
        return (
            f"KV cache: {show_bytes(self.total_bytes)}, {capacity:,} blocks of {self.block_size} tokens = {tokens:,} "
            f"tokens; {at_once}"
        )


def size_setting(count: int) -> str:
    """Format bytes as a setting takes them, e.g. 16.9GiB: three digits, rounded down, so that it fits where `count` bytes do."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            num_decimals = max(0, 3 - len(str(count // size)))
            return f"{count * 10**num_decimals // size / 10**num_decimals:g}{unit}"
    return str(count)


def show_bytes(count: int) -> str:
    """Format bytes in binary units with two decimals, e.g. 1.50 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
