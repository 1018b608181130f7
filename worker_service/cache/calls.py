"""Building the mutating calls out of what the worker holds and what the manager has acknowledged.

Every message states the part of a sequence that is not acknowledged yet. Nothing here changes a sequence: a call that is given up
leaves no trace, and the next one states the same again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List

from kvpool.v1 import cache_pb2, common_pb2

from .link import Call, Link, Stated
from .reserve import ReservedBlock
from .sequence import CacheSequence

TOKEN_BYTES = 4
"""Of a token id in a message."""


def pack_tokens(tokens: List[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", tokens)
    if packed.itemsize != 4:  # pragma: no cover - no such platform is known to run CPython 3.11
        raise RuntimeError("array('I') is not 32 bits wide here")
    return packed.tobytes()


def _update(sequence: CacheSequence, num_tokens: int, num_computed: int) -> tuple[cache_pb2.SequenceUpdate, Stated]:
    """What the manager does not know of a sequence yet, up to `num_tokens` tokens and `num_computed` computed ones."""
    start = sequence.acked_tokens
    first = sequence.acked_entries
    update = cache_pb2.SequenceUpdate(
        key=sequence.key,
        start=start,
        tokens=pack_tokens(sequence.tokens[start:num_tokens]),
        num_computed_tokens=num_computed,
    )
    if first < len(sequence.table):
        update.bound.add(
            group=0,
            tier=common_pb2.TIER_DEVICE,
            start_index=first,
            block_ids=sequence.table[first:],
            generations=sequence.generations[first:],
        )
    return update, Stated(sequence, num_tokens, len(sequence.table), num_computed)


def report_call(link: Link, part: cache_pb2.ReportRequest) -> Call:
    """Tell the next part of the report."""
    request = cache_pb2.ReportRequest()
    request.CopyFrom(part)
    request.uplink.CopyFrom(link.uplink(0, ()))
    return Call(request, (), ())


def free_call(link: Link, sequences: List[CacheSequence], wish: int, returned: List[ReservedBlock]) -> Call:
    """End these sequences, stating all that was computed so that it is sealed first."""
    request = cache_pb2.FreeRequest(uplink=link.uplink(wish, returned))
    stated = []
    for sequence in sequences:
        update, what = _update(sequence, max(len(sequence.tokens), sequence.acked_tokens), sequence.num_computed_tokens)
        request.items.add(update=update)
        stated.append(what)
    return Call(request, tuple(stated), tuple(returned))


def append_call(
    link: Link, sequences: List[CacheSequence], block_size: int, wish: int, returned: List[ReservedBlock]
) -> Call:
    """State the full computed blocks of these sequences, and the wish for the reserve."""
    request = cache_pb2.AppendRequest(uplink=link.uplink(wish, returned))
    stated = []
    for sequence in sequences:
        num_full = sequence.num_computed_tokens // block_size * block_size
        update, what = _update(sequence, max(num_full, sequence.acked_tokens), num_full)
        request.items.add(update=update)
        stated.append(what)
    return Call(request, tuple(stated), tuple(returned))


def allocate_call(link: Link, sequences: List[CacheSequence], wish: int, returned: List[ReservedBlock]) -> Call:
    """Ask for the block tables of these sequences, in this order."""
    request = cache_pb2.AllocateRequest(uplink=link.uplink(wish, returned))
    stated = []
    for sequence in sequences:
        prompt = pack_tokens(sequence.tokens)
        request.items.add(
            key=sequence.key,
            root=sequence.root,
            tokens=prompt,
            max_new_tokens=max(1, sequence.max_tokens - len(sequence.tokens)),
            no_wait=sequence.no_wait,
            max_cached_tokens=sequence.max_cached_tokens,
        )
        stated.append(Stated(sequence, len(sequence.tokens), 0, 0, prompt))
    return Call(request, tuple(stated), tuple(returned))
