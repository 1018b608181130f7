"""Converts the calls of workers from protobuf to core messages and back. Pure functions.

Decoding checks the shape: other tiers, groups out of bounds, lists of different length and missing parts are refused as BAD_FIELD
or UNSUPPORTED. All other checks are the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from kvpool.v1 import cache_pb2, common_pb2

from . import status
from .core.messages import (
    AllocateItem,
    AllocateOutcome,
    Appended,
    AppendItem,
    AppendOutcome,
    BlockCounts,
    Boundary,
    ContentRun,
    DownlinkEntry,
    ForkItem,
    Grant,
    Granted,
    Limits,
    Registration,
    Reply,
    ReportedBlocks,
    ReportedSequence,
    ReportedUnit,
    ReportPart,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    Stop,
    TableEntry,
    Uplink,
    Wait,
    WorkerLoad,
)
from .core.refusal import Refusal, bad_field
from .core.session_key import SessionKey
from .group_codec import TIER, check_tier, decode_config

Message = TypeVar("Message")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

MAX_GROUPS = Limits().max_groups
"""Limit of a group's number, which bounds the lists that decoding makes."""


class DecodedItems(NamedTuple, Generic[Item]):
    """A decoded batch: the well-formed items, and the refusals of the others by their place in the request."""

    items: list[Item]
    refusals: dict[int, Refusal]

    def merge(self, outcomes: Iterable[Outcome]) -> list[Outcome | Refusal]:
        """Return an outcome for each item of the request, in its order. `outcomes` are those of the well-formed items."""
        rest = iter(outcomes)
        count = len(self.items) + len(self.refusals)
        return [self.refusals[i] if i in self.refusals else next(rest) for i in range(count)]


def decode_batch(messages: Iterable[Message], decode: Callable[[Message], Item]) -> DecodedItems[Item]:
    """Decode each item; a malformed one affects no other."""
    batch: DecodedItems[Item] = DecodedItems([], {})
    for index, message in enumerate(messages):
        try:
            batch.items.append(decode(message))
        except Refusal as refusal:
            # Without its traceback, which would be a cycle: automatic collection is off.
            batch.refusals[index] = refusal.with_traceback(None)
    return batch


# -- the parts


def _check_place(group: int, tier: common_pb2.Tier, field: str) -> None:
    check_tier(tier, field)
    if group >= MAX_GROUPS:
        raise bad_field(f"{field}.group", f"a worker has at most {MAX_GROUPS} groups, got group {group}")


def _check_run(run: common_pb2.BlockRun, field: str) -> None:
    _check_place(run.group, run.tier, field)
    if len(run.block_ids) != len(run.generations):
        raise bad_field(
            field,
            f"block_ids and generations must have equal length, got {len(run.block_ids)} and {len(run.generations)}",
        )


def _lengthen(groups: list[Item], group: int, empty: Item) -> None:
    """Extend a list that is indexed by group so that it has the group."""
    while len(groups) <= group:
        groups.append(empty)


def _decode_key(message: common_pb2.SequenceKey) -> SequenceKey:
    return SequenceKey(message.sequence_id, message.attempt, message.round)


def decode_root(message: common_pb2.Root) -> Root:
    """Decode a root. The core checks the lengths where they matter."""
    return Root(message.model_fingerprint, message.adapter, message.tenant_salt, message.input_digest)


def encode_unsalted_root(root: Root) -> common_pb2.Root:
    """Encode a root without its salt, for peers that may not learn it."""
    return common_pb2.Root(
        model_fingerprint=root.model_fingerprint, adapter=root.adapter, input_digest=root.input_digest
    )


def decode_load(message: common_pb2.WorkerLoad) -> WorkerLoad:
    """Decode a worker's load."""
    return WorkerLoad(message.num_running, message.num_waiting, message.num_uncomputed_tokens)


def encode_key(key: SequenceKey) -> common_pb2.SequenceKey:
    """Encode a sequence's key."""
    return common_pb2.SequenceKey(sequence_id=key.sequence_id, attempt=key.attempt, round=key.round)


def encode_load(load: WorkerLoad) -> common_pb2.WorkerLoad:
    """Encode a worker's load."""
    return common_pb2.WorkerLoad(**load._asdict())


def encode_counts(counts: Iterable[BlockCounts]) -> list[common_pb2.BlockCounts]:
    """Encode the counts of a worker's pools, by group."""
    return [common_pb2.BlockCounts(group=group, tier=TIER, **pool._asdict()) for group, pool in enumerate(counts)]


def _encode_run(group: int, start_index: int, blocks: Sequence[int], generations: Sequence[int]) -> common_pb2.BlockRun:
    return common_pb2.BlockRun(
        group=group, tier=TIER, start_index=start_index, block_ids=blocks, generations=generations
    )


# -- sessions


def decode_registration(request: cache_pb2.RegisterRequest) -> Registration:
    """Decode a worker's registration. Raises Refusal: BAD_FIELD, UNSUPPORTED."""
    return Registration(
        worker_id=request.worker_id,
        incarnation=request.incarnation,
        register_no=request.register_no,
        address=request.address,
        model_name=request.model_name,
        model_fingerprint=request.model_fingerprint,
        layout=decode_config(request.kv_cache_config),
        max_model_len=request.max_model_len,
        engine=request.engine,
        holds_state=request.holds_state,
        process_key=request.process_key,
        predecessor_key=request.predecessor_key,
        facts_digest=request.facts_digest,
    )


# -- the link


def decode_uplink(
    request: cache_pb2.AllocateRequest
    | cache_pb2.AppendRequest
    | cache_pb2.ForkRequest
    | cache_pb2.FreeRequest
    | cache_pb2.ReportRequest,
) -> Uplink:
    """Decode the head of a mutating call. Raises Refusal: BAD_FIELD."""
    if not request.HasField("uplink"):
        raise bad_field("uplink", "a mutating call needs its session and call_no")
    message = request.uplink
    wishes: list[int | None] = []
    for index, wish in enumerate(message.reserve_wishes):
        _check_place(wish.group, wish.tier, f"uplink.reserve_wishes[{index}]")
        _lengthen(wishes, wish.group, None)
        if wishes[wish.group] is not None:
            raise bad_field("uplink.reserve_wishes", f"at most one per group, got two of group {wish.group}")
        wishes[wish.group] = wish.num_blocks
    returned = _by_group(message.returned, "uplink.returned", _blocks)
    key = SessionKey(message.session_key)
    return Uplink(message.session, message.call_no, message.downlink_ack, tuple(wishes), returned, key)


def _by_group(
    runs: Iterable[common_pb2.BlockRun], field: str, decode: Callable[[common_pb2.BlockRun], tuple[Item, ...]]
) -> tuple[tuple[Item, ...], ...]:
    groups: list[tuple[Item, ...]] = []
    for index, run in enumerate(runs):
        _check_run(run, f"{field}[{index}]")
        _lengthen(groups, run.group, ())
        groups[run.group] += decode(run)
    return tuple(groups)


def _blocks(run: common_pb2.BlockRun) -> tuple[ReservedBlock, ...]:
    """A run as a set of blocks."""
    return tuple(map(ReservedBlock, run.block_ids, run.generations))


def _entries(run: common_pb2.BlockRun) -> tuple[TableEntry, ...]:
    """A run as a piece of a block table."""
    return tuple(map(TableEntry, count(run.start_index), run.block_ids, run.generations))


def _encode_entry(entry: DownlinkEntry) -> cache_pb2.DownlinkEntry:
    number, content = entry
    if isinstance(content, Grant):
        run = _encode_run(content.group, 0, content.blocks, (content.generation,) * len(content.blocks))
        return cache_pb2.DownlinkEntry(number=number, grant=run)
    if isinstance(content, Stop):
        return cache_pb2.DownlinkEntry(number=number, stop=encode_key(content.key))
    if isinstance(content, Boundary):
        boundary = cache_pb2.BoundaryOrder(key=encode_key(content.key), num_tokens=content.num_tokens)
        return cache_pb2.DownlinkEntry(number=number, boundary=boundary)
    grace = content.grace_seconds
    order = cache_pb2.DrainOrder(grace_ms=None if grace is None else round(grace * 1000))
    return cache_pb2.DownlinkEntry(number=number, drain=order)


def encode_downlink(reply: Reply) -> cache_pb2.Downlink:
    """Encode the downlink, which ends every reply to a worker."""
    return cache_pb2.Downlink(entries=map(_encode_entry, reply.entries), counts=encode_counts(reply.counts))


# -- reports


def decode_report(request: cache_pb2.ReportRequest) -> ReportPart:
    """Decode one part of a worker's report. Raises Refusal: BAD_FIELD."""
    return ReportPart(
        part=request.part,
        last=request.last,
        contents=tuple(_decode_contents(index, run) for index, run in enumerate(request.contents)),
        sequences=tuple(_decode_reported(index, sequence) for index, sequence in enumerate(request.sequences)),
        reserve=_by_group(request.reserve, "reserve", _blocks),
        idle_blocks=_decode_idle(request.idle_blocks),
        units=tuple(_decode_unit(index, unit) for index, unit in enumerate(request.units)),
        live=request.live,
    )


def _decode_unit(index: int, message: cache_pb2.ReportedUnit) -> ReportedUnit:
    for name in ("root", "blocks"):
        if not message.HasField(name):
            raise bad_field(f"units[{index}].{name}", "missing")
    run = message.blocks
    _check_run(run, f"units[{index}].blocks")
    return ReportedUnit(decode_root(message.root), run.group, _blocks(run))


def _decode_idle(lists: Iterable[cache_pb2.IdleBlocks]) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    for index, idle in enumerate(lists):
        _check_place(idle.group, idle.tier, f"idle_blocks[{index}]")
        _lengthen(groups, idle.group, ())
        groups[idle.group] += tuple(idle.block_ids)
    return tuple(groups)


def _decode_contents(index: int, run: cache_pb2.ContentRun) -> ContentRun:
    root = decode_root(run.root) if run.HasField("root") else None
    if not run.blocks:
        raise bad_field(f"contents[{index}].blocks", "needed the blocks of at least one group")
    blocks: list[ReportedBlocks] = []
    for place, group_run in enumerate(run.blocks):
        _check_run(group_run, f"contents[{index}].blocks[{place}]")
        if any(group_run.group == other.group for other in blocks):
            raise bad_field(
                f"contents[{index}].blocks", f"at most one run per group, got two of group {group_run.group}"
            )
        blocks.append(ReportedBlocks(group_run.group, tuple(group_run.block_ids), tuple(group_run.generations)))
    return ContentRun(run.parent, root, run.tokens, len(blocks[0].blocks), tuple(blocks))


def _decode_reported(index: int, message: cache_pb2.ReportedSequence) -> ReportedSequence:
    for name in ("key", "root"):
        if not message.HasField(name):
            raise bad_field(f"sequences[{index}].{name}", "missing")
    return ReportedSequence(
        key=_decode_key(message.key),
        root=decode_root(message.root),
        tokens=message.tokens,
        num_computed_tokens=message.num_computed_tokens,
        num_cached_tokens=message.num_cached_tokens,
        tables=_by_group(message.tables, f"sequences[{index}].tables", _entries),
        scratch=_by_group(message.scratch, f"sequences[{index}].scratch", _blocks),
        boundaries=tuple(message.boundaries),
        encoder_computed=message.encoder_computed,
    )


# -- sequences


def decode_allocate_item(message: cache_pb2.AllocateItem) -> AllocateItem:
    """Decode a sequence that asks for a block table. Raises Refusal: BAD_FIELD."""
    for name in ("key", "root"):
        if not message.HasField(name):
            raise bad_field(name, "missing")
    return AllocateItem(
        key=_decode_key(message.key),
        root=decode_root(message.root),
        tokens=message.tokens,
        max_new_tokens=message.max_new_tokens,
        no_wait=message.no_wait,
        max_cached_tokens=message.max_cached_tokens if message.HasField("max_cached_tokens") else None,
        boundaries=tuple(message.boundaries),
        retention_interval=message.retention_interval_tokens,
        num_encoder_tokens=message.num_encoder_tokens,
    )


def _decode_update(message: cache_pb2.SequenceUpdate) -> SequenceUpdate:
    if not message.HasField("key"):
        raise bad_field("update.key", "missing")
    return SequenceUpdate(
        key=_decode_key(message.key),
        start=message.start,
        tokens=message.tokens,
        num_computed_tokens=message.num_computed_tokens,
        bound=_by_group(message.bound, "update.bound", _entries),
        scratch=_by_group(message.scratch, "update.scratch", _blocks),
        released=_by_group(message.released, "update.released", _entries),
        encoder_computed=message.encoder_computed,
    )


def decode_append_item(message: cache_pb2.AppendItem) -> AppendItem:
    """Decode an update of a live sequence. Raises Refusal: BAD_FIELD."""
    return AppendItem(_decode_update(message.update), message.want_blocks)


def decode_fork_item(message: cache_pb2.ForkItem) -> ForkItem:
    """Decode a fork that a worker has made. Raises Refusal: BAD_FIELD."""
    if not message.HasField("parent"):
        raise bad_field("parent", "missing")
    return ForkItem(_decode_key(message.parent), message.num_shared_blocks, _decode_update(message.update))


def encode_fork_outcome(outcome: AppendOutcome) -> cache_pb2.ForkResult:
    """Encode the answer to one ForkItem."""
    if not isinstance(outcome, Appended):
        return cache_pb2.ForkResult(status=status.of_refusal(outcome))
    return cache_pb2.ForkResult(status=status.ok(), num_sealed_tokens=outcome.num_sealed_tokens)


def decode_free_items(messages: Iterable[cache_pb2.FreeItem]) -> list[SequenceUpdate]:
    """Decode updates of sequences that end. Raises Refusal: BAD_FIELD for the whole call.

    FreeResponse has no place to answer items, and a malformed item is a bug of the worker, not a race that Free forgives.
    """
    items = []
    for index, message in enumerate(messages):
        try:
            items.append(_decode_update(message.update))
        except Refusal as refusal:
            raise bad_field(f"items[{index}].{refusal.field}", refusal.message) from None
    return items


def encode_allocate_outcome(outcome: AllocateOutcome) -> cache_pb2.AllocateResult:
    """Encode the answer to one AllocateItem."""
    if isinstance(outcome, Granted):
        tables = outcome.tables
        granted = cache_pb2.Granted(
            tables=[
                _encode_run(group, table.start, table.blocks, table.generations) for group, table in enumerate(tables)
            ],
            num_cached_tokens=outcome.num_cached_tokens,
            scratch=[
                _encode_run(group, 0, *zip(*table.scratch, strict=True))
                for group, table in enumerate(tables)
                if table.scratch
            ],
            boundaries=outcome.boundaries,
            encoder_cached=outcome.encoder_cached,
        )
        return cache_pb2.AllocateResult(status=status.ok(), granted=granted)
    if isinstance(outcome, Wait):
        wait = cache_pb2.Wait(leader=encode_key(outcome.leader), position=outcome.position)
        return cache_pb2.AllocateResult(status=status.ok(), wait=wait)
    return cache_pb2.AllocateResult(status=status.of_refusal(outcome))


def encode_append_outcome(outcome: AppendOutcome) -> cache_pb2.AppendResult:
    """Encode the answer to one AppendItem."""
    if not isinstance(outcome, Appended):
        return cache_pb2.AppendResult(status=status.of_refusal(outcome))
    result = cache_pb2.AppendResult(status=status.ok(), num_sealed_tokens=outcome.num_sealed_tokens)
    for group, entries in enumerate(outcome.new_entries):
        if entries:
            indexes, blocks, generations = zip(*entries, strict=True)
            result.tables.append(_encode_run(group, indexes[0], blocks, generations))
    return result
