"""A report of the blocks that a worker holds, for a manager that does not know them: a snapshot, sent in parts.

The snapshot is taken when the session opens; later changes are stated by Append and Free as usual. Parts are built one by one, so
that the engine never waits long.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, common_pb2

from .entry import Entry, add_entries
from .ledger import BlockLedger, Content
from .reserve import ReservedBlock
from .sequence import CacheSequence
from .units import Unit, UnitLedger

_MAX_CONTENTS = 2048
"""Contents or table entries in one part, which the manager applies in a few milliseconds."""
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
    """By group."""
    scratch: list[list[ReservedBlock]]
    boundaries: tuple[int, ...]
    encoder_computed: bool


class Report:
    """A snapshot for the manager. `sequences`: those that hold blocks and that it is to know; their present state counts as
    acknowledged. `reserves`: by group, as `ledgers`; with the blocks of other sequences."""

    def __init__(
        self, ledgers: tuple[BlockLedger, ...], sequences: list[CacheSequence], reserves: list[list[ReservedBlock]]
    ) -> None:
        self._contents = [ledger.contents() for ledger in ledgers]
        self._generations = [ledger.generations() for ledger in ledgers]
        self._idle = [ledger.idle_blocks() for ledger in ledgers]
        self._reserves = reserves
        for contents, reserve in zip(self._contents, reserves, strict=True):
            for block, _ in reserve:
                contents[block] = None  # of a fork that is stated later: what it has completed is told then
        self._sequences = [
            _SequenceSnapshot(
                sequence.key,
                sequence.root,
                pack_tokens(sequence.tokens),
                sequence.num_computed_tokens,
                sequence.num_cached_tokens,
                [_entries(sequence, group) for group in range(len(sequence.tables))],
                [[] if scratch is None else scratch.scratch() for scratch in sequence.scratch],
                sequence.boundaries,
                sequence.encoder_computed,
            )
            for sequence in sequences
        ]
        self._units: list[tuple[int, Unit]] = [
            (ledger.group, unit) for ledger in ledgers if isinstance(ledger, UnitLedger) for unit in ledger.units()
        ]
        """With their group."""
        for sequence in sequences:
            sequence.encoder_acked = sequence.encoder_computed
            sequence.acked_tokens = len(sequence.tokens)
            sequence.acked_entries = sequence.num_entries
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
        """The manager has applied the part; returns whether it was the last."""
        if self._part.last:
            self._parts = iter(())  # breaks the reference cycle of this object and its generator
            return True
        self._num_sent += 1
        self._part = next(self._parts)
        self._part.part = self._num_sent
        return False

    def _build(self) -> Iterator[cache_pb2.ReportRequest]:
        yield from self._content_parts()
        yield from self._unit_parts()
        yield from self._sequence_parts()
        for group, (reserve, idle) in enumerate(zip(self._reserves, self._idle, strict=True)):
            for begin in range(0, max(len(reserve), len(idle)), _MAX_BLOCKS):
                part = cache_pb2.ReportRequest()
                part.idle_blocks.add(
                    group=group, tier=common_pb2.TIER_DEVICE, block_ids=idle[begin : begin + _MAX_BLOCKS]
                )
                reserved = reserve[begin : begin + _MAX_BLOCKS]
                _add_run(part.reserve, group, [r.block for r in reserved], [r.generation for r in reserved])
                yield part
        yield cache_pb2.ReportRequest(last=True)

    def _content_parts(self) -> Iterator[cache_pb2.ReportRequest]:
        """Chains from contents already sent down to each complete block, so that parents come before their children. No block is
        granted during a report, so each content keeps its block."""
        numbers, num_groups = self._numbers, len(self._generations)
        part = cache_pb2.ReportRequest()
        run = cache_pb2.ContentRun()
        tokens: list[bytes] = []
        count = num_bytes = 0
        for last in chain.from_iterable(self._contents):
            if last is None or last in numbers:
                continue
            path: list[Content] = []
            above: Content | None = last
            while above is not None and above not in numbers:
                path.append(above)
                above = above.parent
            for content in reversed(path):
                parent = 0 if content.parent is None else numbers[content.parent]
                if not tokens or parent != len(numbers):  # not the child of the one before
                    run.tokens = b"".join(tokens)
                    tokens = []
                    run = part.contents.add(parent=parent)
                    for group in range(num_groups):
                        run.blocks.add(group=group, tier=common_pb2.TIER_DEVICE)
                    if not parent:
                        run.root.CopyFrom(content.root)
                for group, held in enumerate(run.blocks):
                    block = content.blocks[group]
                    if self._contents[group][block] is not content:
                        block = 0  # none, or a window that was named since: the next calls state it
                    held.block_ids.append(block)
                    held.generations.append(self._generations[group][block])
                tokens.append(content.tokens)
                numbers[content] = len(numbers) + 1
                count += 1
                num_bytes += len(content.tokens)
                if count == _MAX_CONTENTS or num_bytes >= _MAX_BYTES:
                    run.tokens = b"".join(tokens)
                    yield part
                    part = cache_pb2.ReportRequest()
                    tokens = []
                    count = num_bytes = 0
        if count:
            run.tokens = b"".join(tokens)
            yield part

    def _unit_parts(self) -> Iterator[cache_pb2.ReportRequest]:
        part = cache_pb2.ReportRequest()
        count = 0
        for group, unit in self._units:
            reported = part.units.add(root=unit.root)
            reported.blocks.group, reported.blocks.tier = group, common_pb2.TIER_DEVICE
            reported.blocks.block_ids.extend(unit.unit_blocks)
            reported.blocks.generations.extend(self._generations[group][block] for block in unit.unit_blocks)
            count += len(unit.unit_blocks)
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
                _add_run(reported.scratch, group, [one.block for one in blocks], [one.generation for one in blocks])
                count += len(blocks)
            num_bytes += len(tokens)
            if count >= _MAX_CONTENTS or num_bytes >= _MAX_BYTES:
                yield part
                part = cache_pb2.ReportRequest()
                count = num_bytes = 0
        if part.sequences:
            yield part


def _entries(sequence: CacheSequence, group: int) -> list[Entry]:
    """What it has in a group, scratch blocks left out."""
    scratch = sequence.scratch[group] if sequence.scratch else None
    if scratch is not None:
        return [Entry(index, *reserved) for index, reserved in sorted(scratch.named.items())]
    return list(map(Entry, range(len(sequence.tables[group])), sequence.tables[group], sequence.generations[group]))


def _add_run(runs: object, group: int, blocks: list[int], generations: list[int]) -> None:
    if blocks:
        runs.add(group=group, tier=common_pb2.TIER_DEVICE, block_ids=blocks, generations=generations)  # type: ignore[attr-defined]
