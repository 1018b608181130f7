"""A report of the blocks that a worker holds, for a manager that does not know them, sent in parts.

First comes a snapshot, taken when the session opens, of what is in use: sequences with their tables, the reserve, and which blocks
are idle. Later changes are stated by Append and Free as usual. Then the session is live, and what the idle blocks hold follows in
the background: of each the present state, since a call between two parts may have given it to somebody else. Parts are built one by
one, so that the engine never waits long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, common_pb2

from .entry import Entry, add_entries, add_spare
from .ledger import BlockLedger, Content, WholeContent
from .reserve import SpareBlock
from .sequence import CacheSequence

_MAX_CONTENTS = 2048
"""Table entries in one part, which the manager applies in a few milliseconds."""
_MAX_BACKGROUND_CONTENTS = 512
"""Contents in one part once the session is live: another call, which may be about to wait for it, waits as short as that."""
_MAX_BYTES = 4 << 20
"""Bytes of tokens in one part."""
_MAX_BLOCKS = 16384
"""Reserved or idle blocks in one part; they cost the manager little."""


class _SequenceSnapshot(NamedTuple):
    key: common_pb2.SequenceKey
    root: common_pb2.Root
    tokens: bytes
    num_computed_tokens: int
    num_cached_tokens: int
    tables: list[list[Entry]]
    """Entries in each group, scratch blocks left out."""
    scratch: list[list[SpareBlock]]
    boundaries: tuple[int, ...]
    encoder_computed: bool


class Report:
    """The report to the manager of a new session, part by part. `sequences`: those that hold blocks and that it is to know; their
    present state counts as acknowledged. `reserves`: spare blocks of each group, and the blocks of sequences that it is not to know
    yet."""

    MOST_CALLS_SINCE = 3
    """Other calls after which a part is sent, whatever else is due."""

    def __init__(
        self, ledgers: tuple[BlockLedger, ...], sequences: list[CacheSequence], reserves: list[list[SpareBlock]]
    ) -> None:
        self.is_live = False
        """Whether the manager serves the session, so that other calls may be made."""
        self.retry_at = 0.0
        """No part before this time, in monotonic seconds, once the session is live."""
        self.num_calls_since = 0
        """Other calls since the last part, once the session is live."""
        self._ledgers = ledgers
        self._generations = [ledger.generations() for ledger in ledgers]
        """Generations at the snapshot: a block that has another one by now holds something else."""
        self._idle = [ledger.idle_blocks() for ledger in ledgers]
        self._reserves = reserves
        self._reserved = [{block for block, _ in reserve} for reserve in reserves]
        self._sequences = [
            _SequenceSnapshot(
                sequence.key,
                sequence.root,
                pack_tokens(sequence.tokens),
                sequence.num_computed_tokens,
                sequence.num_cached_tokens,
                [table.entries() for table in sequence.group_tables],
                [table.scratch() for table in sequence.group_tables],
                # A boundary where the sequence is just now is for the worker alone: it is named after the next step.
                tuple(ahead for ahead in sequence.boundaries if ahead > sequence.num_computed_tokens),
                sequence.encoder_computed,
            )
            for sequence in sequences
        ]
        units = [(ledger, unit) for ledger in ledgers for unit in ledger.whole_contents()]
        self._used_units = [(ledger, unit) for ledger, unit in units if ledger.is_used(unit.blocks[0])]
        self._idle_units = [(ledger, unit) for ledger, unit in units if not ledger.is_used(unit.blocks[0])]
        for sequence in sequences:
            sequence.acked_tokens = len(sequence.tokens)
            sequence.acked_computed_tokens = sequence.num_computed_tokens
        self._numbers: dict[Content, int] = {}
        """Numbers of the contents sent so far, from 1."""
        self._parts: Iterator[cache_pb2.ReportRequest] = self._build()
        self._num_sent = 0
        self._part = next(self._parts)

    @property
    def part(self) -> cache_pb2.ReportRequest:
        """The part to send, without its uplink."""
        return self._part

    def next_part(self) -> bool:
        """Go on to the next part, since the manager has applied this one; returns whether it was the last."""
        self.is_live = self.is_live or self._part.live
        if self._part.last:
            self._parts = iter(())  # breaks the reference cycle of this object and its generator
            return True
        self._num_sent += 1
        self._part = next(self._parts)
        self._part.part = self._num_sent
        return False

    def _build(self) -> Iterator[cache_pb2.ReportRequest]:
        yield from self._unit_parts(self._used_units)
        yield from self._sequence_parts()
        parts = _block_parts(self._reserves, self._idle)
        part = next(parts, cache_pb2.ReportRequest())
        for following in parts:
            yield part
            part = following
        part.live, part.last = True, not any(self._idle)
        yield part
        if part.last:
            return
        yield from self._content_parts()
        yield from self._unit_parts(self._idle_units)
        yield from _block_parts([], [ledger.idle_blocks() for ledger in self._ledgers])
        yield cache_pb2.ReportRequest(last=True)

    def _content_parts(self) -> Iterator[cache_pb2.ReportRequest]:
        """Chains from contents already sent down to each block that was idle, so that parents come before their children."""
        numbers, num_groups = self._numbers, len(self._generations)
        part = cache_pb2.ReportRequest()
        run = cache_pb2.ContentRun()
        tokens: list[bytes] = []
        count = num_bytes = 0
        for ledger, idle in zip(self._ledgers, self._idle, strict=True):
            for block in idle if ledger.is_chained else ():
                last = ledger.content(block)
                if last is None or last in numbers or not self._is_as_before(ledger.group, block):
                    continue
                path: list[Content] = []
                above: Content | None = last
                while above is not None and above not in numbers:
                    path.append(above)
                    above = above.parent
                for content in reversed(path):
                    parent = 0 if content.parent is None else numbers[content.parent]
                    if not tokens or parent != len(numbers):  # not the child of the one before
                        if tokens:
                            run.tokens = b"".join(tokens)
                            tokens = []
                        run = part.contents.add(parent=parent)
                        for group in range(num_groups):
                            run.blocks.add(group=group, tier=common_pb2.TIER_DEVICE)
                        if not parent:
                            run.root.CopyFrom(content.root)
                    for group, group_blocks in enumerate(run.blocks):
                        block = content.blocks[group]
                        if block and not self._is_as_before(group, block):
                            block = 0  # the call that computes it again, or has, states it
                        group_blocks.block_ids.append(block)
                        group_blocks.generations.append(self._generations[group][block])
                    tokens.append(content.tokens)
                    numbers[content] = len(numbers) + 1
                    count += 1
                    num_bytes += len(content.tokens)
                    if count >= _MAX_BACKGROUND_CONTENTS or num_bytes >= _MAX_BYTES:
                        run.tokens = b"".join(tokens)
                        yield part
                        part = cache_pb2.ReportRequest()
                        tokens = []
                        count = num_bytes = 0
        if count:
            run.tokens = b"".join(tokens)
            yield part

    def _is_as_before(self, group: int, block: int) -> bool:
        """Whether the block has not been granted since the snapshot, and was not of the reserve then."""
        generation = self._ledgers[group].generation(block)
        return generation == self._generations[group][block] and block not in self._reserved[group]

    def _unit_parts(self, units: list[tuple[BlockLedger, WholeContent]]) -> Iterator[cache_pb2.ReportRequest]:
        part = cache_pb2.ReportRequest()
        count = 0
        for ledger, (content, blocks) in units:
            if any(ledger.content(block) is not content for block in blocks):
                continue  # granted since
            reported = part.units.add(root=content.root)
            reported.blocks.group, reported.blocks.tier = ledger.group, common_pb2.TIER_DEVICE
            reported.blocks.block_ids.extend(blocks)
            reported.blocks.generations.extend(map(ledger.generation, blocks))
            count += len(blocks)
            if count >= _MAX_CONTENTS:
                yield part
                part = cache_pb2.ReportRequest()
                count = 0
        if count:
            yield part

    def _sequence_parts(self) -> Iterator[cache_pb2.ReportRequest]:
        part = cache_pb2.ReportRequest()
        count = num_bytes = 0
        for key, root, tokens, num_computed, num_cached, tables, scratch, boundaries, encoded in self._sequences:
            reported = part.sequences.add(
                key=key,
                root=root,
                tokens=tokens,
                num_computed_tokens=num_computed,
                num_cached_tokens=num_cached,
                boundaries=boundaries,
                encoder_computed=encoded,
            )
            for group, table in enumerate(tables):
                add_entries(reported.tables, group, table)
                count += len(table)
            for group, blocks in enumerate(scratch):
                add_spare(reported.scratch, group, blocks)
                count += len(blocks)
            num_bytes += len(tokens)
            if count >= _MAX_CONTENTS or num_bytes >= _MAX_BYTES:
                yield part
                part = cache_pb2.ReportRequest()
                count = num_bytes = 0
        if part.sequences:
            yield part


def _block_parts(reserves: list[list[SpareBlock]], idle: list[list[int]]) -> Iterator[cache_pb2.ReportRequest]:
    """Parts with the reserved and the idle blocks of each group, in order."""
    most = max(1, _MAX_BLOCKS // (len(reserves) + len(idle)))
    lengths = [*map(len, reserves), *map(len, idle)]
    for begin in range(0, max(lengths, default=0), most):
        part = cache_pb2.ReportRequest()
        for group, reserve in enumerate(reserves):
            add_spare(part.reserve, group, reserve[begin : begin + most])
        for group, blocks in enumerate(idle):
            if blocks[begin:]:
                block_ids = blocks[begin : begin + most]
                part.idle_blocks.add(group=group, tier=common_pb2.TIER_DEVICE, block_ids=block_ids)
        yield part
