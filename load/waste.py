"""Measures how much of the KV cache that sequences hold is wasted, while they run.

    waste = (held slots − slots assigned to a token) / held slots

Held blocks are those in the tables of live sequences, shared ones counted once, and those that a sequence has taken out of its
worker's reserve but no Append has named yet; the length of the sequence shows their number. A slot is assigned if a token of a
sequence has its place there: the whole prompt from admission on, then each generated token. The rest of the reserve is granted to
the worker and bound to no sequence; it is reported too, as a share of the held slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpool.client.block_map import BlockMap
from kvpool.v1 import cache_pb2


class WasteSample(NamedTuple):
    """Blocks of all workers at one moment."""

    num_held_slots: int
    num_assigned_slots: int
    num_reserved_slots: int
    """Slots of blocks that are granted ahead of need, and still bound to no sequence."""


class Waste(NamedTuple):
    """The waste over all samples, weighted by their held slots."""

    num_samples: int
    """Number of samples with held slots."""
    waste: float
    waste_max: float
    """The largest waste of a single sample."""
    reserve: float
    """Slots of the unbound reserve, as a share of the held ones."""


def waste_of(block_map: BlockMap, lengths: Mapping[str, int]) -> WasteSample:
    """Count the slots of one worker. `lengths` has the tokens of each sequence, prompt and answer so far, by its sequence_id; for
    sequences that it lacks, the manager's own counts are used."""
    block_size = block_map.block_size
    num_blocks = num_assigned = num_reserved = 0
    table_blocks: dict[str, int] = {}
    for block in block_map.blocks:
        if block.state == cache_pb2.BLOCK_STATE_RESERVED:
            num_reserved += 1
        if block.state != cache_pb2.BLOCK_STATE_HELD:
            continue
        num_blocks += 1
        num_assigned += block_size if block.sealed else _assigned(block, block_size, lengths)
        for owner in block.owners:
            length = table_blocks.get(owner.sequence_id, 0)
            table_blocks[owner.sequence_id] = max(length, block.table_index + 1)
    for sequence_id, in_table in table_blocks.items():
        beyond = lengths.get(sequence_id, 0) - in_table * block_size
        num_bound = min(-(-max(beyond, 0) // block_size), num_reserved)
        num_blocks += num_bound
        num_reserved -= num_bound
        num_assigned += min(max(beyond, 0), num_bound * block_size)
    return WasteSample(num_blocks * block_size, num_assigned, num_reserved * block_size)


def _assigned(block: cache_pb2.BlockDescription, block_size: int, lengths: Mapping[str, int]) -> int:
    """Count the assigned slots of an unsealed block, which has one owner."""
    owner_lengths = [lengths[owner.sequence_id] for owner in block.owners if owner.sequence_id in lengths]
    if not owner_lengths:
        return block.token_count
    return min(max(max(owner_lengths) - block.table_index * block_size, 0), block_size)


def summarise(samples: Sequence[WasteSample]) -> Waste | None:
    """Summarise the samples; None: no sample has held slots."""
    samples = [sample for sample in samples if sample.num_held_slots]
    if not samples:
        return None
    num_held = sum(sample.num_held_slots for sample in samples)
    return Waste(
        num_samples=len(samples),
        waste=1 - sum(sample.num_assigned_slots for sample in samples) / num_held,
        waste_max=max(1 - sample.num_assigned_slots / sample.num_held_slots for sample in samples),
        reserve=sum(sample.num_reserved_slots for sample in samples) / num_held,
    )
