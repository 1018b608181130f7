"""Reports: what a worker holds from earlier sessions, restored: cached blocks, tables of live sequences, reserve.

The worker holds this truth: its earlier session is fenced, and nothing that the manager knew of it is used. A report comes in
parts, so that no part delays other calls for long, and is restored into the pool of the new session.

First comes what is in use: sequences with their tables, the reserve, and which blocks are idle. Look-ups ignore the session until
the part that is `live`; then one flag makes it visible, and the worker is served. The contents of the idle blocks, its cache,
follow while it works. By then the manager may have granted such a block, so only one that is still *expected* is restored. A report
may also state all of it before it is live, contents first.

What becomes of each thing that a report can state (`Case`): the table in docs/ARCHITECTURE.md, "Recovery".

A report that states two things of one block, or something that no worker can know, is refused and ends the session; the worker then
forgets all blocks and registers without state. A report of more than the budget leaves room for ends the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import Enum
from typing import NoReturn

from . import units
from .block_pool import BlockPool
from .fencing import Fencing
from .messages import (
    TOKEN_BYTES,
    ContentRun,
    Limits,
    ReportedBlocks,
    ReportedSequence,
    ReportedUnit,
    ReportPart,
    ReservedBlock,
    Root,
    TableEntry,
)
from .prefix_tree import Node, PrefixTree, RootNode
from .refusal import Reason, Refusal
from .reported_units import ReportedUnits
from .session import Sequence, Session
from .windows import WindowTable


class Case(Enum):
    """What a report states of one block or sequence."""

    CACHED = "cached"
    DUPLICATE = "duplicate"
    BLOCKLESS = "blockless"
    HELD_SEALED = "held_sealed"
    SHARED = "shared"
    HELD_FILLING = "held_filling"
    SCRATCH = "scratch"
    DEPENDENT = "dependent"
    RESERVED = "reserved"
    GRANTED_SINCE = "granted_since"
    NO_ROOM = "no_room"
    LIVE = "live"
    FENCES = "fences"
    FENCED = "fenced"


class _Content:
    """The tokens of one block, and the content before it."""

    __slots__ = ("node", "parent", "root", "tokens")

    def __init__(self, parent: _Content | None, root: Root | None, tokens: bytes) -> None:
        self.parent = parent
        self.root = root
        self.tokens = tokens
        self.node: Node | None = None
        """Made when something needs it: a node that nothing needs would be pruned. Then it has no parent any more."""

    @property
    def live_node(self) -> Node | None:
        """Its node, if that is still in the tree."""
        return self.node if self.node is not None and self.node.parent is not None else None


class Recovery:
    """A report that is not complete yet. It ends with its session."""

    def __init__(self, session: Session, last_stamp: int) -> None:
        self.num_parts = 0
        """Parts applied."""
        self.cases: Counter[Case] = Counter()
        self._session = session
        self._fingerprint = session.registration.model_fingerprint
        self._last_stamp = last_stamp
        """No block can have a larger generation than the largest given before the session began."""
        self._contents: list[_Content] = []
        """By number, the first has number 1."""
        self._blocks: tuple[dict[int, tuple[Node, int]], ...] = tuple({} for _ in session.pools)
        """By group: node and generation of the complete blocks reported so far."""
        self._is_full = False
        """The budget has no room for more contents: the worker is served, and the rest of its cache is left out."""
        self._units: ReportedUnits | None = None
        """Of the group with cross attention, if there is one."""
        slots = session.holder.full_slots or session.holder.window_slots
        self._keeping = frozenset(slots)
        """Groups of which a block keeps a content: one of a group with a window is kept next to others only."""
        if session.unit_pool is not None:
            most = session.registration.layout.groups[session.unit_pool.slot].max_encoder_tokens
            self._units = ReportedUnits(session.unit_pool, -(-most // session.block_size))

    @property
    def _is_live(self) -> bool:
        """Whether the worker is served already."""
        return not self._session.recovering

    def apply(self, tree: PrefixTree, attempts: Fencing, part: ReportPart, limits: Limits) -> None:
        """Apply the next part. Raises Refusal: RECOVERING (send the same part again; no visible state has changed), BAD_REPORT,
        TOO_MANY_BLOCKS, TOO_MANY_TOKENS (the session must be ended)."""
        num_groups = len(self._session.pools)
        highest = max((one.group for run in part.contents for one in run.blocks), default=0)
        highest = max(highest, len(part.reserve) - 1, len(part.idle_blocks) - 1)
        highest = max(highest, max((len(one.tables) for one in part.sequences), default=0) - 1)
        highest = max(highest, max((len(one.scratch) for one in part.sequences), default=0) - 1)
        highest = max(highest, max((one.group for one in part.units), default=0))
        if highest >= num_groups:
            _refuse("group", f"the worker is registered with {num_groups} groups, got group {highest}")
        num_contents = sum(run.num_contents for run in part.contents)
        if num_contents > limits.max_contents_per_report_part:
            _refuse("contents", f"at most {limits.max_contents_per_report_part} contents per part, got {num_contents}")
        num_blocks = sum(map(len, part.reserve)) + sum(map(len, part.idle_blocks))
        num_blocks += sum(len(table) for sequence in part.sequences for table in (*sequence.tables, *sequence.scratch))
        num_blocks += sum(len(unit.blocks) for unit in part.units)
        if num_blocks > limits.max_blocks_per_report_part:
            _refuse("blocks", f"at most {limits.max_blocks_per_report_part} blocks per part, got {num_blocks}")
        if self._is_live and (part.sequences or any(part.reserve)):
            _refuse("sequences", "sequences and reserve come before the worker is served, or in the part that is live")
        self._make_room(part, limits)
        for run in part.contents:
            self._take_contents(tree, run)
        for unit in part.units:
            self._take_unit(tree, unit)
        for reported in part.sequences:
            missing = ((),) * (num_groups - len(reported.tables))
            no_scratch = ((),) * (num_groups - len(reported.scratch))
            reported = reported._replace(tables=reported.tables + missing, scratch=reported.scratch + no_scratch)
            self._take_sequence(tree, attempts, reported, limits)
        for group, reserved in enumerate(part.reserve):
            for block, generation in reserved:
                self._require_free(group, block, generation)
                self._session.pools[group].restore_reserved(block, generation)
                self.cases[Case.RESERVED] += 1
        for pool, blocks in zip(self._session.pools, part.idle_blocks, strict=False):
            # A duplicate is idle at the worker and free here; a block that a table names was idle when the list was made.
            there = [block for block in blocks if 0 < block < pool.num_blocks]
            for block in there:
                if pool.is_cached(block):
                    pool.touch(block)
            if not (self._is_live or part.last):
                pool.expect(there)
        self.num_parts += 1

    def discard(self, budget: int) -> bool:
        """After the last part: drop at most `budget` contents, because all at once take long. Returns whether any are left."""
        # The last first, so that no chain falls link by link.
        del self._contents[max(0, len(self._contents) - budget) :]
        for blocks in self._blocks:
            for _ in range(min(budget, len(blocks))):
                blocks.popitem()
        is_expecting = [pool.stop_expecting(budget) for pool in self._session.pools]
        return bool(self._contents or any(self._blocks) or any(is_expecting))

    def _make_room(self, part: ReportPart, limits: Limits) -> None:
        """Grow the pools up to the highest block of the part, in steps that do not delay other calls for long. Refuses what the
        budget has no room for."""
        if self._is_live:
            return  # no block is restored that has not come before
        pools = self._session.pools
        highest = [0] * len(pools)
        for run in part.contents:
            for group, blocks, _ in run.blocks:
                highest[group] = max(highest[group], max(blocks, default=0))
        for sequence in part.sequences:
            for group, table in enumerate(sequence.tables):
                highest[group] = max(highest[group], max((entry.block for entry in table), default=0))
            for group, scratch in enumerate(sequence.scratch):
                highest[group] = max(highest[group], max((entry.block for entry in scratch), default=0))
        for unit in part.units:
            highest[unit.group] = max(highest[unit.group], max((entry.block for entry in unit.blocks), default=0))
        for group, reserved in enumerate(part.reserve):
            highest[group] = max(highest[group], max((entry.block for entry in reserved), default=0))
        for group, idle in enumerate(part.idle_blocks):
            if not part.last:
                highest[group] = max(highest[group], max(idle, default=0))
        if any(block >= pool.num_blocks for pool, block in zip(pools, highest, strict=True)):
            return  # which is refused where it is named
        # A content without a block counts as one, so that all that a report makes the manager keep is counted.
        num_new = sum(_num_blockless(run, self._keeping) for run in part.contents)
        num_new += sum(max(0, block - pool.last_granted) for pool, block in zip(pools, highest, strict=True))
        account = self._session.account
        if num_new > account.blocks_left:
            raise account.too_many_blocks(num_new)
        for pool, block in zip(pools, highest, strict=True):
            if not pool.make_room(block, limits.max_growth_per_report_part):
                raise Refusal(
                    Reason.RECOVERING,
                    f"records of {pool.num_known} blocks are made, {block + 1} are needed: send the same part again",
                )

    # -- contents

    def _take_contents(self, tree: PrefixTree, run: ContentRun) -> None:
        step = self._session.block_size * TOKEN_BYTES
        count = run.num_contents
        if len(run.tokens) != count * step or not count:
            _refuse(
                "contents", f"a chain of {count} contents needs {count * step} bytes of tokens, got {len(run.tokens)}"
            )
        for group, blocks, generations in run.blocks:
            if len(blocks) != count or len(generations) != count:
                _refuse(
                    "contents",
                    f"a chain of {count} contents needs as many blocks and generations of group {group}, got {len(blocks)} and "
                    f"{len(generations)}",
                )
        if not 0 <= run.parent <= len(self._contents):
            _refuse(
                "contents", f"content {len(self._contents) + 1} has the parent {run.parent}, which has not come yet"
            )
        if not run.parent and (run.root is None or run.root.model_fingerprint != self._fingerprint):
            _refuse(
                "contents", f"a chain without a parent needs a root with the model fingerprint {self._fingerprint!r}"
            )
        parent = self._contents[run.parent - 1] if run.parent else None
        first = len(self._contents)
        for begin in range(0, count * step, step):
            parent = _Content(parent, run.root, run.tokens[begin : begin + step])
            self._contents.append(parent)
        # Each may turn out to be one without a block, which counts.
        self._is_full = self._is_full or (self._is_live and count > self._session.account.blocks_left)
        if self._is_full:
            self._leave_out(run)
            return
        is_kept = bytearray(count)
        chain = self._contents[first:]
        # Groups without a window first: their copies are what those of the others depend on.
        for of_group in sorted(run.blocks, key=lambda one: self._session.holder.spans[one.group]):
            self._take_blocks(tree, chain, of_group, is_kept)
        self._count_blockless(count - sum(is_kept))

    def _take_blocks(
        self, tree: PrefixTree, chain: list[_Content], reported: ReportedBlocks, is_kept: bytearray
    ) -> None:
        """The blocks of one group that hold these contents."""
        pool, holder, group = self._session.pools[reported.group], self._session.holder, reported.group
        is_live, blocks, is_keeping = self._is_live, self._blocks[group], group in self._keeping
        needs_full = holder.spans[group] > 0 and bool(holder.full_slots)
        restored: list[tuple[int, int, Node]] = []
        try:
            for index, block in enumerate(reported.blocks):
                if not block:
                    continue
                content, generation = chain[index], reported.generations[index]
                if not (0 < block < pool.num_blocks and 0 < generation <= self._last_stamp):
                    self._require_known(group, block, generation)
                if not (pool.take_expected(block) if is_live else pool.is_free(block) and block not in blocks):
                    if self._is_known_already(content, group, block, generation):
                        is_kept[index] |= is_keeping
                    continue
                node = content.live_node
                if needs_full and (node is None or not holder.is_complete(node.blocks_in(holder))):
                    # The worker does not know that it is of no use any more: what was before it is gone.
                    self.cases[Case.DEPENDENT] += 1
                    self._let_go(pool, block)
                    continue
                if node is None:
                    node = self._node(tree, content)
                if not is_live:
                    blocks[block] = node, generation
                is_kept[index] |= is_keeping
                if pool.copy_of(node):
                    self.cases[Case.DUPLICATE] += 1
                    self._let_go(pool, block)
                else:
                    restored.append((block, generation, node))
        finally:
            # Also if the next one is refused: a node without a copy would stay in the tree.
            pool.restore_cached(restored)
        self.cases[Case.CACHED] += len(restored)
        if tree.journal is not None:
            for _, _, node in restored:
                tree.journal.restored(node, holder, group)

    def _leave_out(self, run: ContentRun) -> None:
        """The blocks of these contents hold nothing that is of use."""
        for group, blocks, _ in run.blocks:
            for block in blocks:
                if self._session.pools[group].is_expected(block):
                    self._session.pools[group].let_go(block)
                    self.cases[Case.NO_ROOM] += 1

    def _count_blockless(self, count: int) -> None:
        """So many contents are kept for what comes after them, and have no block."""
        account = self._session.account
        if count > account.blocks_left:
            raise account.too_many_blocks(count)
        account.declare(count)
        account.add_blocks(count)
        self._session.num_blockless_contents += count
        self.cases[Case.BLOCKLESS] += count

    def _is_known_already(self, content: _Content, group: int, block: int, generation: int) -> bool:
        """Whether a block that may not be restored holds this content: a table has said so. Else it was granted since, or the
        report contradicts itself."""
        pool = self._session.pools[group]
        held = pool.node(block)
        if held is not None and pool.generation(block) == generation and self._is_content(held, content):
            content.node = held
            return True
        if not self._is_live:
            _refuse_twice(block)
        self.cases[Case.GRANTED_SINCE] += 1
        return False

    def _let_go(self, pool: BlockPool, block: int) -> None:
        """A free block holds nothing that is of use."""
        if self._is_live:
            pool.let_go(block)

    def _is_content(self, node: Node, content: _Content) -> bool:
        """Whether a node holds this content: equal tokens all the way up, under an equal root."""
        at: Node | None = node
        one: _Content | None = content
        while one is not None and at is not None:
            if one.live_node is not None:
                return one.live_node is at
            if at.tokens != one.tokens:
                return False
            if one.parent is None:
                above = at.parent
                return isinstance(above, RootNode) and above.key == (one.root, self._session.block_size)
            at, one = at.parent, one.parent
        return False

    def _node(self, tree: PrefixTree, content: _Content) -> Node:
        """The node of a content, made together with its ancestors."""
        parent = content.parent
        if parent is not None and parent.node is not None and parent.node.parent is not None:  # nearly always
            node = content.node = tree.intern(parent.node, content.tokens)
            tree.name(node)
            return node
        missing: list[_Content] = []
        at: _Content | None = content
        while at is not None and at.live_node is None:
            missing.append(at)
            at = at.parent
        above = at.live_node if at is not None else None
        for one in reversed(missing):
            if above is None:
                assert one.root is not None
                above = tree.intern_root(one.root, self._session.block_size)
            above = one.node = tree.intern(above, one.tokens)
            tree.name(above)
        assert above is not None
        return above

    # -- units

    def _take_unit(self, tree: PrefixTree, unit: ReportedUnit) -> None:
        wrong = "the worker is registered without cross attention"
        if unit.root.model_fingerprint != self._fingerprint:
            wrong = f"a unit needs a root with the model fingerprint {self._fingerprint!r}"
        elif self._units is not None:
            wrong = self._units.why_wrong(unit) or ""
        if wrong or self._units is None:
            _refuse("units", wrong)
        for block, generation in unit.blocks:
            self._require_known(unit.group, block, generation)
        pool = self._session.pools[unit.group]
        is_there = pool.is_expected if self._is_live else pool.is_free
        if not all(is_there(block) and block not in self._blocks[unit.group] for block, _ in unit.blocks):
            if not self._is_live:
                _refuse_twice(unit.blocks[0].block)
            self.cases[Case.GRANTED_SINCE] += len(unit.blocks)
            return
        is_first = self._units.take(tree, unit, self._session.block_size)
        self.cases[Case.CACHED if is_first else Case.DUPLICATE] += len(unit.blocks)

    def _check_unit_table(self, reported: ReportedSequence, root: Node) -> None:
        """Refuse a unit of a sequence that contradicts what the report states of its blocks. Changes nothing."""
        if self._units is None:
            if reported.encoder_computed:
                _refuse("sequences", "the worker is registered without cross attention")
            return
        wrong = self._units.why_table_wrong(reported, root)
        if wrong is not None:
            _refuse("sequences", wrong)
        slot = self._units.slot
        for _, block, generation in reported.tables[slot]:
            if not self._units.is_reported(block):
                self._require_free(slot, block, generation)

    def _take_unit_table(self, sequence: Sequence, reported: ReportedSequence) -> None:
        """Its checked table: a unit that was restored, or blocks of its own."""
        if self._units is None:
            return
        pool, table = self._session.pools[self._units.slot], reported.tables[self._units.slot]
        if self._units.is_unit_of(sequence):
            self.cases[Case.HELD_SEALED if pool.is_cached(table[0].block) else Case.SHARED] += len(table)
            pool.pin(*(entry.block for entry in table))
            units.enter(sequence, is_cached=True)
            return
        if pool.is_free(table[0].block):
            pool.restore_held([ReservedBlock(block, generation) for _, block, generation in table])
        else:  # of a sequence and its forks
            pool.pin(*(entry.block for entry in table))
        units.enter(sequence, is_cached=False)
        if reported.encoder_computed:
            units.take_update(sequence)
        self.cases[Case.HELD_SEALED if reported.encoder_computed else Case.HELD_FILLING] += len(table)

    # -- sequences

    def _take_sequence(self, tree: PrefixTree, attempts: Fencing, reported: ReportedSequence, limits: Limits) -> None:
        session, key = self._session, reported.key
        size = session.block_size
        num_tokens, rest = divmod(len(reported.tokens), TOKEN_BYTES)
        self._check_sequence(reported, num_tokens, rest, limits)
        root = tree.intern_root(reported.root, size)
        # Each node has a block: of tokens for which the table has none no nodes are made.
        num_sealed = reported.num_computed_tokens // size
        full = [reported.tables[slot] for slot in session.holder.full_slots]
        num_full = min([num_tokens // size, *map(len, full)]) if full else num_sealed
        path = tree.match(root, reported.tokens, size, num_full)
        try:
            for pool in (*session.full_pools, *session.window_pools):
                self._check_table(reported, pool.slot, path, num_sealed)
            self._check_unit_table(reported, root)
        except Refusal:
            tree.prune(root)
            raise
        sequence = Sequence(key, session, root, reported.tokens)
        tree.extend(path, root, reported.tokens, size, num_full)
        (path[-1] if path else root).num_sequences += 1
        for node in path[num_sealed:]:
            node.add_leader(sequence)
        sequence.nodes = path
        for node in path[:num_sealed] if session.window_pools else ():
            tree.name(node)  # a window of computed blocks that no block of a table holds may still be named
        for pool in (*session.full_pools, *session.window_pools):
            self._take_table(tree, pool, reported.tables[pool.slot], path, num_sealed)
        if session.window_pools:
            self._take_windows(sequence, reported)
        sequence.tables = tuple(
            [] if session.holder.spans[group] else [entry.block for entry in table]
            for group, table in enumerate(reported.tables)
        )
        self._take_unit_table(sequence, reported)
        sequence.num_sealed = num_sealed
        sequence.num_named = list(map(len, sequence.tables))
        sequence.num_computed_tokens = reported.num_computed_tokens
        sequence.num_cached_tokens = reported.num_cached_tokens
        session.account.add_tokens(num_tokens)
        session.sequences[key.sequence_id, key.attempt] = sequence
        self.cases[self._enter(attempts, sequence)] += 1

    def _take_windows(self, sequence: Sequence, reported: ReportedSequence) -> None:
        """Its named blocks, which are restored, and its scratch blocks."""
        windows: list[WindowTable | None] = [None] * len(self._session.pools)
        for pool in self._session.window_pools:
            pool.restore_held(reported.scratch[pool.slot])
            self.cases[Case.SCRATCH] += len(reported.scratch[pool.slot])
            entries = {entry.table_index: entry.block for entry in reported.tables[pool.slot]}
            scratch = [entry.block for entry in reported.scratch[pool.slot]]
            windows[pool.slot] = WindowTable(self._session.holder.spans[pool.slot], entries, scratch)
        sequence.windows = tuple(windows)
        sequence.boundaries = tuple(sorted(one // self._session.block_size for one in reported.boundaries))

    def _check_sequence(self, reported: ReportedSequence, num_tokens: int, rest: int, limits: Limits) -> None:
        session, key = self._session, reported.key
        size = session.block_size
        name = f"sequence {key.sequence_id!r} attempt {key.attempt}"
        if not 1 <= len(key.sequence_id.encode()) <= limits.max_id_bytes or key.attempt < 1:
            _refuse("sequences", f"{name}: needed an id of 1 to {limits.max_id_bytes} bytes and an attempt from 1 on")
        if (key.sequence_id, key.attempt) in session.sequences:
            _refuse("sequences", f"{name} is reported twice")
        if len(session.sequences) >= limits.max_sequences_per_session:
            _refuse("sequences", f"at most {limits.max_sequences_per_session} sequences per worker")
        if rest or not 0 < num_tokens <= limits.max_tokens_per_sequence:
            _refuse("sequences", f"{name}: needed 1 to {limits.max_tokens_per_sequence} tokens")
        spans = session.holder.spans
        lengths = [len(reported.tables[slot]) for slot in session.holder.full_slots] or [-(-num_tokens // size)]
        if max(lengths) > limits.max_blocks_per_sequence:
            _refuse("sequences", f"{name}: at most {limits.max_blocks_per_sequence} blocks, got {max(lengths)}")
        session.account.require_tokens(num_tokens)
        if reported.root.model_fingerprint != self._fingerprint:
            _refuse("sequences", f"{name} has another model fingerprint than the worker")
        num_computed = reported.num_computed_tokens
        if not reported.num_cached_tokens <= num_computed <= min(num_tokens, min(lengths) * size):
            _refuse(
                "sequences",
                f"{name}: {num_computed} tokens cannot be computed, {reported.num_cached_tokens} of them cached, "
                f"of {num_tokens} in {min(lengths)} blocks",
            )
        for group, table in enumerate(reported.tables):
            indexes = [entry.table_index for entry in table]
            if not spans[group] and indexes != list(range(len(table))):
                _refuse("sequences", f"{name}: its tables must come whole, from index 0 on")
            if spans[group] and (len(set(indexes)) < len(indexes) or max(indexes, default=-1) >= num_computed // size):
                _refuse("sequences", f"{name}: entries of a window are computed blocks, each of another index")
            if reported.scratch[group] and not spans[group]:
                _refuse("sequences", f"{name}: group {group} has no window, so its sequences have no scratch")
        most = limits.max_boundaries
        if len(reported.boundaries) > most or any(one <= num_computed for one in reported.boundaries):
            _refuse("sequences", f"{name}: needed at most {most} boundaries, all of them still to come")

    def _check_table(self, reported: ReportedSequence, group: int, path: list[Node], num_sealed: int) -> None:
        """Refuse a table that contradicts what the report states of its blocks. Changes nothing."""
        seen: set[int] = set()
        blocks, pool = self._blocks[group], self._session.pools[group]
        for index, block, generation in reported.tables[group]:
            complete = blocks.get(block) if blocks else None
            if block in seen:
                _refuse("sequences", f"block {block} is twice in the table of {reported.key.sequence_id!r}")
            seen.add(block)
            if complete is None:
                if not (0 < block < pool.num_blocks and 0 < generation <= self._last_stamp and pool.is_free(block)):
                    self._require_free(group, block, generation)
                continue
            if index >= num_sealed:
                _refuse("sequences", f"block {block} is complete, but a table that names it has not computed it yet")
            holds = path[index] if index < len(path) else None
            if complete[0] is not holds or complete[1] != generation:
                _refuse(
                    "sequences", f"block {block} of generation {generation:#x} holds something else than a table says"
                )
        for block, generation in reported.scratch[group]:
            if block in seen:
                _refuse("sequences", f"block {block} is twice in what {reported.key.sequence_id!r} has")
            seen.add(block)
            self._require_free(group, block, generation)

    def _take_table(
        self, tree: PrefixTree, pool: BlockPool, table: tuple[TableEntry, ...], path: list[Node], num_sealed: int
    ) -> None:
        """A checked table of a sequence whose first `num_sealed` blocks are complete and hold the nodes of `path`."""
        new = [entry for entry in table if pool.is_free(entry.block)]
        for _, block, _ in table if len(new) < len(table) else ():
            if not pool.is_free(block):
                self.cases[Case.HELD_SEALED if pool.is_cached(block) else Case.SHARED] += 1
                pool.pin(block)
        pool.restore_held([ReservedBlock(block, generation) for _, block, generation in new])
        blocks, num_before = self._blocks[pool.slot], len(self._blocks[pool.slot])
        for index, block, generation in new:
            if index < num_sealed:
                # Another block serves the hits of this content, or only the table states what the block holds.
                node = path[index]
                if node.block_hash is None:
                    tree.name(node)
                pool.seal(block, node)
                blocks[block] = node, generation
        num_complete = len(blocks) - num_before
        self.cases[Case.HELD_SEALED] += num_complete
        self.cases[Case.HELD_FILLING] += len(new) - num_complete

    def _enter(self, attempts: Fencing, sequence: Sequence) -> Case:
        """Enter the sequence among the attempts: of those on several workers the largest stays live."""
        others = attempts.living(sequence.key.sequence_id)
        attempts.add(sequence)
        if any(other.key.attempt >= sequence.key.attempt for other in others):
            attempts.fence(sequence)
            return Case.FENCED
        return Case.FENCES if others else Case.LIVE

    def _require_free(self, group: int, block: int, generation: int) -> None:
        self._require_known(group, block, generation)
        pool = self._session.pools[group]
        if not pool.is_free(block) or block in self._blocks[group]:
            _refuse_twice(block)

    def _require_known(self, group: int, block: int, generation: int) -> None:
        """Refuse a block that the pool does not have, or a generation that nobody has given."""
        pool = self._session.pools[group]
        if not 0 < block < pool.num_blocks:
            _refuse("blocks", f"block {block} does not exist: the pool has blocks 1 to {pool.num_blocks - 1}")
        if not 0 < generation <= self._last_stamp:
            _refuse(
                "blocks", f"block {block} has generation {generation:#x}, which no manager up to this one has given"
            )


def _refuse_twice(block: int) -> NoReturn:
    _refuse("blocks", f"block {block} is reported twice, in different places")


def _num_blockless(run: ContentRun, keeping: Collection[int]) -> int:
    """Contents of a chain that no block of these groups holds."""
    lists = [one.blocks for one in run.blocks if one.group in keeping]
    if len(lists) == 1:
        return lists[0].count(0)
    return run.num_contents - sum(map(any, zip(*lists, strict=False)))


def _refuse(field: str, message: str) -> NoReturn:
    raise Refusal(Reason.BAD_REPORT, f"the report is refused: {message}", field=field)
