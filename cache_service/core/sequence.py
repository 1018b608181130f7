"""A sequence: one request on the cache side of one worker, as the manager knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from .copies import Holder
from .downlink import Downlink
from .messages import TOKEN_BYTES, Limits, SequenceKey
from .prefix_tree import Node, RootNode
from .refusal import bad_field


class Owner(Protocol):
    """The session that a sequence lives on: what those ask of it who know the sequence only."""

    number: int
    holder: Holder
    downlink: Downlink

    @property
    def worker_id(self) -> str:
        """Name of the worker."""

    @property
    def retired(self) -> bool:
        """Whether it has ended."""


def require_key(key: SequenceKey, limits: Limits, field: str) -> None:
    """Refuse a key that no sequence can have. Raises Refusal: BAD_FIELD."""
    num_id_bytes = len(key.sequence_id.encode())
    if not 1 <= num_id_bytes <= limits.max_id_bytes:
        raise bad_field(f"{field}.sequence_id", f"needed 1 to {limits.max_id_bytes} bytes, got {num_id_bytes}")
    if key.attempt < 1:
        raise bad_field(f"{field}.attempt", "needed 1 or more: attempts are counted from 1")


class KeptBoundaries:
    """Boundaries, in blocks, that somebody has asked for: some, and the multiples of an interval, if that is not 0."""

    __slots__ = ("_interval", "_some")

    def __init__(self, some: Iterable[int] = (), interval: int = 0) -> None:
        self._some = frozenset(some)
        self._interval = interval

    def __contains__(self, boundary: int) -> bool:
        return boundary in self._some or bool(self._interval and boundary % self._interval == 0)

    def between(self, first: int, last: int) -> Iterator[int]:
        """Those of first … last: the single ones, in order, then the multiples."""
        yield from sorted(boundary for boundary in self._some if first <= boundary <= last)
        if self._interval:
            yield from range(-(-first // self._interval) * self._interval, last + 1, self._interval)


NONE_KEPT = KeptBoundaries()


class Sequence:
    """One (sequence_id, attempt) on one session, in its current round."""

    __slots__ = (
        "boundaries",
        "encoder_computed",
        "fenced",
        "kept",
        "key",
        "nodes",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_named",
        "num_sealed",
        "root",
        "session",
        "tables",
        "tokens",
    )

    def __init__(self, key: SequenceKey, session: Owner, root: RootNode, tokens: bytes) -> None:
        self.key = key
        self.session = session
        self.root = root
        """Parent of the first node."""
        self.tokens = bytearray(tokens)
        """All tokens known: the prompt and those that Append has stated since."""
        self.tables: list[Any] = []
        """What each group keeps of the sequence, by slot; in a whole group the block ids from position 0 on. Whoever grants the
        blocks sets it, and `num_named`."""
        self.boundaries: tuple[int, ...] = ()
        """Boundaries in blocks, ascending, at which the worker was asked to name windows and up to which it is not known to have
        computed."""
        self.kept = NONE_KEPT
        """Boundaries that somebody has asked for: their windows are kept like hits."""
        self.nodes: list[Node] = []
        """Path of the prompt's full blocks, and of others as they are sealed."""
        self.num_sealed = 0
        """Leading blocks of the tables that are sealed, hits included."""
        self.num_cached_tokens = 0
        """Tokens served from the cache when the sequence was granted."""
        self.num_computed_tokens = 0
        """Tokens whose KV the worker has reported as completed, hits included."""
        self.num_named: list[int] = []
        """Leading entries of each group's table that the worker has named or Allocate has granted, by group."""
        self.encoder_computed = False
        """With cross attention: the KV of the encoder's input is complete."""
        self.fenced = False
        """A larger attempt lives on another session; only Free is accepted."""

    def __repr__(self) -> str:
        key = self.key
        return (
            f"<Sequence {key.sequence_id!r} attempt={key.attempt} round={key.round} tokens={self.num_tokens} "
            f"computed={self.num_computed_tokens} tables={self.tables}{' fenced' if self.fenced else ''}>"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def holder(self) -> Holder:
        """Under which the prefix tree knows the pools of its tables."""
        return self.session.holder

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, in all groups."""
        return sum(map(len, self.tables))
