"""Units: the KV of an encoder's output, to which the layers of a decoder attend.

A unit is all the KV of one encoder's input on one worker: ⌈tokens / block size⌉ blocks of the group with cross attention. It is
computed at once, when the encoder runs, and is whole or not at all: its blocks are sealed, shared, cached and evicted together. The
root of a sequence names the input by its SHA-256, so all sequences under one root need the same unit, and it belongs to the root
(`RootNode.input_blocks`), not to a node of a prefix. It takes no part in a hit: where it is gone the encoder runs again, and the
decoder's prefix is cached all the same.

What a sequence's table in that group is:

    Allocate, the root has a unit here      its blocks, pinned: `encoder_cached`
    Allocate, a sequence here computes it   nothing: wait for it
    Allocate, else                          fresh blocks, unsealed; the sequence is a leader of the root
    encoder_computed                        sealed, the root's unit; if the root has one by then, it stays the sequence's own
    the end                                 released as a whole; an own one becomes the root's if that has none, else it is free
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from ..block_pool import CACHED, FREE, RESERVED, BlockPool, State
from ..messages import (
    DIGEST_BYTES,
    AllocateItem,
    GroupSpec,
    Limits,
    ReportedSequence,
    ReportedUnit,
    ReservedBlock,
    SequenceUpdate,
    Wait,
)
from ..prefix_tree import Node, PrefixTree, RootNode
from ..refusal import Reason, Refusal, bad_field
from ..restored import Case, Restored, refuse, refuse_twice
from ..sequence import Sequence
from .group import Problem, SessionGroup, of_slot
from .unit_pool import UnitPool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec(GroupSpec):
    """How a worker introduces layers with cross attention."""

    max_encoder_tokens: int
    """Tokens of the longest input of the encoder."""

    def check(self, field: str, specs: tuple[GroupSpec, ...], block_size: int, limits: Limits) -> None:
        most = limits.max_tokens_per_sequence
        if not 1 <= self.max_encoder_tokens <= most:
            raise bad_field(
                f"{field}.cross_attention.max_encoder_tokens", f"needed 1 to {most}, got {self.max_encoder_tokens}"
            )
        num_others = sum(not isinstance(spec, UnitSpec) for spec in specs)
        if num_others < len(specs) - 1:
            raise bad_field(
                f"{field}.cross_attention",
                "at most one group may have cross attention: all of its layers see the same encoder",
            )
        if not num_others:
            raise bad_field(f"{field}.cross_attention", "needed another group, for the KV of the decoder's own tokens")


class UnitSessionGroup(SessionGroup):
    """A group with cross attention."""

    holds_nodes = False
    pool_type = UnitPool

    spec: UnitSpec
    pool: UnitPool

    def __init__(self, spec: UnitSpec, pool: BlockPool, block_size: int) -> None:
        super().__init__(spec, pool, block_size)
        self.longest_input = min(spec.max_encoder_tokens, pool.capacity * block_size)

    # -- Allocate

    def check_item(self, item: AllocateItem, num_blocks: int, worker_id: str) -> None:
        most = self.spec.max_encoder_tokens
        if not 1 <= item.num_encoder_tokens <= most:
            raise bad_field(
                "num_encoder_tokens", f"worker {worker_id!r} takes 1 to {most}, got {item.num_encoder_tokens}"
            )
        if len(item.root.input_digest) != DIGEST_BYTES:
            raise bad_field(
                "root.input_digest", "needed the SHA-256 of the encoder's input, which the sequence refers to"
            )
        needed = self._num_blocks(item)
        if needed > self.pool.capacity:
            raise Refusal(
                Reason.NEVER_FITS,
                f"{item.num_encoder_tokens} tokens of an encoder's input need {needed} blocks of {self.block_size} of group "
                f"{self.slot}; the whole pool of worker {worker_id!r} has {self.pool.capacity}: shorten the input, or give "
                "the group more blocks (--cross-blocks)",
                field="num_encoder_tokens",
            )

    def _num_blocks(self, item: AllocateItem) -> int:
        """Blocks of the unit that the sequence needs."""
        return -(-item.num_encoder_tokens // self.block_size)

    def check_length(self, item: AllocateItem, num_blocks: int) -> None:
        """Refuse a sequence whose input, by its digest, is one that is known with another length."""
        if num_blocks != self._num_blocks(item):
            raise bad_field(
                "num_encoder_tokens",
                f"{item.num_encoder_tokens} tokens need {self._num_blocks(item)} blocks, but the KV of the input with this digest "
                f"is known in {num_blocks}: equal digests are of equal inputs",
            )

    def hit(self, item: AllocateItem, root: RootNode | None, path: List[Node], num: int) -> list[int]:
        """The unit that the sequence needs, if this worker holds it and the item wants to be served from the cache."""
        blocks = () if root is None or item.max_cached_tokens == 0 else self.pool.unit(root)
        if blocks:
            self.check_length(item, len(blocks))
        return list(blocks)

    def in_flight(self, item: AllocateItem, root: RootNode | None, hit: List[int]) -> Wait | None:
        """A sequence of this worker that is about to run the encoder over the same input."""
        for leader in root.iter_leaders() if root is not None and not hit else ():
            is_here = leader.holder is self.pool.holder and not leader.fenced
            if is_here and leader.key.sequence_id != item.key.sequence_id:
                return Wait(leader.key, 0)
        return None

    def num_wanted(self, item: AllocateItem, num_hits: int, hit: List[int]) -> int:
        return 0 if hit else self._num_blocks(item)

    def enter(self, sequence: Sequence, fresh: list[int], num_hits: int) -> None:
        super().enter(sequence, fresh, num_hits)
        sequence.num_named[self.slot] = len(sequence.tables[self.slot])
        self.lead(sequence, is_cached=not fresh)

    def lead(self, sequence: Sequence, *, is_cached: bool) -> None:
        """The sequence has got its table: a pinned unit, or fresh blocks for one."""
        sequence.encoder_computed = is_cached
        if not is_cached:
            sequence.root.add_leader(sequence)

    # -- Append and Free

    def check(self, sequence: Sequence, update: SequenceUpdate, num_computed_tokens: int) -> None:
        """Refuse tokens that are computed without the encoder, and a unit that the sequence cannot have."""
        is_computed = sequence.encoder_computed or update.encoder_computed
        if num_computed_tokens > sequence.num_cached_tokens and not is_computed:
            raise bad_field(
                "encoder_computed",
                f"{num_computed_tokens} tokens are computed, {sequence.num_cached_tokens} of them cached; the others attend to "
                "the encoder's output, whose KV is not stated to be complete",
            )
        num_blocks = len(sequence.tables[self.slot])
        if any(entry.table_index >= num_blocks for entry in of_slot(update.bound, self.slot)):
            raise bad_field("bound", f"a table of group {self.slot}, which has cross attention, never grows")

    def apply(self, tree: PrefixTree, sequence: Sequence, update: SequenceUpdate) -> None:
        if update.encoder_computed and not sequence.encoder_computed:
            self.complete(sequence)

    def complete(self, sequence: Sequence) -> None:
        """The encoder's KV is complete: from now on it is the unit of the root, unless that has one."""
        sequence.encoder_computed = True
        sequence.root.drop_leader(sequence)
        self._seal(sequence)

    def _seal(self, sequence: Sequence) -> None:
        if not self.pool.unit(sequence.root):
            self.pool.seal_unit(sequence.tables[self.slot], sequence.root)

    def release(self, sequence: Sequence) -> None:
        if sequence.encoder_computed:
            self._seal(sequence)
        self.pool.release(*sequence.tables[self.slot])

    def leave(self, sequence: Sequence) -> None:
        """It is no leader of its root any more."""
        if not sequence.encoder_computed:
            sequence.root.drop_leader(sequence)

    # -- Fork

    def fork(self, parent: Sequence, num_shared: int) -> list[int]:
        """It is shared whole."""
        if not parent.encoder_computed:
            raise Refusal(
                Reason.GAP,
                f"{parent.key.sequence_id!r} is not known to have the encoder's output: Append what it has computed first",
                position=0,
            )
        return list(parent.tables[self.slot])

    # -- Report

    def restore_unit(self, tree: PrefixTree, restored: Restored, unit: ReportedUnit, is_live: bool) -> None:
        blocks = [one.block for one in unit.blocks]
        most = -(-self.spec.max_encoder_tokens // self.block_size)
        if not 1 <= len(blocks) <= most:
            refuse("units", f"a unit has 1 to {most} blocks, got {len(blocks)}")
        if len(unit.root.input_digest) != DIGEST_BYTES:
            refuse("units", "a unit needs the SHA-256 of the encoder's input")
        if len(set(blocks)) < len(blocks) or not restored.units.keys().isdisjoint(blocks):
            refuse("units", f"one of the blocks {blocks} of a unit is reported twice")
        for block, generation in unit.blocks:
            restored.require_known(block, generation)
        is_there = self.pool.is_expected if is_live else self.pool.is_free
        if not all(is_there(block) and block not in restored.blocks for block in blocks):
            if not is_live:
                refuse_twice(blocks[0])
            restored.cases[Case.GRANTED_SINCE] += len(blocks)
            return
        root = tree.intern_root(unit.root, self.block_size)
        restored.units.update(dict.fromkeys(blocks, (root, unit)))
        is_first = not self.pool.unit(root)  # else another one serves hits
        if is_first:
            self.pool.restore_unit(unit.blocks, root)
        restored.cases[Case.CACHED if is_first else Case.DUPLICATE] += len(blocks)

    def check_reported(
        self, restored: Restored, reported: ReportedSequence, root: RootNode, path: List[Node], num_sealed: int
    ) -> None:
        table, name = reported.tables[self.slot], f"sequence {reported.key.sequence_id!r}"
        most = -(-self.spec.max_encoder_tokens // self.block_size)
        if not 1 <= len(table) <= most:
            refuse("sequences", f"{name}: needed 1 to {most} blocks for the encoder's input, got {len(table)}")
        if len({entry.block for entry in table}) < len(table):
            refuse("sequences", f"{name}: a block is twice in its unit")
        if reported.num_computed_tokens > reported.num_cached_tokens and not reported.encoder_computed:
            refuse("sequences", f"{name}: tokens are computed without the encoder's output")
        if any(entry.block in restored.units for entry in table):
            of, unit = restored.units.get(table[0].block, (None, None))
            stated = [ReservedBlock(entry.block, entry.generation) for entry in table]
            if unit is None or of is not root or not reported.encoder_computed or list(unit.blocks) != stated:
                refuse("sequences", f"{name}: its unit is not one that the report states to be complete under its root")
        for _, block, generation in table:
            if block not in restored.units:
                restored.require_free(block, generation)

    def restore(
        self, tree: PrefixTree, restored: Restored, sequence: Sequence, reported: ReportedSequence, num_sealed: int
    ) -> None:
        """A unit that was restored, or blocks of its own."""
        pool, stated = self.pool, reported.tables[self.slot]
        table = [entry.block for entry in stated]
        sequence.tables[self.slot], sequence.num_named[self.slot] = table, len(table)
        if tuple(table) == pool.unit(sequence.root):
            restored.cases[Case.HELD_SEALED if pool.is_cached(table[0]) else Case.SHARED] += len(table)
            pool.pin(*table)
            self.lead(sequence, is_cached=True)
            return
        if pool.is_free(table[0]):
            pool.restore_held([ReservedBlock(block, generation) for _, block, generation in stated])
        else:  # of a sequence and its forks
            pool.pin(*table)
        self.lead(sequence, is_cached=False)
        if reported.encoder_computed:
            self.complete(sequence)
        restored.cases[Case.HELD_SEALED if reported.encoder_computed else Case.HELD_FILLING] += len(table)

    # -- displays

    def unsealed(self, sequence: Sequence) -> List[int]:
        table = self.blocks(sequence)
        return table if self.pool.node(table[0]) is None else []

    def token_count(self, sequence: Sequence, index: int) -> int:
        return self.block_size if sequence.encoder_computed else 0

    def table_index(self, block: int, node: Node) -> int:
        return self.pool.unit_with(block).index(block)

    def prefix(self, block: int, node: Node) -> list[int]:
        return list(self.pool.unit_with(block)[: self.table_index(block, node) + 1])

    # -- Check

    def violations(self, sequence: Sequence) -> Iterator[Problem]:
        """A table is the unit of the root, or all of it is the sequence's own and its forks'."""
        pool, table = self.pool, sequence.tables[self.slot]
        unit = pool.unit(sequence.root)
        if not table:
            yield "unit", "a sequence has no unit", -1
        is_sealed = bool(table) and pool.node(table[0]) is not None
        if is_sealed and (tuple(table) != unit or not sequence.encoder_computed):
            message = (
                f"the table {table} is not the unit of the sequence's root, {list(unit)}, or not known to be computed"
            )
            yield "unit", message, table[0]
        num_holders = pool.ref_count(table[0]) if table and sequence.encoder_computed else 1
        for block in table:
            if not 0 < block < pool.num_blocks:
                yield "null block", f"a unit names block {block}", block
            elif (pool.node(block) is not None) != is_sealed or pool.ref_count(block) != num_holders:
                message = f"block {block} of a unit is not as its first block {table[0]}, or others have it before it is computed"
                yield "unit", message, block
        if sequence.num_computed_tokens > sequence.num_cached_tokens and not sequence.encoder_computed:
            yield "unit", "tokens are computed without the encoder's output", -1
        if sequence.root.is_led_by(sequence) == sequence.encoder_computed:
            yield "unit", "the root and the sequence disagree who computes the unit", -1

    def violations_at(self, block: int, state: int, ref_count: int, node: Node | None) -> Iterator[Problem]:
        if node is None:
            if state == CACHED:
                yield "state", f"block {block} is cached and serves no hits", block
        elif state in (FREE, RESERVED):
            yield "unit", f"block {block} is {State(state).name.lower()} and still part of a unit", block
        elif not isinstance(node, RootNode) or block not in self.pool.unit(node):
            yield "unit", f"block {block} holds part of a unit that its root does not know", block

    def violations_of_input(self, root: RootNode) -> Iterator[Problem]:
        """A unit is in distinct blocks that hold it, all in the same state, of as many sequences."""
        pool, blocks = self.pool, self.pool.unit(root)
        if not blocks or len(set(blocks)) < len(blocks):
            yield "unit", f"{root!r} has the unit {list(blocks)}", -1
        looks = [(pool.state(block), pool.ref_count(block)) for block in blocks]
        for block, (state, ref_count) in zip(blocks, looks, strict=True):
            if pool.node(block) is not root:
                yield "unit", f"block {block} of a unit does not hold the input of its root", block
            elif (state, ref_count) != looks[0]:
                message = (
                    f"block {block} of a unit is {state.name.lower()} with ref_count {ref_count}, its first block {blocks[0]} is "
                    f"{looks[0][0].name.lower()} with {looks[0][1]}"
                )
                yield "unit", message, block
        is_cached = bool(looks) and looks[0][0] is State.CACHED
        if is_cached != pool.may_evict(root):
            message = f"a unit is {'' if is_cached else 'not '}cached, and the order of eviction says otherwise"
            yield "unit", message, blocks[0] if blocks else -1

    def violations_of_listed(self) -> Iterator[Problem | None]:
        for root in self.pool.cached_units():
            is_wrong = self.pool.may_evict(root) and not self.pool.unit(root)
            yield ("unit", f"{root!r} is in the order of eviction and has no unit", -1) if is_wrong else None
