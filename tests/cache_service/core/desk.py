"""A worker for tests that tell one story: synchronous, honest, and every call of it goes to manager and model alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.hashing import HashFunction
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    BlockCounts,
    Grant,
    Granted,
    Limits,
    Reply,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, registration, token_bytes
from tests.cache_service.core.model import Refused

ROOT = Root(FINGERPRINT)


class Table(NamedTuple):
    """What was granted of the first group."""

    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    num_cached_tokens: int


def first_table(granted: Granted) -> Table:
    """Of the first group."""
    return Table(*granted.tables[0], granted.num_cached_tokens)


class Desk:
    """One worker. Sequences are named by their key or, in attempt 1 and round 0, by their id."""

    def __init__(
        self,
        num_blocks: int | tuple[int, ...] = 65,
        block_size: int = 4,
        *,
        worker_id: str = "w1",
        lockstep: Lockstep | None = None,
        hash_function: HashFunction | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.lockstep = lockstep or Lockstep(hash_function, limits)
        self.manager = self.lockstep.manager
        number = self.lockstep.register(registration(worker_id, num_blocks=num_blocks, block_size=block_size))
        assert isinstance(number, int)
        self.number = number
        self.worker_id = worker_id
        self.block_size = block_size
        self.call_no = 0
        self.tokens: dict[SequenceKey, list[int]] = {}

    @property
    def session(self) -> Session:
        """The manager's side of it."""
        return self.manager.worker(self.worker_id)

    @property
    def pool(self) -> BlockPool:
        """The blocks of its first group."""
        return self.session.pools[0]

    @property
    def counts(self) -> BlockCounts:
        """The blocks of its first group by state."""
        return self.pool.counts()

    @property
    def free_list(self) -> list[int]:
        """Its free blocks in the order in which they will be granted."""
        return list(self.pool.free_list())

    def table(self, name: str | SequenceKey) -> list[int]:
        """The block table of a live sequence."""
        named = _key(name)
        return list(self.session.sequences[named.sequence_id, named.attempt].tables[0])

    def uplink(
        self,
        *,
        downlink_ack: int = 0,
        reserve_wish: int | None = None,
        returned: Sequence[ReservedBlock] = (),
    ) -> Uplink:
        """The head of the next call."""
        self.call_no += 1
        wishes = () if reserve_wish is None else (reserve_wish,)
        return Uplink(self.number, self.call_no, downlink_ack, wishes, (tuple(returned),) if returned else ())

    def item(
        self,
        name: str | SequenceKey,
        tokens: Sequence[int],
        *,
        root: Root = ROOT,
        no_wait: bool = False,
        max_new_tokens: int = 1,
        max_cached_tokens: int | None = None,
    ) -> AllocateItem:
        """One sequence of an Allocate."""
        self.tokens[_key(name)] = list(tokens)
        return AllocateItem(_key(name), root, token_bytes(tokens), max_new_tokens, no_wait, max_cached_tokens)

    def allocate_batch(self, *items: AllocateItem) -> list[Granted | Wait | Refused]:
        """One Allocate of several sequences."""
        result = self.lockstep.allocate(self.uplink(), *items)
        assert not isinstance(result, Refused), result
        return result[0]

    def allocate(self, name: str | SequenceKey, tokens: Sequence[int], **wanted: Any) -> Granted | Wait | Refused:
        """One Allocate of one sequence; `wanted` as in `item`."""
        return self.allocate_batch(self.item(name, tokens, **wanted))[0]

    def grant(self, name: str | SequenceKey, tokens: Sequence[int], **wanted: Any) -> Table:
        """An Allocate that is granted; `wanted` as in `item`."""
        outcome = self.allocate(name, tokens, **wanted)
        assert isinstance(outcome, Granted), outcome
        return first_table(outcome)

    def report(
        self,
        name: str | SequenceKey,
        num_computed_tokens: int | None = None,
        *,
        new_tokens: Sequence[int] = (),
        bound: Sequence[TableEntry] = (),
        want_blocks: int = 0,
    ) -> Appended | Refused:
        """One Append: `num_computed_tokens` are computed, by default all that are known before `new_tokens`."""
        named = _key(name)
        known = self.tokens[named]
        computed = len(known) if num_computed_tokens is None else num_computed_tokens
        update = SequenceUpdate(named, len(known), token_bytes(new_tokens), computed, (tuple(bound),) if bound else ())
        result = self.lockstep.append(self.uplink(), AppendItem(update, want_blocks))
        assert not isinstance(result, Refused), result
        if isinstance(result[0][0], Appended):
            known += new_tokens
        return result[0][0]

    def refill(self, reserve_wish: int) -> list[ReservedBlock]:
        """Ask for a reserve; returns the blocks of all grants not acknowledged."""
        result = self.lockstep.free(self.uplink(reserve_wish=reserve_wish))
        assert isinstance(result, Reply), result
        grants = [entry.entry for entry in result.entries if isinstance(entry.entry, Grant)]
        return [ReservedBlock(block, grant.generation) for grant in grants for block in grant.blocks]

    def free(self, name: str | SequenceKey, num_computed_tokens: int = 0) -> Reply:
        """One Free."""
        result = self.lockstep.free(self.uplink(), SequenceUpdate(_key(name), 0, b"", num_computed_tokens, ()))
        assert isinstance(result, Reply), result
        return result

    def serve(self, name: str | SequenceKey, tokens: Sequence[int], *, root: Root = ROOT) -> int:
        """A whole request with max_tokens=1: granted, prefilled, freed. Returns the number of cached tokens."""
        granted = self.grant(name, tokens, root=root)
        self.free(name, len(tokens))
        return granted.num_cached_tokens


def _key(name: str | SequenceKey) -> SequenceKey:
    return key(name) if isinstance(name, str) else name
