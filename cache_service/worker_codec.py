"""The calls of workers: protobuf to core messages and back. Pure functions.

Decoding checks the shape: other groups, other tiers, lists of different length and missing parts are refused as BAD_FIELD or
UNSUPPORTED. All other checks are the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    ContentRun,
    DownlinkEntry,
    Grant,
    Granted,
    PoolConfig,
    Registration,
    Reply,
    ReportedSequence,
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
from .core.refusal import Reason, Refusal, bad_field
from .core.session_key import SessionKey

Message = TypeVar("Message")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

GROUP = 0
"""The one group of this version."""

TIER = common_pb2.TIER_DEVICE
"""The one tier of this version."""


class Batch(NamedTuple, Generic[Item]):
    """A decoded batch: the items of good shape, and what is wrong with the others, by their place in the request."""

    items: list[Item]
    refusals: dict[int, Refusal]

    def merge(self, outcomes: Iterable[Outcome]) -> list[Outcome | Refusal]:
        """One outcome for each item of the request, in its order, given those of the good items."""
        rest = iter(outcomes)
        count = len(self.items) + len(self.refusals)
        return [self.refusals[i] if i in self.refusals else next(rest) for i in range(count)]


def decode_batch(messages: Iterable[Message], decode: Callable[[Message], Item]) -> Batch[Item]:
    """Decode each item; a malformed one affects no other."""
    batch: Batch[Item] = Batch([], {})
    for index, message in enumerate(messages):
        try:
            batch.items.append(decode(message))
        except Refusal as refusal:
            # Without its traceback, which would be a cycle: automatic collection is off.
            batch.refusals[index] = refusal.with_traceback(None)
    return batch


# -- the parts


def _check_place(group: int, tier: common_pb2.Tier.ValueType, field: str) -> None:
    if group != GROUP:
        raise bad_field(f"{field}.group", f"this version has group {GROUP} only, got {group}")
    if tier != TIER:
        name = common_pb2.Tier.Name(tier) if tier in common_pb2.Tier.values() else str(tier)
        raise bad_field(f"{field}.tier", f"this version has TIER_DEVICE only, got {name}")


def _check_run(run: common_pb2.BlockRun, field: str) -> None:
    _check_place(run.group, run.tier, field)
    if len(run.block_ids) != len(run.generations):
        raise bad_field(
            field,
            f"block_ids and generations must have equal length, got {len(run.block_ids)} and {len(run.generations)}",
        )


def _decode_key(message: common_pb2.SequenceKey) -> SequenceKey:
    return SequenceKey(message.sequence_id, message.attempt, message.round)


def decode_root(message: common_pb2.Root) -> Root:
    """What makes KV exchangeable. The core checks the lengths where they matter."""
    return Root(message.model_fingerprint, message.adapter, message.tenant_salt, message.input_digest)


def encode_unsalted_root(root: Root) -> common_pb2.Root:
    """A root for those who may not learn the salt: without it."""
    return common_pb2.Root(
        model_fingerprint=root.model_fingerprint, adapter=root.adapter, input_digest=root.input_digest
    )


def decode_load(message: common_pb2.WorkerLoad) -> WorkerLoad:
    """What a worker is busy with."""
    return WorkerLoad(message.num_running, message.num_waiting, message.num_uncomputed_tokens)


def encode_key(key: SequenceKey) -> common_pb2.SequenceKey:
    """A sequence's key."""
    return common_pb2.SequenceKey(sequence_id=key.sequence_id, attempt=key.attempt, round=key.round)


def encode_load(load: WorkerLoad) -> common_pb2.WorkerLoad:
    """What a worker is busy with."""
    return common_pb2.WorkerLoad(**load._asdict())


def encode_counts(counts: BlockCounts) -> common_pb2.BlockCounts:
    """The counts of the one pool."""
    return common_pb2.BlockCounts(group=GROUP, tier=TIER, **counts._asdict())


def _encode_run(start_index: int, blocks: Sequence[int], generations: Sequence[int]) -> common_pb2.BlockRun:
    return common_pb2.BlockRun(
        group=GROUP, tier=TIER, start_index=start_index, block_ids=blocks, generations=generations
    )


# -- sessions


def decode_registration(request: cache_pb2.RegisterRequest) -> Registration:
    """A worker's introduction. Raises Refusal: BAD_FIELD, UNSUPPORTED."""
    return Registration(
        worker_id=request.worker_id,
        incarnation=request.incarnation,
        register_no=request.register_no,
        address=request.address,
        model_name=request.model_name,
        model_fingerprint=request.model_fingerprint,
        pool=_decode_pool(request.kv_cache_config),
        max_model_len=request.max_model_len,
        engine=request.engine,
        holds_state=request.holds_state,
        process_key=request.process_key,
        predecessor_key=request.predecessor_key,
    )


def _decode_pool(config: common_pb2.KVCacheConfig) -> PoolConfig:
    for name, found in (("groups", config.groups), ("pools", config.pools)):
        if len(found) != 1:
            raise bad_field(f"kv_cache_config.{name}", f"this version takes exactly one, got {len(found)}")
    group, pool = config.groups[0], config.pools[0]
    if group.group != GROUP:
        raise bad_field("kv_cache_config.groups[0].group", f"this version has group {GROUP} only, got {group.group}")
    spec = group.WhichOneof("spec")
    if spec != "full_attention":
        raise Refusal(
            Reason.UNSUPPORTED,
            f"kv_cache_config.groups[0]: this version serves full_attention only, got {spec or 'no spec'}; register windowed "
            "layers as full attention and apply the window in the kernel",
            field="kv_cache_config.groups[0]",
        )
    _check_place(pool.group, pool.tier, "kv_cache_config.pools[0]")
    return PoolConfig(config.block_size, pool.num_blocks, group.bytes_per_block)


# -- the link


def decode_uplink(
    request: cache_pb2.AllocateRequest | cache_pb2.AppendRequest | cache_pb2.FreeRequest | cache_pb2.ReportRequest,
) -> Uplink:
    """What leads a mutating call. Raises Refusal: BAD_FIELD."""
    if not request.HasField("uplink"):
        raise bad_field("uplink", "a mutating call needs its session and call_no")
    message = request.uplink
    if len(message.reserve_wishes) > 1:
        raise bad_field("uplink.reserve_wishes", f"at most one per group, got {len(message.reserve_wishes)}")
    wish: int | None = None
    if message.reserve_wishes:
        _check_place(message.reserve_wishes[0].group, message.reserve_wishes[0].tier, "uplink.reserve_wishes[0]")
        wish = message.reserve_wishes[0].num_blocks
    returned = _decode_blocks(message.returned, "uplink.returned")
    key = SessionKey(message.session_key)
    return Uplink(message.session, message.call_no, message.downlink_ack, wish, returned, key)


def _decode_blocks(runs: Iterable[common_pb2.BlockRun], field: str) -> tuple[ReservedBlock, ...]:
    """Runs that are sets of blocks."""
    blocks: list[ReservedBlock] = []
    for index, run in enumerate(runs):
        _check_run(run, f"{field}[{index}]")
        blocks += map(ReservedBlock, run.block_ids, run.generations)
    return tuple(blocks)


def _decode_entries(runs: Iterable[common_pb2.BlockRun], field: str) -> tuple[TableEntry, ...]:
    """Runs that are pieces of one block table."""
    entries: list[TableEntry] = []
    for index, run in enumerate(runs):
        _check_run(run, f"{field}[{index}]")
        indexes = range(run.start_index, run.start_index + len(run.block_ids))
        entries += map(TableEntry, indexes, run.block_ids, run.generations)
    return tuple(entries)


def _encode_entry(entry: DownlinkEntry) -> cache_pb2.DownlinkEntry:
    number, content = entry
    if isinstance(content, Grant):
        run = _encode_run(0, content.blocks, (content.generation,) * len(content.blocks))
        return cache_pb2.DownlinkEntry(number=number, grant=run)
    if isinstance(content, Stop):
        return cache_pb2.DownlinkEntry(number=number, stop=encode_key(content.key))
    grace = content.grace_seconds
    order = cache_pb2.DrainOrder(grace_ms=None if grace is None else round(grace * 1000))
    return cache_pb2.DownlinkEntry(number=number, drain=order)


def encode_downlink(reply: Reply) -> cache_pb2.Downlink:
    """What ends every reply on the link."""
    return cache_pb2.Downlink(entries=map(_encode_entry, reply.entries), counts=[encode_counts(reply.counts)])


# -- reports


def decode_report(request: cache_pb2.ReportRequest) -> ReportPart:
    """One part of what a worker holds. Raises Refusal: BAD_FIELD."""
    return ReportPart(
        part=request.part,
        last=request.last,
        contents=tuple(map(_decode_contents, request.contents)),
        sequences=tuple(_decode_reported(index, sequence) for index, sequence in enumerate(request.sequences)),
        reserve=_decode_blocks(request.reserve, "reserve"),
        idle_blocks=tuple(request.idle_blocks),
    )


def _decode_contents(run: cache_pb2.ContentRun) -> ContentRun:
    root = decode_root(run.root) if run.HasField("root") else None
    return ContentRun(run.parent, root, run.tokens, tuple(run.block_ids), tuple(run.generations))


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
        table=_decode_entries(message.tables, f"sequences[{index}].tables"),
    )


# -- sequences


def decode_allocate_item(message: cache_pb2.AllocateItem) -> AllocateItem:
    """A sequence that wants a block table. Raises Refusal: BAD_FIELD."""
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
    )


def _decode_update(message: cache_pb2.SequenceUpdate) -> SequenceUpdate:
    if not message.HasField("key"):
        raise bad_field("update.key", "missing")
    if message.released:
        raise bad_field("update.released", "must be empty in this version: it has no sliding windows")
    return SequenceUpdate(
        key=_decode_key(message.key),
        start=message.start,
        tokens=message.tokens,
        num_computed_tokens=message.num_computed_tokens,
        bound=_decode_entries(message.bound, "update.bound"),
    )


def decode_append_item(message: cache_pb2.AppendItem) -> AppendItem:
    """An update of a live sequence. Raises Refusal: BAD_FIELD."""
    return AppendItem(_decode_update(message.update), message.want_blocks)


def decode_free_items(messages: Iterable[cache_pb2.FreeItem]) -> list[SequenceUpdate]:
    """Updates of sequences that end. Raises Refusal: BAD_FIELD for the whole call.

    FreeResponse has no place to answer items, and what is malformed here is a bug of the worker, not a race that Free forgives.
    """
    items = []
    for index, message in enumerate(messages):
        try:
            items.append(_decode_update(message.update))
        except Refusal as refusal:
            raise bad_field(f"items[{index}].{refusal.field}", refusal.message) from None
    return items


def encode_allocate_outcome(outcome: AllocateOutcome) -> cache_pb2.AllocateResult:
    """The answer to one AllocateItem."""
    if isinstance(outcome, Granted):
        table = _encode_run(0, outcome.blocks, outcome.generations)
        granted = cache_pb2.Granted(tables=[table], num_cached_tokens=outcome.num_cached_tokens)
        return cache_pb2.AllocateResult(status=status.ok(), granted=granted)
    if isinstance(outcome, Wait):
        wait = cache_pb2.Wait(leader=encode_key(outcome.leader), position=outcome.position)
        return cache_pb2.AllocateResult(status=status.ok(), wait=wait)
    return cache_pb2.AllocateResult(status=status.of_refusal(outcome))


def encode_append_outcome(outcome: AppendOutcome) -> cache_pb2.AppendResult:
    """The answer to one AppendItem."""
    if not isinstance(outcome, Appended):
        return cache_pb2.AppendResult(status=status.of_refusal(outcome))
    result = cache_pb2.AppendResult(status=status.ok(), num_sealed_tokens=outcome.num_sealed_tokens)
    if outcome.new_entries:
        indexes, blocks, generations = zip(*outcome.new_entries, strict=True)
        result.tables.append(_encode_run(indexes[0], blocks, generations))
    return result
