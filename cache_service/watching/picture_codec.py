"""Encodes pictures, in parts. Pure functions."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Final

from kvpool.v1 import cache_pb2

from ..client_codec import BLOCK_STATES, encode_facts, encode_sequence
from ..core.block_mirror import Columns
from ..core.pictures import Change, SessionChange, Wish
from ..core.refusal import bad_field
from ..group_codec import TIER
from ..worker_codec import encode_key

_PART_WEIGHT: Final = 4096
"""Weight of one message, which delays other calls for some 0.1 ms. A block weighs 1."""
_SEQUENCE_WEIGHT: Final = 32
_WORKER_WEIGHT: Final = 256

_MIN_INTERVAL_MS: Final = 100
_MAX_INTERVAL_MS: Final = 10_000
_DEFAULT_INTERVAL_MS: Final = 1_000

_WIRE_STATES: Final = bytes(BLOCK_STATES.get(state, cache_pb2.BLOCK_STATE_UNSPECIFIED) for state in range(256))  # type: ignore[call-overload]
"""Value on the wire of each State, by its number."""


def decode_options(options: cache_pb2.PictureOptions, max_id_bytes: int) -> tuple[Wish, float]:
    """Decode what a viewer wants to see, and its interval in seconds. Raises Refusal: BAD_FIELD."""
    interval_ms = options.interval_ms or _DEFAULT_INTERVAL_MS
    if not _MIN_INTERVAL_MS <= interval_ms <= _MAX_INTERVAL_MS:
        raise bad_field(
            "picture.interval_ms",
            f"needed {_MIN_INTERVAL_MS} to {_MAX_INTERVAL_MS} ms, or 0 for the default, got {interval_ms}",
        )
    if len(options.worker_id.encode()) > max_id_bytes:
        raise bad_field("picture.worker_id", f"at most {max_id_bytes} bytes, got {len(options.worker_id.encode())}")
    return Wish(options.worker_id, options.include_blocks, options.max_sequences), interval_ms / 1000


def encode(change: Change) -> Iterator[cache_pb2.WatchResponse]:
    """Yield the messages of one picture, each made when it is asked for."""
    part = cache_pb2.Picture(epoch=change.epoch, number=change.number, whole=change.is_whole)
    part.ended_sessions.extend(change.ended_sessions)
    if change.cluster is not None:
        part.cluster.CopyFrom(
            cache_pb2.ClusterPicture(
                num_prefix_nodes=change.cluster.num_prefix_nodes,
                budget=cache_pb2.Budget(**change.cluster.budget._asdict()),
                num_audits=change.cluster.num_audits,
                num_violations=change.cluster.num_violations,
            )
        )
    weight = 0
    for session in change.sessions:
        for piece, piece_weight in _pieces(session):
            if weight and weight + piece_weight > _PART_WEIGHT:
                yield cache_pb2.WatchResponse(picture=part)
                part, weight = cache_pb2.Picture(epoch=change.epoch, number=change.number), 0
            if part.workers and part.workers[-1].session == piece.session:
                part.workers[-1].MergeFrom(piece)
            else:
                part.workers.append(piece)
            weight += piece_weight
    part.complete = True
    yield cache_pb2.WatchResponse(picture=part)


def _pieces(change: SessionChange) -> Iterator[tuple[cache_pb2.WorkerPicture, int]]:
    """Yield the changes of one session in pieces, each with its weight."""
    session = change.session
    if change.facts is not None:
        yield cache_pb2.WorkerPicture(session=session, worker=encode_facts(change.facts)), _WORKER_WEIGHT
    step = _PART_WEIGHT // _SEQUENCE_WEIGHT
    for begin in range(0, len(change.ended_sequences), step):
        keys = change.ended_sequences[begin : begin + step]
        yield (
            cache_pb2.WorkerPicture(session=session, ended_sequences=map(encode_key, keys)),
            len(keys) * _SEQUENCE_WEIGHT,
        )
    for begin in range(0, len(change.sequences), step):
        sequences = change.sequences[begin : begin + step]
        yield (
            cache_pb2.WorkerPicture(session=session, sequences=map(encode_sequence, sequences)),
            len(sequences) * _SEQUENCE_WEIGHT,
        )
    for group, columns in enumerate(change.blocks):
        if columns is None:
            continue
        # The null block, which is 0, is left out.
        first = 1 if columns.ids is None else 0
        for begin in range(first, columns.num_blocks, _PART_WEIGHT):
            end = min(begin + _PART_WEIGHT, columns.num_blocks)
            blocks = _encode_blocks(group, columns.part(begin, end), begin)
            yield cache_pb2.WorkerPicture(session=session, blocks=[blocks]), end - begin


def _encode_blocks(group: int, columns: Columns, first: int) -> cache_pb2.BlockPicture:
    return cache_pb2.BlockPicture(
        group=group,
        tier=TIER,
        block_ids=columns.ids,
        first_block=first if columns.ids is None else 0,
        states=columns.states.translate(_WIRE_STATES),
        ref_counts=_little_endian(columns.ref_counts),
        last_used=_little_endian(columns.last_used),
        salt_numbers=_little_endian(columns.salt_numbers),
    )


def _little_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
