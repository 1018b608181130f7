"""The blocks of one group of a worker's session, as a struct of arrays, and the free list that is also the prefix cache.

The free list is an intrusive doubly linked list through `_next` and `_previous`; block 0, the null block, is its sentinel. Its
head is granted next. Every operation is O(1) in the number of blocks. A block on the list is *free* (holds nothing) or *cached*
(sealed, still a hit); all free ones come before all cached ones, and of these the *demoted* ones are taken first. Off the list it
is *reserved* (granted, bound to no sequence) or *held* (ref_count sequences have it).

The pool keeps its own counts and states; it does not know sequences. Only `seal`, `take` and `release` change the tree and the pool
together.

A pool is declared with any number of blocks, and grows as they are granted. There are records of the first `num_known` blocks; the
last of these represents itself and all blocks after it on the free list; before it is granted, records of the next ones are made.
So the blocks above `last_granted` are together on the list, in ascending order. As many of them as the session's account allows can
be granted; the others are *withheld*, and grants skip them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from itertools import islice

from .block_changes import BlockChanges
from .budget import Account
from .copies import SLOT_BITS, SLOT_MASK, Holder, block_at
from .messages import BlockCounts, ReservedBlock
from .prefix_tree import Node, PrefixTree

_FIRST_BLOCKS = 8
"""Records of a new pool; each growth doubles them, by _GROWTH_BLOCKS at most."""

_GROWTH_BLOCKS = 1 << 14
"""Most records that are made at a time: some 0.5 ms."""


class State(IntEnum):
    """What a block is to the manager."""

    FREE = 0
    CACHED = 1
    HELD = 2
    RESERVED = 3


FREE, CACHED, HELD, RESERVED = (int(state) for state in State)


class BlockPool:
    """`num_blocks` blocks; block 0 is never granted. `slot`: its place among the pools of `holder`. `account`: the session's, which
    bounds growth. `evicted`: where it appends the block hashes of what it evicts, if anywhere."""

    def __init__(
        self,
        num_blocks: int,
        tree: PrefixTree,
        holder: Holder,
        slot: int,
        account: Account,
        evicted: array[int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.holder = holder
        self.slot = slot
        self.shift = slot * SLOT_BITS
        self.num_evicted = 0
        """Cached blocks whose content was dropped for a grant."""
        self.changes: BlockChanges | None = None
        """What changes, for pictures; None while nobody watches."""
        self.num_known = min(num_blocks, _FIRST_BLOCKS)
        """Blocks, from 0 on, of which there are records. While it is less than `num_blocks`, the last of them was never granted."""
        self.last_granted = 0
        """The highest block that was ever granted in this session, or before it as its report says; 0: none was."""
        self._tree = tree
        self._account = account
        self._budget = account.budget
        self._evicted = evicted
        account.declare(num_blocks - 1)
        self._state = bytearray(self.num_known)
        self._ref_count = array("I", bytes(4 * self.num_known))
        self._generation = array("Q", bytes(8 * self.num_known))
        self._node: list[Node | None] = [None] * self.num_known
        self._next = array("I", [*range(1, self.num_known), 0])
        self._previous = array("I", [self.num_known - 1, *range(self.num_known - 1)])
        self._duplicates: dict[Node, dict[int, None]] = {}
        """Held blocks that hold the same content as the copy that serves hits; by node, oldest first."""
        self._expected: dict[int, None] = {}
        """Free blocks whose contents the worker has yet to report. They are the last of the free ones."""
        self._demoted: dict[int, None] = {}
        """Cached blocks that are evicted before the others, oldest first."""
        self._num_free = num_blocks - 1
        self._num_cached = 0
        self._num_reserved = 0
        self._num_shared = 0

    # -- looking

    @property
    def capacity(self) -> int:
        """Blocks that can ever be granted."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be granted now: free and cached, less those that are withheld."""
        num_available = self._num_free + self._num_cached
        return num_available - self.num_withheld if self._budget.is_tight else num_available

    @property
    def num_withheld(self) -> int:
        """Blocks that were never granted, and for which the budget of all workers leaves no room."""
        if not self._budget.is_tight or self.holder.retired:
            return 0
        return max(0, self.num_never_granted - self._account.blocks_left)

    def num_new_of(self, count: int, blocks_left: int) -> int:
        """How many of the next `count` blocks would be granted for the first time, if the budget has room for `blocks_left`. Blocks
        that were freed come before those that were never granted, and these before the expected and the cached ones."""
        num_new = self.num_never_granted
        num_before = self._num_free - num_new - len(self._expected)
        return max(0, min(count - num_before, num_new, blocks_left))

    @property
    def num_never_granted(self) -> int:
        """Blocks that were not granted in this session, nor before it as its report says."""
        return self.num_blocks - 1 - self.last_granted

    @property
    def num_reserved(self) -> int:
        """Blocks granted to the worker and bound to no sequence."""
        return self._num_reserved

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        capacity = self.num_blocks - 1
        num_withheld = self.num_withheld if self._budget.is_tight else 0
        held = capacity - self._num_free - self._num_cached - self._num_reserved
        return BlockCounts(
            capacity,
            self._num_free - num_withheld,
            self._num_cached,
            held,
            self._num_reserved,
            0,
            self._num_shared,
            num_withheld,
        )

    def state(self, block: int) -> State:
        """State of a block; the null block counts as free."""
        return State(self._state[block]) if block < self.num_known else State.FREE

    def ref_count(self, block: int) -> int:
        """Tables of live sequences that name the block."""
        try:
            return self._ref_count[block]
        except IndexError:
            return 0

    def generation(self, block: int) -> int:
        """Stamp of the call that granted the block last; 0 if none did."""
        try:
            return self._generation[block]
        except IndexError:
            return 0

    def generations(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Return the generations of known blocks, in the order given."""
        return tuple(map(self._generation.__getitem__, blocks))

    def node(self, block: int) -> Node | None:
        """What a sealed block holds; None if the block is not sealed."""
        try:
            return self._node[block]
        except IndexError:
            return None

    def copy_of(self, node: Node) -> int:
        """The block that serves hits on a node; 0 if there is none."""
        return node.copy_in(self.holder, self.slot)

    def is_free(self, block: int) -> bool:
        """Whether the block lies on the free list and holds nothing."""
        return block >= self.num_known or self._state[block] == FREE

    def is_expected(self, block: int) -> bool:
        """Whether the block is free, and the worker has yet to report what it holds."""
        return block in self._expected

    def is_cached(self, block: int) -> bool:
        """Whether the block lies on the free list and is still a hit."""
        try:
            return self._state[block] == CACHED
        except IndexError:
            return False

    def num_cached_of(self, blocks: Iterable[int]) -> int:
        """How many of these known blocks lie on the free list and are still hits."""
        states = self._state
        return sum([states[block] == CACHED for block in blocks])

    def is_reserved(self, block: int, generation: int) -> bool:
        """Whether the block belongs to the reserve by the grant with that stamp."""
        return 0 < block < self.num_known and self._state[block] == RESERVED and self._generation[block] == generation

    def free_list(self) -> Iterator[int]:
        """Blocks from the next to be granted to the last, those that are withheld in their place. The list must not change
        meanwhile."""
        block = self._next[0]
        while block and self._state[block] == FREE:
            yield block
            if block == self.num_known - 1:
                yield from range(self.num_known, self.num_blocks)
            block = self._next[block]
        yield from self._demoted
        while block:
            if block not in self._demoted:
                yield block
            block = self._next[block]

    # -- looking, for pictures

    def records(self, blocks: Collection[int]) -> Iterator[tuple[int, int, int, Node | None]]:
        """Yield (block, state, ref_count, node) of each of these known blocks as it is now; node: None if the block is not
        sealed."""
        return zip(
            blocks,
            map(self._state.__getitem__, blocks),
            map(self._ref_count.__getitem__, blocks),
            map(self._node.__getitem__, blocks),
            strict=True,
        )

    # -- looking, for audits

    def rows(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int, Node | None]]:
        """Yield (block, state, ref_count, generation, node) of each known block from `begin` to `end` − 1 as it is now; node:
        None if the block is not sealed."""
        span = slice(begin, end)
        return zip(
            range(begin, end),
            self._state[span],
            self._ref_count[span],
            self._generation[span],
            self._node[span],
            strict=False,
        )

    def snapshot_states(self) -> bytearray:
        """A copy of the state of every known block."""
        return self._state[:]

    def snapshot_ref_counts(self) -> array[int]:
        """A copy of the ref_count of every known block."""
        return self._ref_count[:]

    def snapshot_list(self) -> array[int]:
        """A copy of the next block of each known block on the free list; block 0 is before its head and after its tail."""
        return self._next[:]

    def is_linked_back(self, block: int) -> bool:
        """Whether a block of the free list, or block 0, points back at the block of the list that points at it."""
        before = self._previous[block]
        return (
            before < self.num_known
            and self._next[before] == block
            and (before == 0 or self._state[before] in (FREE, CACHED))
        )

    def duplicated(self) -> list[Node]:
        """Nodes that more than one block of this pool holds, as of now."""
        return list(self._duplicates)

    def duplicates_of(self, node: Node) -> tuple[int, ...]:
        """The blocks that hold `node` and are not the copy that serves hits, oldest first."""
        return tuple(self._duplicates.get(node, ()))

    def is_duplicate(self, block: int, node: Node) -> bool:
        """Whether the block is listed as one that holds `node` and is not the copy that serves hits."""
        return block in self._duplicates.get(node, ())

    def expected(self) -> list[int]:
        """Free blocks whose contents the worker has yet to report, as of now."""
        return list(self._expected)

    def demoted(self) -> list[int]:
        """Cached blocks that are evicted before the others, as of now."""
        return list(self._demoted)

    # -- the list

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _push_head(self, block: int) -> None:
        first = self._next[0]
        self._next[0] = self._previous[first] = block
        self._next[block] = first
        self._previous[block] = 0

    def _push_tail(self, block: int) -> None:
        last = self._previous[0]
        self._previous[0] = self._next[last] = block
        self._previous[block] = last
        self._next[block] = 0

    def _move_to_tail(self, blocks: Iterable[int]) -> None:
        """Blocks of the list, in this order. As _unlink and _push_tail, without the calls."""
        follows, previous = self._next, self._previous
        for block in blocks:
            before, after = previous[block], follows[block]
            follows[before], previous[after] = after, before
            last = previous[0]
            previous[0] = follows[last] = block
            previous[block], follows[block] = last, 0

    # -- granting

    def _take(self, count: int, generation: int, state: int) -> list[int]:
        """Take `count` blocks off the head of the list, evicting what they hold. `state`: the one that they get."""
        if self._demoted:
            self._put_demoted_first(count - (self._num_free - self.num_withheld))
        follows, states, generations = self._next, self._state, self._generation
        blocks, num_free = [], 0
        before, block = 0, follows[0]
        most = edge = self.last_granted
        for _ in range(count):
            if block > edge:  # never granted before, as all after it up to the last known one
                if edge == self.last_granted:
                    most = edge + self._account.blocks_left
                if block <= most:
                    if block == self.num_known - 1:
                        self._grow()
                    edge = max(block, min(most, self.num_known - 2))
                else:
                    follows[before] = block
                    self._previous[block] = before
                    before = self.num_known - 1
                    block = follows[before]
            assert block, "taken from an empty free list"
            assert generation > generations[block], "generations must grow"
            generations[block] = generation
            if states[block] == CACHED:
                self._num_cached -= 1
                self.num_evicted += 1
                self._forget(block)
            else:
                num_free += 1
            states[block] = state
            blocks.append(block)
            block = follows[block]
        follows[before] = block
        self._previous[block] = before
        self._num_free -= num_free
        if self._expected:
            for taken in blocks:
                self._expected.pop(taken, None)
        if edge > self.last_granted:
            num_granted = max(blocks) - self.last_granted
            self._account.add_blocks(num_granted)
            self.last_granted += num_granted
        if self.changes is not None:
            self.changes.used.update(blocks)
        return blocks

    def _put_demoted_first(self, count: int) -> None:
        """Move that many demoted blocks to the head of the list, because the next grant takes all free blocks and these."""
        for block in list(islice(self._demoted, max(0, count))):
            del self._demoted[block]
            self._unlink(block)
            self._push_head(block)

    def _grow(self) -> None:
        """Make records of some of the blocks that the last known one represents, and put them on the list after it."""
        known = self.num_known
        count = min(known, _GROWTH_BLOCKS, self.num_blocks - known)
        if not count:
            return
        follows, last = self._next, known + count - 1
        after = follows[known - 1]
        follows[known - 1] = known
        follows.extend(range(known + 1, last + 1))
        follows.append(after)
        self._previous.extend(range(known - 1, last))
        self._previous[after] = last
        self._state += bytes(count)
        self._ref_count.frombytes(bytes(4 * count))
        self._generation.frombytes(bytes(8 * count))
        self._node += [None] * count
        self.num_known += count

    def take_held(self, count: int, generation: int) -> list[int]:
        """Grant `count` available blocks to a table: ref_count 1. The caller has checked num_available."""
        blocks, ref_counts = self._take(count, generation, HELD), self._ref_count
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def take_reserved(self, count: int, generation: int) -> list[int]:
        """Grant `count` available blocks to the reserve. The caller has checked num_available."""
        self._num_reserved += count
        return self._take(count, generation, RESERVED)

    def bind(self, *blocks: int) -> None:
        """Reserved blocks become entries of a table."""
        for block in blocks:
            assert self._state[block] == RESERVED
            self._state[block] = HELD
            self._ref_count[block] = 1
        self._num_reserved -= len(blocks)
        if self.changes is not None:
            self.changes.others.update(blocks)

    def unreserve(self, block: int, generation: int) -> None:
        """A block goes back to the head of the free list, if it is still reserved by the grant with that stamp."""
        if not self.is_reserved(block, generation):
            return
        self._state[block] = FREE
        self._num_reserved -= 1
        self._num_free += 1
        self._push_head(block)
        if self.changes is not None:
            self.changes.others.add(block)

    def pin(self, *blocks: int) -> None:
        """Hits: one more table names these sealed blocks."""
        ref_counts = self._ref_count
        for block in blocks:
            count = ref_counts[block]
            if count == 0:
                assert self._state[block] == CACHED
                self._unlink(block)
                self._demoted.pop(block, None)
                self._num_cached -= 1
                self._state[block] = HELD
            elif count == 1:
                self._num_shared += 1
            ref_counts[block] = count + 1
        if self.changes is not None:
            self.changes.used.update(blocks)

    def release(self, *blocks: int) -> None:
        """One table fewer names these blocks, which are released in this order. One that no table names any more goes to the tail
        if it serves hits, otherwise, emptied, to the head."""
        ref_counts, states, nodes = self._ref_count, self._state, self._node
        follows, previous, holder, shift = self._next, self._previous, self.holder, self.shift
        if self.changes is not None:
            self.changes.others.update(blocks)
        for block in blocks:
            count = ref_counts[block] - 1
            assert count >= 0, "released more often than held"
            ref_counts[block] = count
            if count:
                if count == 1:
                    self._num_shared -= 1
                continue
            node = nodes[block]
            if node is not None and (
                node.copy_blocks >> shift & SLOT_MASK == block  # nearly always the only holder
                if node.copy_holder is holder
                else self._serves_hits(block, node)
            ):
                states[block] = CACHED
                self._num_cached += 1
                last = previous[0]  # as _push_tail, without the call
                previous[0] = follows[last] = block
                previous[block], follows[block] = last, 0
                continue
            if node is not None:
                self._forget(block)
            states[block] = FREE
            self._num_free += 1
            self._push_head(block)

    def _serves_hits(self, block: int, node: Node) -> bool:
        """Whether the block, which holds a node, is the copy that serves its hits."""
        return self.copy_of(node) == block

    def release_demoted(self, block: int) -> None:
        """`release`, and if the block is cached then, it is evicted before the others: it is not expected to be hit again."""
        self.release(block)
        if self._state[block] == CACHED:
            self._demoted[block] = None

    # -- content

    def seal(self, block: int, node: Node) -> None:
        """The held block now holds `node`, for good. The first one of a node in this pool serves its hits."""
        assert self._node[block] is None
        self._node[block] = node
        if node.copy_holder is None and node.copies is None:  # nearly always: as `add_copy`, without the call
            node.copy_holder, node.copy_blocks = self.holder, block << self.shift
        elif not node.add_copy(self.holder, self.slot, block):
            self._duplicates.setdefault(node, {})[block] = None

    def _forget(self, block: int) -> None:
        """Remove a block's content from the tree; another block that holds the same takes over."""
        node = self._node[block]
        assert node is not None
        self._node[block] = None
        others = self._duplicates.get(node) if self._duplicates else None
        if self.copy_of(node) != block:
            assert others is not None
            del others[block]
        elif others:
            oldest = next(iter(others))
            del others[oldest]
            node.set_copy(self.holder, self.slot, oldest)
        else:
            if self._tree.journal is not None:
                self._tree.journal.removed(node, self.holder, self.slot)
            if self.holder.dependent_slots and self.slot in self.holder.whole_slots:
                self._empty_dependents(node)
            node.set_copy(self.holder, self.slot, 0)
            # Only an eviction ends here: a block that is released with its content keeps it, or another block serves its hits.
            evicted = self._evicted
            if evicted is not None:
                evicted.append(node.block_hash or 0)
            self._tree.prune(node)
        if others is not None and not others:
            del self._duplicates[node]

    def _empty_dependents(self, node: Node) -> None:
        """A window without the KV before it serves no hit: empty the copies of the node in the groups with windows. No sequence has
        them, because it would have this group's block too."""
        blocks = node.blocks_in(self.holder)
        for slot in self.holder.dependent_slots:
            block = block_at(blocks, slot)
            if block:
                self.holder.pools[slot].empty(block)

    def empty(self, block: int) -> None:
        """Drop the content of a cached block, and make it the next to be granted. The caller keeps the node."""
        assert self._state[block] == CACHED
        node = self._node[block]
        assert node is not None
        assert node not in self._duplicates
        if self._tree.journal is not None:
            self._tree.journal.removed(node, self.holder, self.slot)
        node.set_copy(self.holder, self.slot, 0)
        self._node[block] = None
        self._demoted.pop(block, None)
        self._unlink(block)
        self._state[block] = FREE
        self._num_cached -= 1
        self._num_free += 1
        self._push_head(block)
        if self.changes is not None:
            self.changes.others.add(block)

    # -- what a worker reports of an earlier session

    def expect(self, blocks: Collection[int]) -> None:
        """Blocks are complete at the worker, which reports later what they hold: those that are free are granted after the other
        free ones. No effect in a pool with cached blocks, which come after all free ones."""
        if self._num_cached or not blocks:
            return
        self._know(max(blocks))
        states, expected = self._state, self._expected
        new = dict.fromkeys(block for block in blocks if states[block] == FREE and block not in expected)
        self._move_to_tail(new)
        expected.update(new)

    def take_expected(self, block: int) -> bool:
        """Whether the worker has yet to report what the block holds; it has from now on. To be restored, or let go."""
        if block not in self._expected:
            return False
        del self._expected[block]
        return True

    def let_go(self, block: int) -> None:
        """A free block, which was expected, holds nothing that is of use."""
        self._expected.pop(block, None)
        self._unlink(block)
        self._push_head(block)

    def stop_expecting(self, most: int) -> bool:
        """The report is complete: what is still expected holds nothing. At most `most` blocks; returns whether any is left."""
        for block in list(islice(self._expected, most)):
            self.let_go(block)
        return bool(self._expected)

    def restore_cached(self, blocks: Collection[tuple[int, int, Node]]) -> None:
        """Free blocks, of these generations, hold these nodes and serve their hits, of which the pool has no copies yet; most
        recently used for now."""
        if not blocks:
            return
        self._know(max(block for block, _, _ in blocks))
        self._move_to_tail(block for block, _, _ in blocks)
        for block, generation, node in blocks:
            assert self._state[block] == FREE
            self._state[block] = CACHED
            self._generation[block] = generation
            if self._expected:
                self._expected.pop(block, None)
            self.seal(block, node)
        self._num_free -= len(blocks)
        self._num_cached += len(blocks)
        if self.changes is not None:
            self.changes.others.update(block for block, _, _ in blocks)

    def restore_held(self, blocks: Collection[ReservedBlock]) -> None:
        """Free blocks are named by one table."""
        if not blocks:
            return
        self._know(max(block for block, _ in blocks))
        follows, previous, states = self._next, self._previous, self._state
        for block, generation in blocks:
            assert states[block] == FREE
            before, after = previous[block], follows[block]
            follows[before], previous[after] = after, before
            self._generation[block] = generation
            states[block] = HELD
            self._ref_count[block] = 1
            if self._expected:
                self._expected.pop(block, None)
        self._num_free -= len(blocks)
        if self.changes is not None:
            self.changes.others.update(block for block, _ in blocks)

    def restore_reserved(self, block: int, generation: int) -> None:
        """A free block is in the worker's reserve."""
        self._restore(block, generation)
        self._state[block] = RESERVED
        self._num_reserved += 1

    def _restore(self, block: int, generation: int) -> None:
        assert self.is_free(block)
        self._know(block)
        self._expected.pop(block, None)
        self._unlink(block)
        self._num_free -= 1
        self._generation[block] = generation
        if self.changes is not None:
            self.changes.others.add(block)

    def _know(self, block: int) -> None:
        """There is a record of the block, which counts as granted."""
        self.make_room(block, self.num_blocks)
        if block > self.last_granted:
            self._account.add_blocks(block - self.last_granted)
            self.last_granted = block

    def make_room(self, block: int, most: int) -> bool:
        """Make records up to `block`, but for little more than `most` blocks; returns whether all are made."""
        end = self.num_known + most
        while block >= self.num_known - 1 and self.num_known < min(end, self.num_blocks):
            self._grow()
        return block < self.num_known - 1 or self.num_known == self.num_blocks

    def touch(self, block: int) -> None:
        """Make a cached block the most recently used one."""
        assert self._state[block] == CACHED
        self._demoted.pop(block, None)
        self._unlink(block)
        self._push_tail(block)

    # -- the end of a session

    def sweep(self, begin: int, budget: int) -> int:
        """Remove the content of blocks `begin` … of a retired pool from the tree; returns the first block not done.

        Stops after `budget` blocks and pruned nodes. `PrefixTree.prune_condemned` prunes what is left of a long chain then.
        """
        assert self.holder.retired
        tree = self._tree
        for block in range(begin, self.num_known):
            if budget <= 0:
                return block
            budget -= 1
            node = self._node[block]
            if node is not None:
                self._node[block] = None
                if self._unseal(block, node):
                    budget -= tree.prune(node, max(budget, 1))
        return self.num_blocks

    def _unseal(self, block: int, node: Node) -> bool:
        """The node has no copy here any more; returns whether it had one."""
        if self._duplicates:
            self._duplicates.pop(node, None)
        if not self.copy_of(node):
            return False
        node.set_copy(self.holder, self.slot, 0)
        return True
