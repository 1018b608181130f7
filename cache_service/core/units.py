"""Units: the KV of an encoder's output, to which the layers of a decoder attend.

A unit is all the KV of one encoder's input on one worker: ⌈tokens / block size⌉ blocks of the group with cross attention. It is
computed at once, when the encoder runs, and is whole or not at all: its blocks are sealed, shared, cached and evicted together. The
root of a sequence names the input by its SHA-256, so all sequences under one root need the same unit, and it belongs to the root
(`RootNode.units`), not to a node of a prefix. It takes no part in a hit: where it is gone the encoder runs again, and the decoder's
prefix is cached all the same.

What a sequence's table in that group is:

    Allocate, the root has a unit here      its blocks, pinned: `encoder_cached`
    Allocate, a sequence here computes it   nothing: wait for it
    Allocate, else                          fresh blocks, unsealed; the sequence is a leader of the root
    encoder_computed                        sealed, the root's unit; if the root has one by then, it stays the sequence's own
    the end                                 released as a whole; an own one becomes the root's if that has none, else it is free
"""

from __future__ import annotations

from .messages import AllocateItem, SequenceUpdate, Wait
from .prefix_tree import Node
from .refusal import Reason, Refusal, bad_field
from .session import Sequence, Session

DIGEST_BYTES = 32
"""SHA-256."""


def num_blocks(session: Session, item: AllocateItem) -> int:
    """Blocks of the unit that the sequence needs; 0 without a group with cross attention."""
    return -(-item.num_encoder_tokens // session.block_size)


def check_item(session: Session, item: AllocateItem) -> None:
    """Refuse an encoder's input that the worker does not take, or that can never fit."""
    pool = session.unit_pool
    if pool is None:
        if item.num_encoder_tokens:
            raise bad_field(
                "num_encoder_tokens",
                f"worker {session.worker_id!r} is registered without a group with cross attention, got {item.num_encoder_tokens}",
            )
        return
    most = session.registration.layout.groups[pool.slot].max_encoder_tokens
    if not 1 <= item.num_encoder_tokens <= most:
        raise bad_field(
            "num_encoder_tokens", f"worker {session.worker_id!r} takes 1 to {most}, got {item.num_encoder_tokens}"
        )
    if len(item.root.input_digest) != DIGEST_BYTES:
        raise bad_field("root.input_digest", "needed the SHA-256 of the encoder's input, which the sequence refers to")
    needed = num_blocks(session, item)
    if needed > pool.capacity:
        raise Refusal(
            Reason.NEVER_FITS,
            f"{item.num_encoder_tokens} tokens of an encoder's input need {needed} blocks of {session.block_size} of group "
            f"{pool.slot}; the whole pool of worker {session.worker_id!r} has {pool.capacity}: shorten the input, or give the "
            "group more blocks (--cross-blocks)",
            field="num_encoder_tokens",
        )


def check_length(session: Session, item: AllocateItem, blocks: int) -> None:
    """Refuse a sequence whose input, by its digest, is one that is known with another length."""
    if blocks != num_blocks(session, item):
        raise bad_field(
            "num_encoder_tokens",
            f"{item.num_encoder_tokens} tokens need {num_blocks(session, item)} blocks, but the KV of the input with this digest "
            f"is known in {blocks}: equal digests are of equal inputs",
        )


def cached_unit(session: Session, root: Node | None, item: AllocateItem) -> tuple[int, ...]:
    """The blocks of the unit that the sequence needs, if this worker holds it and the item wants to be served from the cache."""
    assert session.unit_pool is not None
    if root is None or item.max_cached_tokens == 0:
        return ()
    blocks = session.unit_pool.unit(root)
    if blocks:
        check_length(session, item, len(blocks))
    return blocks


def unit_in_flight(session: Session, root: Node | None, item: AllocateItem) -> Wait | None:
    """The sequence of this worker that is about to run the encoder over the same input, if there is one."""
    if root is None:
        return None
    for leader in root.iter_leaders():
        if leader.holder is session.holder and not leader.fenced and leader.key.sequence_id != item.key.sequence_id:
            return Wait(leader.key, 0)
    return None


def enter(sequence: Sequence, *, is_cached: bool) -> None:
    """The sequence has got its table: a pinned unit, or fresh blocks for one."""
    sequence.encoder_computed = is_cached
    if not is_cached:
        sequence.root.add_leader(sequence)


def check_update(sequence: Sequence, update: SequenceUpdate, num_computed_tokens: int) -> None:
    """Refuse tokens that are computed without the encoder, and a unit that the sequence cannot have."""
    pool = sequence.session.unit_pool
    if pool is None:
        if update.encoder_computed:
            raise bad_field(
                "encoder_computed",
                f"worker {sequence.session.worker_id!r} is registered without a group with cross attention",
            )
        return
    is_computed = sequence.encoder_computed or update.encoder_computed
    if num_computed_tokens > sequence.num_cached_tokens and not is_computed:
        raise bad_field(
            "encoder_computed",
            f"{num_computed_tokens} tokens are computed, {sequence.num_cached_tokens} of them cached; the others attend to the "
            "encoder's output, whose KV is not stated to be complete",
        )
    if len(update.bound) > pool.slot and any(
        entry.table_index >= len(sequence.tables[pool.slot]) for entry in update.bound[pool.slot]
    ):
        raise bad_field("bound", f"a table of group {pool.slot}, which has cross attention, never grows")


def take_update(sequence: Sequence) -> None:
    """The encoder's KV is complete: from now on it is the unit of the root, unless that has one."""
    if sequence.encoder_computed:
        return
    sequence.encoder_computed = True
    sequence.root.drop_leader(sequence)
    _seal(sequence)


def _seal(sequence: Sequence) -> None:
    pool = sequence.session.unit_pool
    assert pool is not None
    if not pool.unit(sequence.root):
        pool.seal_unit(sequence.tables[pool.slot], sequence.root)


def release(sequence: Sequence) -> None:
    """The sequence ends."""
    pool = sequence.session.unit_pool
    assert pool is not None
    if sequence.encoder_computed:
        _seal(sequence)
    pool.release(*sequence.tables[pool.slot])


def leave(sequence: Sequence) -> None:
    """The sequence is no leader of its root any more. Its blocks stay as they are."""
    if not sequence.encoder_computed:
        sequence.root.drop_leader(sequence)
