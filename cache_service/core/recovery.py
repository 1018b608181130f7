"""Reports: what a worker holds from earlier sessions, restored: cached blocks, tables of live sequences, reserve.

The worker holds this truth: its earlier session is fenced, and nothing that the manager knew of it is used. A report comes in
parts, so that no part delays other calls for long, and is restored into the pool of the new session. Look-ups ignore that session
until the last part is applied; then one flag makes all of it visible.

What becomes of each thing that a report can state (`Case`): the table in docs/ARCHITECTURE.md, "Recovery".

A report that states two things of one block, or something that no worker can know, is refused and ends the session; the worker then
forgets all blocks and registers without state. A report of more than the budget leaves room for ends the same way.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import NoReturn

from . import units
from .copies import Holder
from .fencing import Fencing
from .messages import TOKEN_BYTES, ContentRun, Limits, ReportedSequence, ReportedUnit, ReportPart, Root
from .prefix_tree import Node, PrefixTree
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
        """Made when something needs it: a node that nothing needs would be pruned."""


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
        self._units: ReportedUnits | None = None
        """Of the group with cross attention, if there is one."""
        if session.unit_pool is not None:
            most = session.registration.layout.groups[session.unit_pool.slot].max_encoder_tokens
            self._units = ReportedUnits(session.unit_pool, -(-most // session.block_size))

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
            for block in blocks:
                # A duplicate is idle at the worker and free here; a block that a table names was idle when the list was made.
                if 0 < block < pool.num_blocks and pool.is_cached(block):
                    pool.touch(block)
        self.num_parts += 1

    def discard(self, budget: int) -> bool:
        """After the last part: drop at most `budget` contents, because all at once take long. Returns whether any are left."""
        # The last first, so that no chain falls link by link.
        del self._contents[max(0, len(self._contents) - budget) :]
        for blocks in self._blocks:
            for _ in range(min(budget, len(blocks))):
                blocks.popitem()
        return bool(self._contents or any(self._blocks))

    def _make_room(self, part: ReportPart, limits: Limits) -> None:
        """Grow the pools up to the highest block of the part, in steps that do not delay other calls for long. Refuses what the
        budget has no room for."""
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
        if any(block >= pool.num_blocks for pool, block in zip(pools, highest, strict=True)):
            return  # which is refused where it is named
        # A content without a block counts as one, so that all that a report makes the manager keep is counted.
        num_new = sum(_num_blockless(run, self._session.holder) for run in part.contents)
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
        num_blockless = _num_blockless(run, self._session.holder)
        self._session.account.declare(num_blockless)
        self._session.account.add_blocks(num_blockless)
        self._session.num_blockless_contents += num_blockless
        self.cases[Case.BLOCKLESS] += num_blockless
        parent = self._contents[run.parent - 1] if run.parent else None
        first = len(self._contents)
        for begin in range(0, count * step, step):
            parent = _Content(parent, run.root, run.tokens[begin : begin + step])
            self._contents.append(parent)
        chain = self._contents[first:]
        is_whole = self._are_whole(run)
        # Groups without a window first: their copies are what those of the others depend on.
        for group, blocks, generations in sorted(run.blocks, key=lambda one: self._session.holder.spans[one.group]):
            num_cached = num_blocks = 0
            for index, (content, block, generation) in enumerate(zip(chain, blocks, generations, strict=True)):
                if block and self._session.holder.spans[group] and not is_whole[index]:
                    # The worker does not know that it is of no use any more: what was before it is gone.
                    self._require_free(group, block, generation)
                    self.cases[Case.DEPENDENT] += 1
                elif block:
                    num_blocks += 1
                    num_cached += self._take_content(tree, content, group, block, generation)
            self.cases[Case.CACHED] += num_cached
            self.cases[Case.DUPLICATE] += num_blocks - num_cached

    def _are_whole(self, run: ContentRun) -> list[bool]:
        """For each content, whether every group without a window has a block that holds it."""
        has_all = [True] * run.num_contents
        if self._session.window_pools:
            blocks = {one.group: one.blocks for one in run.blocks}
            for slot in self._session.holder.full_slots:
                of_group = blocks.get(slot, (0,) * run.num_contents)
                has_all = [so_far and block != 0 for so_far, block in zip(has_all, of_group, strict=True)]
        return has_all

    def _take_content(self, tree: PrefixTree, content: _Content, group: int, block: int, generation: int) -> bool:
        """Returns whether the block serves hits; otherwise another one does."""
        self._require_free(group, block, generation)
        parent, node = content.parent, content.node
        if node is None:
            if parent is None or parent.node is None:
                node = self._node(tree, content)
            else:  # nearly always
                node = content.node = tree.intern(parent.node, content.tokens)
                tree.name(node)
        pool = self._session.pools[group]
        self._blocks[group][block] = node, generation
        if pool.copy_of(node):
            return False
        pool.restore_cached(block, generation, node)
        return True

    def _node(self, tree: PrefixTree, content: _Content) -> Node:
        """The node of a content, made together with its ancestors."""
        missing: list[_Content] = []
        at: _Content | None = content
        while at is not None and at.node is None:
            missing.append(at)
            at = at.parent
        node = at.node if at is not None else None
        for one in reversed(missing):
            if node is None:
                assert one.root is not None
                node = tree.intern_root(one.root, self._session.block_size)
            node = one.node = tree.intern(node, one.tokens)
            tree.name(node)
        assert node is not None
        return node

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
            self._require_free(unit.group, block, generation)
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
            for _, block, generation in table:
                pool.restore_held(block, generation)
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
            for index, block, generation in reported.tables[pool.slot]:
                self._take_entry(tree, pool.slot, block, generation, path[index] if index < num_sealed else None)
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
            for block, generation in reported.scratch[pool.slot]:
                pool.restore_held(block, generation)
                self.cases[Case.SCRATCH] += 1
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
        for index, block, generation in reported.tables[group]:
            complete = self._blocks[group].get(block)
            if block in seen:
                _refuse("sequences", f"block {block} is twice in the table of {reported.key.sequence_id!r}")
            seen.add(block)
            if complete is None:
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

    def _take_entry(self, tree: PrefixTree, group: int, block: int, generation: int, node: Node | None) -> None:
        """One entry of a checked table; `node`: what it holds if it is complete."""
        pool = self._session.pools[group]
        if not pool.is_free(block):
            self.cases[Case.HELD_SEALED if pool.is_cached(block) else Case.SHARED] += 1
            pool.pin(block)
            return
        pool.restore_held(block, generation)
        if node is None:
            self.cases[Case.HELD_FILLING] += 1
            return
        # Another block serves the hits of this content, or only the table states what the block holds.
        tree.name(node)
        pool.seal(block, node)
        self._blocks[group][block] = node, generation
        self.cases[Case.HELD_SEALED] += 1

    def _enter(self, attempts: Fencing, sequence: Sequence) -> Case:
        """Enter the sequence among the attempts: of those on several workers the largest stays live."""
        others = attempts.living(sequence.key.sequence_id)
        attempts.add(sequence)
        if any(other.key.attempt >= sequence.key.attempt for other in others):
            attempts.fence(sequence)
            return Case.FENCED
        return Case.FENCES if others else Case.LIVE

    def _require_free(self, group: int, block: int, generation: int) -> None:
        pool = self._session.pools[group]
        if not 0 < block < pool.num_blocks:
            _refuse("blocks", f"block {block} does not exist: the pool has blocks 1 to {pool.num_blocks - 1}")
        if not 0 < generation <= self._last_stamp:
            _refuse(
                "blocks", f"block {block} has generation {generation:#x}, which no manager up to this one has given"
            )
        if not pool.is_free(block) or block in self._blocks[group]:
            _refuse("blocks", f"block {block} is reported twice, in different places")


def _num_blockless(run: ContentRun, holder: Holder) -> int:
    """Contents of a chain that no block holds which will be kept: one of a group with a window is kept next to others only."""
    slots = holder.full_slots or holder.window_slots
    lists = [one.blocks for one in run.blocks if one.group in slots]
    if len(lists) == 1:
        return lists[0].count(0)
    return run.num_contents - sum(map(any, zip(*lists, strict=False)))


def _refuse(field: str, message: str) -> NoReturn:
    raise Refusal(Reason.BAD_REPORT, f"the report is refused: {message}", field=field)
