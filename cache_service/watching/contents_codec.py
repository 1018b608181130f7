"""Encodes contents. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.v1 import cache_pb2

from ..core.contents import Cleared, Event, Removed, Stored
from ..worker_codec import encode_key, encode_unsalted_root


def encode(
    epoch: int, events: Iterable[Event], *, whole_begins: bool = False, whole_ends: bool = False
) -> cache_pb2.WatchResponse:
    """Encode one message."""
    return cache_pb2.WatchResponse(
        contents=cache_pb2.Contents(
            epoch=epoch, whole_begins=whole_begins, whole_ends=whole_ends, events=map(_encode_event, events)
        )
    )


def _encode_event(event: Event) -> cache_pb2.ContentEvent:
    if isinstance(event, Stored):
        return cache_pb2.ContentEvent(number=event.number, stored=_encode_stored(event))
    if isinstance(event, Removed):
        removed = cache_pb2.ContentRemoved(
            node=event.node, session=event.session, group=event.group, forgotten=event.forgotten
        )
        return cache_pb2.ContentEvent(number=event.number, removed=removed)
    if isinstance(event, Cleared):
        cleared = cache_pb2.PoolCleared(session=event.session, worker_id=event.worker_id)
        return cache_pb2.ContentEvent(number=event.number, cleared=cleared)
    served = cache_pb2.ContentServed(
        sequence=encode_key(event.sequence),
        session=event.session,
        node=event.node,
        num_cached_tokens=event.num_cached_tokens,
        num_prompt_tokens=event.num_prompt_tokens,
    )
    return cache_pb2.ContentEvent(number=event.number, served=served)


def _encode_stored(stored: Stored) -> cache_pb2.ContentStored:
    return cache_pb2.ContentStored(
        node=stored.node,
        parent=stored.parent,
        root=None if stored.root is None else encode_unsalted_root(stored.root),
        salt_number=stored.salt_number,
        tokens=stored.tokens,
        block_hash=stored.block_hash,
        session=stored.session,
        worker_id=stored.worker_id,
        sequence=None if stored.sequence is None else encode_key(stored.sequence),
        block_size=stored.block_size,
        group=stored.group,
    )
