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
from collections.abc import Collection, Iterable

from .block_pool import BlockPool
from .fencing import Fencing
from .messages import (
    TOKEN_BYTES,
    ContentRun,
    Limits,
    ReportedBlocks,
    ReportedSequence,
    ReportPart,
    ReservedBlock,
    Root,
    TableEntry,
)
from .prefix_tree import Node, PrefixTree, RootNode
from .refusal import Reason, Refusal
from .restored import Case, Restored, refuse, refuse_twice
from .sequence import Sequence
from .session import Session


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
        self._contents: list[_Content] = []
        """Contents in the order of their numbers, which begin with 1."""
        self._restored = tuple(Restored(pool, last_stamp, self.cases) for pool in session.pools)
        """What was restored in each group, by group."""
        self._is_full = False
        """The budget has no room for more contents: the worker is served, and the rest of its cache is left out."""
        self._keeping = frozenset(session.holder.whole_slots or session.holder.dependent_slots)
        """Groups of which a block keeps a content: one of a dependent group is kept next to others only."""

    @property
    def _is_live(self) -> bool:
        """Whether the worker is served already."""
        return not self._session.recovering

    def apply(self, tree: PrefixTree, attempts: Fencing, part: ReportPart, limits: Limits) -> None:
        """Apply the next part. Raises Refusal: RECOVERING (send the same part again; no visible state has changed), BAD_REPORT,
        TOO_MANY_BLOCKS, TOO_MANY_TOKENS (the session must be ended)."""
        num_groups = len(self._session.pools)
        contents = [(one.group, one.blocks) for run in part.contents for one in run.blocks]
        used = _used(part)
        highest = max([len(part.idle_blocks) - 1, *(group for group, _ in (*contents, *used))])
        if highest >= num_groups:
            refuse("group", f"the worker is registered with {num_groups} groups, got group {highest}")
        num_contents = sum(run.num_contents for run in part.contents)
        if num_contents > limits.max_contents_per_report_part:
            refuse("contents", f"at most {limits.max_contents_per_report_part} contents per part, got {num_contents}")
        num_blocks = sum(map(len, part.idle_blocks)) + sum(len(blocks) for _, blocks in used)
        if num_blocks > limits.max_blocks_per_report_part:
            refuse("blocks", f"at most {limits.max_blocks_per_report_part} blocks per part, got {num_blocks}")
        if self._is_live and (part.sequences or any(part.reserve)):
            refuse("sequences", "sequences and reserve come before the worker is served, or in the part that is live")
        self._make_room(part, (*contents, *used), limits)
        for run in part.contents:
            self._take_contents(tree, run)
        for unit in part.units:
            if unit.root.model_fingerprint != self._fingerprint:
                refuse("units", f"a unit needs a root with the model fingerprint {self._fingerprint!r}")
            group = self._session.by_slot[unit.group]
            group.restore_unit(tree, self._restored[unit.group], unit, self._is_live)
        for reported in part.sequences:
            missing = ((),) * (num_groups - len(reported.tables))
            no_scratch = ((),) * (num_groups - len(reported.scratch))
            reported = reported._replace(tables=reported.tables + missing, scratch=reported.scratch + no_scratch)
            self._take_sequence(tree, attempts, reported, limits)
        for restored, reserved in zip(self._restored, part.reserve, strict=False):
            for block, generation in reserved:
                restored.require_free(block, generation)
                restored.pool.restore_reserved(block, generation)
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
        for restored in self._restored:
            for _ in range(min(budget, len(restored.blocks))):
                restored.blocks.popitem()
        is_expecting = [pool.stop_expecting(budget) for pool in self._session.pools]
        return bool(self._contents or any(one.blocks for one in self._restored) or any(is_expecting))

    def _make_room(self, part: ReportPart, named: Iterable[tuple[int, Collection[int]]], limits: Limits) -> None:
        """Grow the pools up to the highest block of the part, in steps that do not delay other calls for long. Refuses what the
        budget has no room for."""
        if self._is_live:
            return  # no block is restored that has not come before
        pools = self._session.pools
        highest = [0] * len(pools)
        for group, blocks in (*named, *(() if part.last else enumerate(part.idle_blocks))):
            highest[group] = max(highest[group], max(blocks, default=0))
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
            refuse(
                "contents", f"a chain of {count} contents needs {count * step} bytes of tokens, got {len(run.tokens)}"
            )
        for group, blocks, generations in run.blocks:
            if len(blocks) != count or len(generations) != count:
                refuse(
                    "contents",
                    f"a chain of {count} contents needs as many blocks and generations of group {group}, got {len(blocks)} and "
                    f"{len(generations)}",
                )
            if any(blocks) and not self._session.by_slot[group].holds_nodes:
                refuse("contents", f"the blocks of group {group} hold an encoder's output: they come as units")
        if not 0 <= run.parent <= len(self._contents):
            refuse("contents", f"content {len(self._contents) + 1} has the parent {run.parent}, which has not come yet")
        if not run.parent and (run.root is None or run.root.model_fingerprint != self._fingerprint):
            refuse(
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
        # Whole groups first: their copies are what those of the others depend on.
        for of_group in sorted(run.blocks, key=lambda one: not self._session.by_slot[one.group].is_whole):
            self._take_blocks(tree, chain, of_group, is_kept)
        self._count_blockless(count - sum(is_kept))

    def _take_blocks(
        self, tree: PrefixTree, chain: list[_Content], reported: ReportedBlocks, is_kept: bytearray
    ) -> None:
        """The blocks of one group that hold these contents."""
        known, holder, group = self._restored[reported.group], self._session.holder, reported.group
        is_live, pool, blocks, is_keeping = self._is_live, known.pool, known.blocks, group in self._keeping
        needs_whole = self._session.by_slot[group].is_dependent and bool(holder.whole_slots)
        restored: list[tuple[int, int, Node]] = []
        try:
            for index, block in enumerate(reported.blocks):
                if not block:
                    continue
                content, generation = chain[index], reported.generations[index]
                if not (0 < block < pool.num_blocks and 0 < generation <= known.last_stamp):
                    known.require_known(block, generation)
                if not (pool.take_expected(block) if is_live else pool.is_free(block) and block not in blocks):
                    if self._is_known_already(content, group, block, generation):
                        is_kept[index] |= is_keeping
                    continue
                node = content.live_node
                if needs_whole and (node is None or not holder.is_complete(node.blocks_in(holder))):
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
            refuse_twice(block)
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

    # -- sequences

    def _take_sequence(self, tree: PrefixTree, attempts: Fencing, reported: ReportedSequence, limits: Limits) -> None:
        session, key = self._session, reported.key
        size = session.block_size
        num_tokens, rest = divmod(len(reported.tokens), TOKEN_BYTES)
        self._check_sequence(reported, num_tokens, rest, limits)
        root = tree.intern_root(reported.root, size)
        # Each node has a block: of tokens for which the table has none no nodes are made.
        num_sealed = reported.num_computed_tokens // size
        lengths = [len(reported.tables[group.slot]) for group in session.whole]
        num_full = min([num_tokens // size, *lengths]) if lengths else num_sealed
        path = tree.match(root, reported.tokens, size, num_full)
        try:
            for group in session.groups:
                group.check_reported(self._restored[group.slot], reported, root, path, num_sealed)
        except Refusal:
            tree.prune(root)
            raise
        sequence = Sequence(key, session, root, reported.tokens)
        tree.extend(path, root, reported.tokens, size, num_full)
        (path[-1] if path else root).num_sequences += 1
        for node in path[num_sealed:]:
            node.add_leader(sequence)
        sequence.nodes = path
        sequence.tables = [None] * len(session.groups)
        sequence.num_named = [0] * len(session.groups)
        for group in session.groups:
            group.restore(tree, self._restored[group.slot], sequence, reported, num_sealed)
        if session.dependents:
            sequence.boundaries = tuple(sorted(one // size for one in reported.boundaries))
        sequence.num_sealed = num_sealed
        sequence.num_computed_tokens = reported.num_computed_tokens
        sequence.num_cached_tokens = reported.num_cached_tokens
        session.account.add_tokens(num_tokens)
        session.sequences[key.sequence_id, key.attempt] = sequence
        self.cases[self._enter(attempts, sequence)] += 1

    def _check_sequence(self, reported: ReportedSequence, num_tokens: int, rest: int, limits: Limits) -> None:
        session, key = self._session, reported.key
        size = session.block_size
        name = f"sequence {key.sequence_id!r} attempt {key.attempt}"
        if not 1 <= len(key.sequence_id.encode()) <= limits.max_id_bytes or key.attempt < 1:
            refuse("sequences", f"{name}: needed an id of 1 to {limits.max_id_bytes} bytes and an attempt from 1 on")
        if (key.sequence_id, key.attempt) in session.sequences:
            refuse("sequences", f"{name} is reported twice")
        if len(session.sequences) >= limits.max_sequences_per_session:
            refuse("sequences", f"at most {limits.max_sequences_per_session} sequences per worker")
        if rest or not 0 < num_tokens <= limits.max_tokens_per_sequence:
            refuse("sequences", f"{name}: needed 1 to {limits.max_tokens_per_sequence} tokens")
        lengths = [len(reported.tables[group.slot]) for group in session.whole] or [-(-num_tokens // size)]
        if max(lengths) > limits.max_blocks_per_sequence:
            refuse("sequences", f"{name}: at most {limits.max_blocks_per_sequence} blocks, got {max(lengths)}")
        session.account.require_tokens(num_tokens)
        if reported.root.model_fingerprint != self._fingerprint:
            refuse("sequences", f"{name} has another model fingerprint than the worker")
        num_computed = reported.num_computed_tokens
        if not reported.num_cached_tokens <= num_computed <= min(num_tokens, min(lengths) * size):
            refuse(
                "sequences",
                f"{name}: {num_computed} tokens cannot be computed, {reported.num_cached_tokens} of them cached, "
                f"of {num_tokens} in {min(lengths)} blocks",
            )
        for group in session.by_slot:
            group.check_places(name, reported, num_computed // size)
        if reported.encoder_computed and not session.longest_input:
            refuse("sequences", "the worker is registered without cross attention")
        most = limits.max_boundaries
        if len(reported.boundaries) > most or any(one <= num_computed for one in reported.boundaries):
            refuse("sequences", f"{name}: needed at most {most} boundaries, all of them still to come")

    def _enter(self, attempts: Fencing, sequence: Sequence) -> Case:
        """Enter the sequence among the attempts: of those on several workers the largest stays live."""
        others = attempts.living(sequence.key.sequence_id)
        attempts.add(sequence)
        if any(other.key.attempt >= sequence.key.attempt for other in others):
            attempts.fence(sequence)
            return Case.FENCED
        return Case.FENCES if others else Case.LIVE


def _num_blockless(run: ContentRun, keeping: Collection[int]) -> int:
    """Contents of a chain that no block of these groups holds."""
    lists = [one.blocks for one in run.blocks if one.group in keeping]
    if len(lists) == 1:
        return lists[0].count(0)
    return run.num_contents - sum(map(any, zip(*lists, strict=False)))


def _used(part: ReportPart) -> list[tuple[int, list[int]]]:
    """The blocks that are in use, and those of units, with their group."""
    lists: list[tuple[int, Iterable[TableEntry | ReservedBlock]]] = [(unit.group, unit.blocks) for unit in part.units]
    for groups in (part.reserve, *(groups for one in part.sequences for groups in (one.tables, one.scratch))):
        lists += enumerate(groups)
    return [(group, [entry.block for entry in entries]) for group, entries in lists]
