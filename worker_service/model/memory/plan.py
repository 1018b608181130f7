"""Use of a device's memory, and the size of the KV cache that fits: arithmetic on measured facts, all in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...cache.groups.state import SCRATCH_BLOCKS, grid_tokens
from ...cache.groups.window import ring_blocks, span
from ..errors import KVCacheTooLarge, ModelError
from ..forward.kv_plan import CrossPlan, GroupPlan, KVCachePlan, StatesPlan, show_bytes, size_setting
from ..settings import MemorySettings
from .split import KEPT_STATES, KEPT_WINDOWS, Split

SHARE_OF_FREE_CPU_MEMORY = 0.2
"""Share of the memory that is free once the weights are loaded. Small, because other workers, programs and the page cache use the
machine's memory too."""
_MIN_BLOCKS = 2
"""The null block and a usable one."""
_UTILIZATION_STEPS = 1000
"""Recommended shares of a GPU are multiples of a thousandth."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Facts of a device and a model before a KV cache is allocated."""

    device: str
    """cpu or cuda:N."""
    total_bytes: int
    """Memory of the device; on a CPU of the machine or the container."""
    other_bytes: int
    """Memory in use, except by this model's tensors: other processes, and on a GPU the driver."""
    weight_bytes: int
    activation_bytes: int
    """Largest sum of intermediate results in a maximum batch."""
    bytes_per_token: int
    """K and V of all layers."""
    state_bytes: int = 0
    """The states of all recurrent layers for one sequence."""
    workspace_bytes_per_token: int = 0
    """Attention's workspace for each token that a step of decodes reads; 0 for kernels that read blocks in place."""
    activations_from: str = "measured"
    """Origin of activation_bytes: measured, or estimated and from what."""

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def free_bytes(self) -> int:
        """Memory that is free once the weights are loaded."""
        return max(0, self.total_bytes - self.other_bytes - self.weight_bytes)

    @property
    def room_bytes(self) -> int:
        """The upper limit of a KV cache: free memory less the needs of a step."""
        return max(0, self.free_bytes - self.activation_bytes)


class BudgetLine(NamedTuple):
    what: str
    num_bytes: int
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {show_bytes(self.num_bytes)}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Use of a device's memory."""

    facts: MemoryFacts
    settings: MemorySettings
    kv_cache: KVCachePlan

    def lines(self) -> Iterator[BudgetLine]:
        """The lines of the sum, from the device's memory down to what stays free."""
        facts, settings, kv_cache = self.facts, self.settings, self.kv_cache
        yield BudgetLine(f"memory of {facts.device}", facts.total_bytes)
        if not facts.is_cpu and not settings.is_explicit:
            usable = _usable_bytes(facts, settings.gpu_memory_utilization)
            yield BudgetLine("may be used", usable, f"--gpu-memory-utilization {settings.gpu_memory_utilization:g}")
        others = "other processes, page cache left out" if facts.is_cpu else "other processes and the driver"
        yield BudgetLine("in use already", facts.other_bytes, others)
        yield BudgetLine("weights", facts.weight_bytes)
        if facts.is_cpu:
            yield BudgetLine("free with the weights loaded", facts.free_bytes)
        batch = f"{settings.max_num_batched_tokens:,} tokens of {settings.max_num_seqs:,} sequences"
        yield BudgetLine("activations of a maximum batch", facts.activation_bytes, f"{batch}, {facts.activations_from}")
        yield BudgetLine("graphs", 0, "none are captured")
        if workspace := _workspace_bytes(facts, kv_cache):
            per_token = f"{show_bytes(facts.workspace_bytes_per_token)} for each token that a step reads"
            yield BudgetLine("attention's workspace", workspace, per_token)
        if kv_cache.has_one_group:
            pool = kv_cache.only_pool
            blocks = f"{pool.num_blocks:,} blocks of {show_bytes(pool.bytes_per_block)}, {self._size_from()}"
            yield BudgetLine("KV cache", kv_cache.total_bytes, blocks)
        else:
            pools = list(kv_cache.pools())
            groups = f"{len(pools)} groups" if len(pools) > 1 else "one group"
            yield BudgetLine("KV cache", kv_cache.total_bytes, f"{groups}, {self._size_from()}")
            for pool in pools:
                blocks = f"{pool.num_blocks:,} blocks of {show_bytes(pool.bytes_per_block)}{self._why(pool.index)}"
                yield BudgetLine(f"· group {pool.index}, {pool.what}", pool.total_bytes, blocks)
        yield BudgetLine("left over", facts.room_bytes - kv_cache.total_bytes - workspace)

    def _why(self, index: int) -> str:
        """Where the number of blocks of a group comes from, if it is not what remains."""
        plan, settings, size = self.kv_cache, self.settings, self.kv_cache.block_size
        if index < len(plan.groups):
            group = plan.groups[index]
            if group.window is None:
                return ""
            if settings.window_blocks is not None:
                return ", --window-blocks"
            grid = 1 if plan.states is None else grid_tokens(size) // size
            ring, kept = ring_blocks(group.window, plan.chunk_tokens or 0, size, grid), span(group.window, size)
            num_sequences = group.capacity // (ring + KEPT_WINDOWS * kept)
            return f": for {num_sequences} sequences {ring} each, and {KEPT_WINDOWS} windows of {kept} that are kept"
        if (states := plan.states) is not None:
            if settings.state_blocks is not None:
                return ", --state-blocks"
            num_sequences = states.capacity // (SCRATCH_BLOCKS + KEPT_STATES)
            return f": for {num_sequences} sequences {SCRATCH_BLOCKS} each, and {KEPT_STATES} that are kept"
        assert plan.cross is not None, "the group after those of layers and states"
        if settings.cross_blocks is not None:
            return ", --cross-blocks"
        num_inputs = plan.cross.capacity // plan.cross.blocks_per_input(size)
        return f": for {num_inputs} inputs of {plan.cross.max_tokens:,} tokens"

    def _size_from(self) -> str:
        if self.settings.num_blocks is not None:
            return "--num-blocks"
        if self.settings.kv_cache_memory is not None:
            return "--kv-cache-memory"
        if self.facts.is_cpu:
            return f"{SHARE_OF_FREE_CPU_MEMORY:.0%} of the free memory: other programs share it"
        return "the rest of what may be used"


def plan_memory(
    facts: MemoryFacts,
    settings: MemorySettings,
    groups: Sequence[GroupPlan] | None = None,
    cross: CrossPlan | None = None,
) -> MemoryBudget:
    """The KV cache of the given number of blocks or bytes (at most one of them), else as large as the share allows.

    groups: the groups of layers, see Split; None: one group that keeps everything. cross: the cross group of an encoder-decoder
    model. Raises ModelError for contradictory settings, and KVCacheTooLarge with the largest cache that fits.
    """
    block_size = settings.block_size
    if block_size < 1 or block_size & (block_size - 1):
        raise ModelError(f"The block size must be a power of two, not {block_size}.")
    if settings.num_blocks is not None and settings.kv_cache_memory is not None:
        raise ModelError("Give the size of the KV cache as a number of blocks or in bytes, not both.")
    if groups is None:
        groups = [GroupPlan(0, None, 0, facts.bytes_per_token)]
    states = StatesPlan(settings.state_blocks or 0, facts.state_bytes) if facts.state_bytes else None
    if settings.state_blocks is not None and states is None:
        raise ModelError("This model has no recurrent layers: leave out --state-blocks.")
    if settings.window_blocks is not None and all(group.window is None for group in groups):
        raise ModelError("This model's layers have no sliding window: leave out --window-blocks.")
    if settings.cross_blocks is not None and cross is None:
        raise ModelError("This model has no encoder: leave out --cross-blocks.")
    split = Split(groups, settings, states, cross)
    if settings.num_blocks is not None:
        plan = split.of_blocks(settings.num_blocks)
    elif settings.kv_cache_memory is not None:
        plan = split.of_bytes(settings.kv_cache_memory)
    else:
        plan = split.of_bytes(_budget_bytes(facts, settings), facts.workspace_bytes_per_token)
    smallest = min(_nums_of_blocks(plan))
    if smallest < _MIN_BLOCKS:
        raise _too_small(facts, settings, smallest, plan.cross)
    if plan.total_bytes + _workspace_bytes(facts, plan) > facts.room_bytes:
        raise _too_large(facts, plan, split.of_bytes(facts.room_bytes, facts.workspace_bytes_per_token))
    return MemoryBudget(facts, settings, plan)


def _workspace_bytes(facts: MemoryFacts, plan: KVCachePlan) -> int:
    """Bytes of attention's workspace, if a step reads all that the cache holds."""
    most = max([group.num_blocks for group in plan.groups], default=0)
    if plan.cross is not None:
        most = max(most, plan.cross.num_blocks)
    return plan.block_size * facts.workspace_bytes_per_token * most


def _nums_of_blocks(plan: KVCachePlan) -> list[int]:
    """Blocks of each group, the null block included."""
    return [pool.num_blocks for pool in plan.pools()]


def _block_cost(facts: MemoryFacts, block_size: int) -> int:
    """Bytes of one block in every group together, with attention's workspace."""
    return block_size * (facts.bytes_per_token + facts.workspace_bytes_per_token) + facts.state_bytes


def _usable_bytes(facts: MemoryFacts, utilization: float) -> int:
    return min(facts.total_bytes, math.floor(facts.total_bytes * utilization))


def _budget_bytes(facts: MemoryFacts, settings: MemorySettings) -> int:
    """Limit of KV cache and attention's workspace together; below 0 if other needs exceed the share."""
    if facts.is_cpu:
        return min(facts.room_bytes, math.floor(facts.free_bytes * SHARE_OF_FREE_CPU_MEMORY))
    needed = facts.other_bytes + facts.weight_bytes + facts.activation_bytes
    return _usable_bytes(facts, settings.gpu_memory_utilization) - needed


def _too_small(facts: MemoryFacts, settings: MemorySettings, num_blocks: int, cross: CrossPlan | None) -> ModelError:
    if cross is not None and num_blocks < cross.num_blocks:
        size = show_bytes(cross.total_bytes(settings.block_size))
        return KVCacheTooLarge(
            f"The KV of encoders' outputs takes {size} ({cross.num_blocks} blocks for inputs of {cross.max_tokens} tokens), which "
            f"leaves nothing for the decoder's, and {_what_there_is(facts)}. Give a larger --kv-cache-memory, or a smaller "
            "--max-encoder-tokens, --max-num-seqs or --cross-blocks."
        )
    smallest = _MIN_BLOCKS * (settings.block_size * facts.bytes_per_token + facts.state_bytes)
    needs = (
        f"at least {_MIN_BLOCKS} are needed (block 0 stays empty), {show_bytes(smallest)} at "
        f"{show_bytes(smallest // _MIN_BLOCKS)} per block of {settings.block_size} tokens"
    )
    if settings.is_explicit:
        return ModelError(
            f"A KV cache of {num_blocks} blocks is too small: {needs}. Give a larger --kv-cache-memory or --num-blocks, or "
            "a smaller --block-size."
        )
    memory = _what_there_is(facts)
    utilization = None if facts.is_cpu else _least_utilization(facts, settings)
    if utilization is not None:
        return KVCacheTooLarge(
            f"With --gpu-memory-utilization {settings.gpu_memory_utilization:g} no KV cache fits on {facts.device}: {needs}, but "
            f"{memory}. Give --gpu-memory-utilization {utilization:g} or more."
        )
    if facts.room_bytes >= _MIN_BLOCKS * _block_cost(facts, settings.block_size):
        return KVCacheTooLarge(
            f"A fifth of the free memory of {facts.device} holds no KV cache: {needs}, and {memory}. Give --kv-cache-memory or "
            "--num-blocks, or free memory."
        )
    return KVCacheTooLarge(
        f"No KV cache fits on {facts.device}: {needs}, but {memory}. Give a smaller --max-num-batched-tokens or --max-num-seqs, "
        "end other processes, or take a smaller model or a device with more memory."
    )


def _least_utilization(facts: MemoryFacts, settings: MemorySettings) -> float | None:
    """The smallest share, a multiple of a thousandth, with which the smallest KV cache fits; None if it does not fit at all."""
    needed = facts.other_bytes + facts.weight_bytes + facts.activation_bytes
    needed += _MIN_BLOCKS * _block_cost(facts, settings.block_size)
    steps = -(-needed * _UTILIZATION_STEPS // facts.total_bytes)
    while steps <= _UTILIZATION_STEPS:
        # Rounding may cost a byte.
        if _usable_bytes(facts, steps / _UTILIZATION_STEPS) >= needed:
            return steps / _UTILIZATION_STEPS
        steps += 1
    return None


def _too_large(facts: MemoryFacts, plan: KVCachePlan, fitting: KVCachePlan) -> KVCacheTooLarge:
    asked = f"A KV cache of {_blocks_of(plan)} blocks needs {show_bytes(plan.total_bytes)}"
    if workspace := _workspace_bytes(facts, plan):
        asked += f" and {show_bytes(workspace)} for attention over it"
    if min(_nums_of_blocks(fitting)) < _MIN_BLOCKS:
        return KVCacheTooLarge(
            f"{asked}, but none fits on {facts.device}: {_what_there_is(facts)}. Give a smaller --max-num-batched-tokens or "
            "--max-num-seqs, end other processes, or take a smaller model or a device with more memory."
        )
    return KVCacheTooLarge(
        f"{asked}, but {facts.device} has room for {show_bytes(facts.room_bytes)}: {_what_there_is(facts)}. At most "
        f"{_blocks_of(fitting)} blocks fit (--num-blocks {_nums_of_blocks(fitting)[0]}, or --kv-cache-memory "
        f"{size_setting(fitting.total_bytes)})."
    )


def _blocks_of(plan: KVCachePlan) -> str:
    return " + ".join(map(str, _nums_of_blocks(plan)))


def _what_there_is(facts: MemoryFacts) -> str:
    return (
        f"of {show_bytes(facts.total_bytes)}, {show_bytes(facts.other_bytes)} are in use already, "
        f"{show_bytes(facts.weight_bytes)} are needed for the weights and {show_bytes(facts.activation_bytes)} "
        "for a maximum batch"
    )
